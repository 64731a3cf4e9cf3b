"""Import packages that only some installations have."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from corpus_server.errors import MissingPackage


def optional_package(name: str, *, extra: str, purpose: str) -> Any:
    """Import and return a package of one of the extras, for example `obstore` of `stores`.

    `purpose` is what needs it, as the subject of a sentence: `a Parquet file`.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackage(
            f"{purpose} needs the package {name!r}, which is not installed ({error})",
            received=name,
            remedy=f"pip install 'corpus-server[{extra}]'",
        ) from error
