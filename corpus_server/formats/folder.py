"""Which files of a folder are the shards of a corpus, and in which order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from corpus_server.errors import UnreadableCorpus
from corpus_server.formats import megatron
from corpus_server.formats.documents import SIDECAR_SUFFIX
from corpus_server.formats.layout import ShardLayout, token_dtype, unreadable
from corpus_server.formats.recognise import data_path, recognise_open
from corpus_server.openfile import OpenFile

# Files that accompany shards; anything else in the folder is a shard or an error.
_SIDE_SUFFIXES: Final = frozenset(
    {".idx", ".json", ".index", ".metadata", ".csv", ".md", ".rst", ".txt", ".yaml", ".yml", ".toml"}
    | {".pkl", ".py", ".sh", ".log", ".model", ".vocab", ".sha256", ".sha1", ".md5", SIDECAR_SUFFIX}
)
_SIDE_NAMES: Final = frozenset({"LICENSE", "README", "NOTICE", "_SUCCESS", "SHA256SUMS", "MD5SUMS"})


class ShardFile(NamedTuple):
    """A file of a corpus: its name in the corpus (posix, relative to the folder) and where it lies."""

    name: str
    path: Path


def discover(path: str | Path, *, dtype: object = None) -> list[ShardLayout]:
    """Return the layouts of all shards of `path`, a file or a folder, in natural order."""
    accepted = None if dtype is None else token_dtype(dtype)
    layouts = []
    for shard in list_shards(Path(path), any_dtype=dtype is None):
        with OpenFile(shard.path) as file:
            layouts.append(recognise_open(file, dtype=accepted, in_folder=Path(path).is_dir()))
    return layouts


def list_shards(path: Path, *, any_dtype: bool = True) -> list[ShardFile]:
    """Return the shards of `path`, a file or a folder, in natural order (`b2` before `b10`).

    Args:
        path: a token file, a Megatron prefix, or a folder.
        any_dtype: the caller named no dtype; then a `.bin` that may have lost its index is an error.
    """
    if not path.is_dir():
        data = data_path(path)
        if not data.exists():
            raise UnreadableCorpus(
                f"{path}: expected a token file or a folder of shards, found nothing",
                received=str(path),
                remedy="check the path and that it is mounted",
            )
        return [ShardFile(data.name, data)]
    found = sorted(_walk(path), key=lambda shard: natural_key(shard.name))
    shards = [shard for shard in found if not _is_side_file(shard.path)]
    if not shards:
        seen = f"only {', '.join(shard.name for shard in found[:5])}" if found else "nothing"
        raise unreadable(path, f"expected token files in the folder, found {seen}", "check the path")
    _check_pairs(found, shards, any_dtype=any_dtype)
    return shards


def natural_key(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Return a sort key under which numbers inside names count as numbers."""
    parts = (part for part in re.split(r"(\d+|/)", name) if part)
    # A folder's separator sorts first, digits next, letters last; the name itself breaks ties (a1, a01).
    return [(0, 0) if p == "/" else (1, int(p)) if p.isdecimal() else (2, p) for p in parts], name


def _is_side_file(path: Path) -> bool:
    name = path.name
    return name in _SIDE_NAMES or path.suffix in _SIDE_SUFFIXES or name.endswith(".csv.gz")


def _walk(root: Path) -> Iterator[ShardFile]:
    """Yield every file under `root` that is not hidden; refuse links that leave it."""
    real_root = root.resolve()
    pending = [real_root]
    while pending:
        for entry in _entries(pending.pop()):
            if entry.name.startswith("."):
                continue
            path = Path(entry.path)
            if entry.is_symlink():
                _check_link(path, real_root)
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
            else:
                yield ShardFile(path.relative_to(real_root).as_posix(), path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise unreadable(folder, f"cannot be listed: {error.strerror}", "check its permissions") from error


def _check_link(path: Path, real_root: Path) -> None:
    target = Path(os.path.realpath(path))  # unlike resolve() it bears links in a circle
    if not target.is_relative_to(real_root):
        raise unreadable(
            path,
            f"is a symbolic link that leaves the corpus folder (to {target})",
            "copy or hard-link the file, or serve the folder that really holds it",
        )
    if target.is_dir():
        raise unreadable(path, "is a symbolic link to a folder, its shards would count twice", "remove it")


def _check_pairs(found: list[ShardFile], shards: list[ShardFile], *, any_dtype: bool) -> None:
    """Check that no `.idx` lacks its `.bin` and, among Megatron files, no `.bin` its `.idx`."""
    indices = {shard.path for shard in found if shard.path.suffix == ".idx"}
    bins = {shard.path for shard in shards if shard.path.suffix == ".bin"}
    if orphans := sorted(path for path in indices if path.with_suffix(".bin") not in bins):
        raise unreadable(
            orphans[0],
            f"is an index, but {orphans[0].stem}.bin is missing beside it",
            "put the .bin there or remove the .idx",
        )
    alone = sorted(path for path in bins if megatron.index_path(path) not in indices)
    if indices and alone and any_dtype:
        raise unreadable(
            alone[0],
            "has no .idx, but other files of the folder do: it may be raw tokens or half of a Megatron pair",
            "put its .idx there, or give the dtype to serve it as raw tokens",
        )
