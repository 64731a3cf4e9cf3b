"""Values that `/v1` answers as JSON, described where they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar, dataclass_transform

from typing_extensions import get_original_bases, is_typeddict

T = TypeVar("T")

DOCSTRINGS: Final = {"use_attribute_docstrings": True}
"""A class's `__pydantic_config__`, which pydantic reads; the core does not import pydantic for this."""


def described_keys(cls: type[T]) -> type[T]:
    """Have the docstrings of a TypedDict, also those below its keys, describe it in OpenAPI.

    For what lacks keys; `typing_extensions` has the TypedDict that pydantic reads under every Python.
    """

    def inherit(schema: dict[str, Any]) -> None:
        from pydantic import TypeAdapter  # which reads no docstrings of keys that are inherited

        for base in filter(is_typeddict, get_original_bases(cls)):
            for key, inherited in TypeAdapter(base).json_schema()["properties"].items():
                schema["properties"][key] = inherited | schema["properties"][key]

    cls.__pydantic_config__ = {**DOCSTRINGS, "json_schema_extra": inherit}  # type: ignore[attr-defined]
    return cls


@dataclass_transform(kw_only_default=True, frozen_default=True)
def described(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose docstrings, also those below its fields, describe it in OpenAPI."""
    cls.__pydantic_config__ = DOCSTRINGS  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)
