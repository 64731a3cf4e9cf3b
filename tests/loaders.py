"""Loaders for tests: options of all groups side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from corpus_client import CorpusLoader, Network, Placement, Staging

GROUPS: dict[str, type[Any]] = {"network": Network, "staging": Staging, "placement": Placement}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Put options into their groups: `verify=False` becomes `network=Network(verify=False)`."""
    found = dict(options)
    for group, kind in GROUPS.items():
        names = {field.name for field in dataclasses.fields(kind)} & set(found)
        if names:
            found[group] = kind(**{name: found.pop(name) for name in names})
    return found


def open_loader(urls: str | list[str], **options: Any) -> CorpusLoader:
    """Make a loader; `start_step` is where it begins."""
    start_step = options.pop("start_step", 0)
    loader = CorpusLoader(urls, **grouped(options))
    loader.seek(start_step)
    return loader
