"""Folders of the cache of `huggingface_hub`: one commit of a repository, as links to files beside it.

    CACHE/datasets--ORG--NAME/snapshots/COMMIT/train/a.bin  ->  CACHE/datasets--ORG--NAME/blobs/HASH

Such a folder never changes, and its links lead nowhere else: `serve` and `build` follow them, as no others.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from corpus_server.corpus.files import unreadable
from corpus_server.corpus_spec import FILES, CorpusSpec

_COMMIT: Final = re.compile("[0-9a-f]{40}")
_KINDS: Final = {"models": "", "datasets": "datasets/"}


def snapshot_folder(cache: Path, kind: str, repository: str, commit: str) -> Path:
    """Return where the cache keeps a commit of a repository; `kind` is `models` or `datasets`."""
    return cache / f"{kind}--{repository.replace('/', '--')}" / "snapshots" / commit


def snapshot_of(path: Path) -> Path | None:
    """Return the folder of the commit in which a path lies; None if it lies in none."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
            kind, *names = folder.parent.parent.name.split("--")
            return folder if kind in _KINDS and names else None
    return None


def url_of(path: Path) -> str | None:
    """Return `hf://datasets/ORG/NAME@COMMIT/a.bin` for a file of such a folder; None for any other file."""
    if (folder := snapshot_of(path)) is None:
        return None
    kind, *names = folder.parent.parent.name.split("--")
    url = f"hf://{_KINDS[kind]}{'/'.join(names)}@{folder.name}"
    return url if path == folder else f"{url}/{path.relative_to(folder).as_posix()}"


def address_of(spec: CorpusSpec) -> str | None:
    """Return where others can have the tokens of a corpus; None if that is not known.

    A view's file is on this machine alone, so it has the address that its spec says, or none.
    """
    if spec.address is not None or spec.view is not None:
        return spec.address
    root = url_of(spec.path) if spec.store in (None, FILES) else f"{spec.store}{spec.path}"
    if root is not None:
        root = re.sub("^(https?://)[^/@]*@", r"\1", root)  # without a password
    return None if root is None else spec.address_below(root)


def check_link(path: Path, root: Path) -> None:
    """Refuse a symbolic link that leaves the folder `root`, or that leads to a folder.

    Raises:
        UnreadableCorpus: nobody sees from outside what such a link brings into a corpus.
    """
    target = Path(os.path.realpath(path))  # resolve() raises on circular links
    snapshot = snapshot_of(root)
    blobs = () if snapshot is None else (Path(os.path.realpath(snapshot.parent.parent)) / "blobs",)
    if not any(map(target.is_relative_to, (Path(os.path.realpath(root)), *blobs))):
        raise unreadable(
            path,
            f"is a symbolic link that leaves the folder {root} (to {target})",
            "copy or hard-link the file, or name the folder that really holds it",
        )
    if target.is_dir():
        raise unreadable(path, "is a symbolic link to a folder, its files would count twice", "remove it")
