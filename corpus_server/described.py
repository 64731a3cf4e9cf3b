"""Values that `/v1` answers as JSON, described where they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar, dataclass_transform

T = TypeVar("T")

DOCSTRINGS: Final = {"use_attribute_docstrings": True}
"""A class's `__pydantic_config__`, which pydantic reads; the core does not import pydantic for this."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def described(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose docstrings, also those below its fields, describe it in OpenAPI."""
    cls.__pydantic_config__ = DOCSTRINGS  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)
