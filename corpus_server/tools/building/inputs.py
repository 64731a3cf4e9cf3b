"""Find the files that the sources of a build name.

    texts/                    all files of known kinds below a folder
    'texts/*.jsonl'           files that a pattern matches
    rest.parquet?text=body    its text is the field `body`, whatever `--text-field` says
    hf://datasets/ORG/NAME    a repository of the Hugging Face Hub, or a folder, file or pattern of it

Those of the Hub are downloaded once, before anything else, and are files of this machine from then on.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.registry import find_mask, side_file
from corpus_server.corpus.selection import in_order, matches, natural_key, walk
from corpus_server.corpus.snapshots import url_of
from corpus_server.corpus_spec import HUB, STORE
from corpus_server.errors import InvalidParameter, UnreadableCorpus
from corpus_server.tools.building.job import Input
from corpus_server.tools.building.sources import KINDS, suffix_of
from corpus_server.tools.hub import Say, below, snapshot

_TEXT_FIELD: Final = re.compile(r"(.+)\?text=([^/?*]+)")
_IS_PATTERN: Final = re.compile(r"[*?[]")


def find_inputs(sources: Sequence[str], include: Sequence[str] = ()) -> tuple[Input, ...]:
    """Return the files that the sources name: files, folders and quoted patterns.

    The sources keep their order; the files of a folder or pattern come in natural order. A folder stands for
    all files below it whose suffix is known, except hidden ones, plain `.json` and the side files of formats:
    Hugging Face's `datasets` describes its Arrow files in such files, and keeps copies beside them. Links
    that leave a folder are refused, as `serve` refuses them.

    Args:
        include: patterns of names; of a folder only files that match one, and those of unknown kinds as text.

    Raises:
        UnreadableCorpus: a source names nothing, a file is of an unknown kind or named twice, all are empty.
    """
    cut = map(_cut_field, sources)
    inputs = tuple(_input(path, field) for text, field in cut for path in _paths(text, include))
    # Not `resolve`: caches hold links under several names to files of equal content.
    path, count = Counter(map(os.path.abspath, (each.path for each in inputs))).most_common(1)[0]
    if count > 1:
        raise unreadable(Path(path), f"is named {count} times among the sources", "name it once")
    if not any(each.num_bytes for each in inputs):
        raise unreadable(Path(sources[0]), "the sources are empty files", "was the copy interrupted?")
    return inputs


def fetch_source(source: str, include: Sequence[str], say: Say) -> str:
    """Return a source as one of this machine; files of the Hugging Face Hub are downloaded.

    Raises:
        UnreadableCorpus: the repository has no such files.
        InvalidParameter: the source lies in another store.
    """
    text, field = _cut_field(source)
    if (hub := HUB.match(text)) is None:
        if STORE.match(text):
            remedy = "copy it here first, for example with `aws s3 sync` or `rclone copy`, or mount it"
            accepted = "a path of this machine, or hf://..."
            raise InvalidParameter.expected("source", accepted, source, remedy=remedy)
        return source
    found, path = snapshot(hub[0]), text[hub.end() :].strip("/")
    if _IS_PATTERN.search(path):
        names = [name for name in below(found, "") if matches(name, path)]
    else:
        names = below(found, path)
        if names != [path]:
            depth = len(f"{path}/".lstrip("/"))
            names = [name for name in names if _is_chosen(Path(name[depth:]), include)]
    if not names:
        raise UnreadableCorpus(f"{source}: expected files of {', '.join(KINDS)}, found none", received=source)
    for name in names:
        _check_kind(Path(name), include)
    indexes = {f"{name.rpartition('/')[0]}/index.json".lstrip("/") for name in names if name.endswith(".bin")}
    found.fetch([*names, *sorted(indexes & found.sizes.keys())], say)
    return f"{found.folder / path}" + (f"?text={field}" if field else "")


def _cut_field(source: str) -> tuple[str, str | None]:
    """Return a source without the field of its text, and that field, if it says one."""
    found = _TEXT_FIELD.fullmatch(source)
    return (source, None) if found is None or os.path.lexists(source) else (found[1], found[2])


def _paths(source: str, include: Sequence[str]) -> list[Path]:
    if not source:  # an empty path would be the current folder
        raise InvalidParameter.expected("source", "a file, a folder or a pattern", source)
    path = Path(source)
    if path.is_dir():
        files = [each.name for each in in_order(walk(path))]
        found = [path / name for name in files if _is_chosen(Path(name), include)]
        if not found:
            wanted = f"that match {' or '.join(include)}" if include else f"of {', '.join(KINDS)}"
            remedy = None if include else "read text files of other names with --include '*.md'"
            raise unreadable(path, f"expected files {wanted} in the folder, found none", remedy)
        return found
    if path.exists():
        _check_kind(path, include)
        return [path]
    paths = map(Path, glob.glob(source, recursive=True))  # noqa: PTH207 - any part may be a pattern
    matched = sorted(paths, key=lambda each: natural_key(each.as_posix()))
    if not matched:
        raise unreadable(path, "expected a file, a folder or a pattern, found nothing", "check the path")
    found = [each for each in matched if not each.is_dir()]
    if not found:
        raise unreadable(
            path, "the pattern matches folders and no file", "name the files in them, as with DIR/**"
        )
    for each in found:
        _check_kind(each, include)
    return found


def _is_chosen(path: Path, include: Sequence[str]) -> bool:
    """Tell whether a folder's file, named relative to the folder, is one of its sources."""
    if any(part.startswith(".") for part in path.parts):
        return False
    if include:
        return _is_included(path, include)
    is_chunk = path.name.startswith("chunk-") or path.suffix != ".bin"
    return suffix_of(path) in KINDS and path.suffix != ".json" and side_file(path) is None and is_chunk


def _is_included(path: Path, include: Sequence[str]) -> bool:
    """Tell whether a pattern matches; one without a slash is that of a name in any folder."""
    return any(
        matches(path.as_posix(), each) if "/" in each else fnmatchcase(path.name, each) for each in include
    )


def _check_kind(path: Path, include: Sequence[str]) -> None:
    if not _is_included(path, include) and suffix_of(path) not in KINDS:
        remedy = f"known are {', '.join(KINDS)}; read it as text with --include '*{path.suffix}'"
        raise unreadable(path, "is of no kind that can be read", remedy)


def _input(path: Path, text_field: str | None) -> Input:
    if (mask := find_mask(path)) is not None:
        raise unreadable(
            mask, "is a loss mask, and build copies none", "serve the token file beside it as it is"
        )
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise unreadable(path, "its name is not UTF-8, which the manifest is", "rename it") from None
    if path.exists() and not path.is_file():  # a named pipe would be waited for without end
        raise unreadable(path, "expected a regular file, found another kind")
    found = Input.of(path)
    name = url_of(Path(found.path)) or found.name
    if text_field is None:
        return dataclasses.replace(found, name=name)
    return dataclasses.replace(found, name=f"{name}?text={text_field}", text_field=text_field)
