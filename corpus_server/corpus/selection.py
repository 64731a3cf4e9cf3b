"""Which files below a path are the shards of a corpus, and in which order.

Training and validation files often lie in one folder. Served as one corpus they would be mixed without a
word, so files whose names say different splits are refused until the user chooses.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.foreign import check_name
from corpus_server.corpus.formats.layout import build_text
from corpus_server.corpus.formats.registry import (
    check_folder,
    check_lists,
    check_masks,
    data_path,
    is_other_kind,
    is_side_file,
    is_unread,
)
from corpus_server.corpus.snapshots import check_link
from corpus_server.corpus_spec import ALL, ESCAPES, FILES, OTHER, CorpusSpec, split_of
from corpus_server.errors import UnreadableCorpus

METADATA_FOLDER = "documents"
"""Folder beside shards with Parquet files of a row for each document; `documents.SPLIT` for a selection."""


OF_MACOS: Final = "__MACOSX"
"""A folder that archives of macOS bring, of files that describe the others; hidden, as `._*` are."""

_NUMBERED: Final = re.compile(r"(.*?)(\d{1,7})-of-(\d{1,7})(\D.*|)")


class ShardFile(NamedTuple):
    """A file of a corpus: its name in the corpus (posix, relative to the folder) and its path."""

    name: str
    path: Path


def list_shards(spec: CorpusSpec, found: Sequence[ShardFile] | None = None) -> list[ShardFile]:
    """Return the shards of a corpus, in natural order (`b2` before `b10`).

    Refuses a path, pattern or split that chooses none, and files of several splits.

    Args:
        found: all files of the corpus's folder, in this order, where they are not on this machine yet.
    """
    found, chosen = _matching(spec) if found is None else (found, _chosen(spec, spec.path, found))
    separate = f"or serve each under a name of its own: corpus-server serve {spec.path_text()} --splits"
    shards = of_one_split(chosen, spec.split, spec.path, spec.path_text, separate)
    check_folder(_with_side_files(spec, found, shards), dtype_given=spec.dtype is not None)
    there = {file.path for file in found}
    check_lists([file.path for file in shards], there, of_split(found, spec.split))
    if spec.mask and len(found) > 1:  # one file is that of nothing beside it
        check_masks({file.path for file in found})
    return shards


def of_one_split(
    files: Sequence[ShardFile],
    split: str | None,
    path: Path,
    written: Callable[[str], str],
    separate: str | None = None,
) -> list[ShardFile]:
    """Return the files of a split; all of them if their names say no more than one.

    Args:
        split: what the user chose; None: nothing.
        path: what errors are about.
        written: returns how a user writes the choice of a split.
        separate: what else a user may do with several splits.

    Raises:
        UnreadableCorpus: no file is of the split, or none was chosen and the files are of several.
    """
    by_split = _by_split(files)
    if split is not None:
        if not (chosen := list(files) if split == ALL else by_split.get(split, [])):
            raise unreadable(path, f"no file is of split {split}; there are {_shown(by_split)}")
        return chosen
    if len(by_split) == 1:
        return list(files)
    remedies = [f"choose one: {' or '.join(map(written, by_split))}"]
    remedies += [separate] if separate else []
    raise unreadable(
        path,
        f"its files are of several splits: {_shown(by_split)}; as one corpus, training would see its "
        "validation data",
        "; ".join([*remedies, f"or, if they do belong together: {written(ALL)}"]),
    )


def of_split(found: Iterable[ShardFile], split: str | None) -> set[Path]:
    """Return the paths of the files whose names say this split or none."""
    every = split in (None, ALL)
    return {file.path for file in found if every or split_of(file.name) in (split, OTHER)}


def _with_side_files(spec: CorpusSpec, found: Sequence[ShardFile], shards: Sequence[ShardFile]) -> set[Path]:
    """Return the paths of the shards and of the files beside them; what is left out may lack counterparts."""
    paths = {file.path for file in shards}
    others = [file for file in found if file.path not in paths]
    stems = {file.path.with_suffix("") for file in others if not is_side_file(file.path)}
    stems -= {path.with_suffix("") for path in paths}
    return paths | {
        file.path
        for file in others
        if is_side_file(file.path)
        and file.path.with_suffix("") not in stems
        and (spec.split in (None, ALL) or split_of(file.name) == spec.split)
    }


def files_of(spec: CorpusSpec, found: Sequence[ShardFile]) -> list[ShardFile]:
    """Return the shards of a corpus and the files beside them, of all files of its folder.

    For files that are not on this machine yet, see `list_shards`: refuses what `serve` would refuse by its
    name, and leaves out what nobody opens.
    """
    found = [file for file in found if not is_other_kind(file.path)] or found
    shards = list_shards(spec, found)
    for file in shards:
        check_name(file.path)
    wanted = _with_side_files(spec, found, shards)
    return [file for file in found if file.path in wanted and not is_unread(file.path)]


def files_left_out(spec: CorpusSpec) -> list[ShardFile]:
    """Return the files of the corpus's folder that are not its shards."""
    shards = set(list_shards(spec))
    return [file for file in _matching(spec)[0] if file not in shards]


def corpora_of_splits(spec: CorpusSpec) -> list[CorpusSpec]:
    """Return a corpus for each split of a path, called `NAME-SPLIT`; the same one if there is one split."""
    splits = list(_by_split(_matching(spec)[1]))
    if spec.split is not None or len(splits) == 1:
        return [spec]
    return [
        dataclasses.replace(spec, name=f"{spec.name}-{split.replace('+', '-')}", split=split).narrowed()
        for split in splits
    ]


def missing_numbers(names: Iterable[str], beside: Iterable[str] = ()) -> list[str]:
    """Say which files are missing among names like `a-00002-of-00004.bin`, in a sentence for each set.

    A file that lies `beside` those names is not missing.

    >>> missing_numbers(["a-0-of-3.bin", "a-2-of-3.bin"])
    ['1 of the 3 files a-*-of-3.bin is missing: number 1']
    """
    sets: dict[tuple[str | Any, ...], set[int]] = {}
    for found in filter(None, map(_NUMBERED.fullmatch, names)):
        sets.setdefault(found.group(1, 3, 4), set()).add(int(found[2]))
    for found in filter(None, map(_NUMBERED.fullmatch, beside if sets else ())):
        if found.group(1, 3, 4) in sets:
            sets[found.group(1, 3, 4)].add(int(found[2]))
    said = []
    for (before, total, after), numbers in sets.items():
        first = 0 if int(total) not in numbers else 1  # counted from 0, or from 1
        wanted = range(first, first + int(total))
        if numbers <= {*wanted} and len(numbers) < len(wanted):
            missing = [number for number in wanted if number not in numbers]
            one = len(missing) == 1
            said.append(
                f"{len(missing):,} of the {int(total):,} files {before}*-of-{total}{after} "
                f"{'is' if one else 'are'} missing: number{'' if one else 's'} "
                f"{', '.join(map(str, missing[:3]))}{'' if len(missing) < 4 else ', ...'}"
            )
    return said


def is_metadata(name: str) -> bool:
    """Tell whether a file of a corpus's folder holds rows of documents, and no tokens."""
    path = PurePosixPath(name)
    return path.suffix == ".parquet" and path.parent.name.partition(".")[0] == METADATA_FOLDER


def natural_key(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Return a sort key under which numbers inside names count as numbers."""
    parts = (part for part in re.split(r"(\d+|/)", name) if part)
    # A folder's separator sorts first, digits next, letters last; the name itself breaks ties (a1, a01).
    return [(0, 0) if p == "/" else (1, int(p)) if p.isdecimal() else (2, p) for p in parts], name


def _matching(spec: CorpusSpec) -> tuple[list[ShardFile], list[ShardFile]]:
    """Return all files below the path, and the shards among them that the patterns choose."""
    if spec.store is not None:
        url = f"{spec.store}{spec.path}"
        said = "lies in an object store, and this command takes local files"
        remedy = (
            "run it on a copy and put the file that it makes (*.hashes.json, *.documents) beside the "
            f"shards in the store; serve a split by its name: {spec.path_text('train')}"
        )
        if spec.store == FILES:
            said, remedy = f"this command takes a path without {FILES}", f"give it {spec.path}"
        raise UnreadableCorpus(f"{url}: {said}; {remedy}", received=url, remedy=remedy)
    path = data_path(spec.path)
    if path.is_dir():
        found = in_order(walk(path, spec.include))
        return found, _chosen(spec, path, found)
    if path.exists():
        return (found := [ShardFile(path.name, path)]), _chosen(spec, path, found, in_folder=False)
    what = "expected a token file or a folder of shards, found nothing"
    raise unreadable(spec.path, what, f"check the path and that it is mounted; {ESCAPES}")


def in_order(files: Iterable[ShardFile]) -> list[ShardFile]:
    """Return files in natural order of their names."""
    return sorted(files, key=lambda file: natural_key(file.name))


def _chosen(
    spec: CorpusSpec, path: Path, found: Sequence[ShardFile], *, in_folder: bool = True
) -> list[ShardFile]:
    """Return those of the files that are shards, and that the patterns choose."""
    shards = list(found)
    if in_folder:
        shards = [file for file in found if not is_side_file(file.path) and not is_metadata(file.name)]
        if shards and all(is_other_kind(file.path) for file in shards):
            raise _no_tokens(path, found)
    for pattern in (*spec.include, *spec.exclude):
        # A typing error in a pattern must not serve what the user meant to leave out.
        if not any(matches(file.name, pattern) for file in shards):
            what = f"the pattern {pattern!r} matches no token file"
            raise unreadable(path, what, f"check its spelling; {ESCAPES}")
    if spec.include:
        shards = [file for file in shards if any(matches(file.name, each) for each in spec.include)]
    shards = [file for file in shards if not any(matches(file.name, each) for each in spec.exclude)]
    if not shards:
        raise _no_tokens(path, found)
    return shards


def _no_tokens(path: Path, found: Sequence[ShardFile]) -> UnreadableCorpus:
    seen = f"only {_examples(found, 5)}" if found else "nothing"
    remedy = f"check the path, or {build_text(path)}"
    return unreadable(path, f"expected token files in the folder, found {seen}", remedy)


def _by_split(shards: Sequence[ShardFile]) -> dict[str, list[ShardFile]]:
    found: dict[str, list[ShardFile]] = {}
    for file in shards:
        found.setdefault(split_of(file.name), []).append(file)
    return found


def _shown(by_split: dict[str, list[ShardFile]]) -> str:
    return ", ".join(
        f"{split} ({'names that say none: ' if split == OTHER else ''}{_examples(files)})"
        for split, files in by_split.items()
    )


def _examples(files: Sequence[ShardFile], most: int = 2) -> str:
    names = ", ".join(file.name for file in files[:most])
    return names if len(files) <= most else f"{names} and {len(files) - most:,} more"


def matches(name: str, pattern: str) -> bool:
    """Tell whether a name matches a pattern, in which `*` stays within a folder, and `**/` does not."""
    return _match(name.split("/"), pattern.split("/"))


def _match(parts: list[str], pattern: list[str], *, is_folder: bool = False) -> bool:
    """Tell whether the parts of a name match; of a folder, whether a file below it could."""
    if not pattern or (is_folder and not parts):
        return not parts
    if pattern[0] == "**":
        below = range(len(parts) + 1)
        return any(_match(parts[skipped:], pattern[1:], is_folder=is_folder) for skipped in below)
    return (
        bool(parts)
        and fnmatchcase(parts[0], pattern[0])
        and _match(parts[1:], pattern[1:], is_folder=is_folder)
    )


def walk(root: Path, include: Sequence[str] = ()) -> Iterator[ShardFile]:
    """Yield every file under `root` that is not hidden; refuse links that leave it.

    Does not enter folders in which no file can match: patterns of two disks meet in the root of all files.
    """
    real_root = root.resolve()
    patterns = [pattern.split("/") for pattern in include] or [["**"]]
    pending = [real_root]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError as error:
            what = f"cannot be listed: {error.strerror}"
            raise unreadable(folder, what, "check its permissions") from error
        for entry in entries:
            if entry.name.startswith(".") or entry.name == OF_MACOS:
                continue
            path = Path(entry.path)
            relative = path.relative_to(real_root)
            if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and path.is_dir()):
                if not any(_match(list(relative.parts), pattern, is_folder=True) for pattern in patterns):
                    continue  # as /sbin, a link beside the disks
                if not entry.is_symlink():
                    pending.append(path)
                    continue
            if entry.is_symlink():
                check_link(path, real_root)
            yield ShardFile(relative.as_posix(), path)
