"""Values that `/v1` answers as JSON, described where they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def described(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose docstrings, also those below its fields, describe it in OpenAPI."""
    # Read by pydantic, which the core does not import for this.
    cls.__pydantic_config__ = {"use_attribute_docstrings": True}  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)
