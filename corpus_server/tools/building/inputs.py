"""Find the files that the sources of a build name.

    texts/                    all files of known kinds below a folder
    'texts/*.jsonl'           files that a pattern matches
    data#train                of a folder or pattern those of one split, by the words of their names
    rest.parquet?text=body    its text is the field `body`, whatever `--text-field` says
    hf://datasets/ORG/NAME    a repository of the Hugging Face Hub, or a folder, file or pattern of it

Those of the Hub are downloaded once, before anything else, and are files of this machine from then on. Files
of several splits, and folders that lack files of their own lists, are refused as `serve` refuses them.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.layout import LFS_POINTER
from corpus_server.corpus.formats.registry import check_lists, find_mask, list_names, side_file
from corpus_server.corpus.selection import (
    OF_MACOS,
    ShardFile,
    in_order,
    matches,
    missing_numbers,
    natural_key,
    of_one_split,
    of_split,
    walk,
)
from corpus_server.corpus.snapshots import url_of
from corpus_server.corpus_spec import ALL, HUB, STORE, cut_split
from corpus_server.errors import InvalidParameter, UnreadableCorpus
from corpus_server.stores.mirror import said_of
from corpus_server.tools.building.job import Input
from corpus_server.tools.building.kinds.kind import COMPRESSED, HEAD_BYTES, misnamed, reading
from corpus_server.tools.building.sources import KINDS, suffix_of
from corpus_server.tools.hub import Say, below, snapshot
from corpus_server.user_files import is_lfs_pointer

_TEXT_FIELD: Final = re.compile(r"(.+)\?text=([^/?*#]+)")
_IS_PATTERN: Final = re.compile(r"[*?[]")

# Files that hold no text and so cannot be read as such, and what helps.
_SAVE: Final = "save its texts or token ids as JSON lines or Parquet"
_UNPACK: Final = "unpack it, and name what it holds"
_NO_TEXT: Final = {
    (".npy",): "token files need no build: serve it as it is",
    (".zip", ".tar", ".tgz", ".7z", ".rar"): _UNPACK,
    (".lz4", ".br", ".z", ".lzma", ".snappy"): "decompress it, or compress it with gzip, zstd, bzip2 or xz",
    (".gz", ".zst", ".zstd", ".bz2", ".xz"): "decompress it, and name what it holds",
    (".npz", ".pkl", ".pickle", ".pt", ".pth", ".h5", ".hdf5", ".safetensors"): _SAVE,
    (".tfrecord", ".orc", ".avro"): _SAVE,
    (".xlsx", ".xls", ".ods"): "save it as CSV",
    (".pdf", ".doc", ".docx", ".epub", ".odt"): "extract its text into .txt files or JSON lines",
    (".idx", ".ds", ".raw", ".tokens"): "token files need no build: serve them as they are",
}


class Found(NamedTuple):
    """The files that the sources name.

    Attributes:
        inputs: those that are read, in order.
        left_out: files of the sources' folders that are not, and why.
        missing: sentences about files that seem to be missing.
        doubled: sentences about files that seem to be there twice.
    """

    inputs: tuple[Input, ...]
    left_out: tuple[tuple[Path, str], ...] = ()
    missing: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()


class _Source(NamedTuple):
    """What a user says of one source: `PATH[#SPLIT][?text=FIELD]`."""

    path: str
    split: str | None
    text_field: str | None

    @classmethod
    def parse(cls, text: str) -> _Source:
        # A path that is there is taken as it is, whatever characters it holds.
        found = None if os.path.lexists(text) else _TEXT_FIELD.fullmatch(text)
        path, text_field = (text, None) if found is None else (found[1], found[2])
        return cls(path, None, text_field) if os.path.lexists(path) else cls(*cut_split(path), text_field)

    def written(self, split: str | None = None) -> str:
        field = "" if self.text_field is None else f"?text={self.text_field}"
        return f"{self.path}{'' if split is None else f'#{split}'}{field}"


class _Files(NamedTuple):
    """Files of one source: those to read, and all that lie beside them."""

    source: _Source
    root: Path  # names of files are relative to it
    chosen: list[ShardFile]
    there: list[ShardFile]
    is_folder: bool = False  # the user named a folder


def find_inputs(sources: Sequence[str], include: Sequence[str] = ()) -> Found:
    """Return the files that the sources name: files, folders and quoted patterns.

    The sources keep their order; the files of a folder or pattern come in natural order. A folder stands for
    all files below it whose suffix is known, except hidden ones, plain `.json` and the side files of formats:
    Hugging Face's `datasets` describes its Arrow files in such files, and keeps copies beside them. Links
    that leave a folder are refused, as `serve` refuses them.

    Args:
        include: patterns of names; of a folder only files that match one, and those of unknown kinds as text.

    Raises:
        UnreadableCorpus: a source names nothing, a file is of an unknown kind or named twice, all are empty,
            or their names say several splits.
    """
    found = [_files(_Source.parse(source), include) for source in sources]
    chosen = _of_one_split(found)
    for each, files in zip(found, chosen, strict=True):
        there = {file.path for file in each.there}
        check_lists([file.path for file in files], there, of_split(each.there, each.source.split))
    inputs = tuple(
        _input(file.path, each.source.text_field)
        for each, files in zip(found, chosen, strict=True)
        for file in files
    )
    path, count = Counter(map(_absolute, (each.path for each in inputs))).most_common(1)[0]
    if count > 1:
        raise unreadable(Path(path), f"is named {count} times among the sources", "name it once")
    if not any(each.num_bytes for each in inputs):
        raise unreadable(Path(sources[0]), "the sources are empty files", "was the copy interrupted?")
    read = {_absolute(each.path) for each in inputs}
    left_out = {
        file.path: _why_left_out(each, file, include)
        for each in found
        for file in each.there
        if each.is_folder and _absolute(file.path) not in read
    }
    missing = [
        said
        for each, files in zip(found, chosen, strict=True)
        if len(each.there) > 1  # not for a file that the user named
        for said in missing_numbers(*([file.name for file in some] for some in (files, each.there)))
    ]
    return Found(inputs, tuple(left_out.items()), tuple(missing), _doubled(inputs))


def _doubled(inputs: Sequence[Input]) -> tuple[str, ...]:
    """Return a sentence for the first inputs that are one file, and the first that differ in compression."""
    said, by_file, by_name = dict[str, str](), dict[tuple[int, int], str](), dict[str, str]()
    for each in inputs:
        status = Path(each.path).stat()
        plain = each.path
        while plain.lower().endswith(COMPRESSED):
            plain = plain.rpartition(".")[0]
        if (other := by_file.setdefault((status.st_dev, status.st_ino), each.path)) != each.path:
            said.setdefault("file", f"{other} and {each.path} are one file, which is read twice")
        elif (other := by_name.setdefault(plain, each.path)) != each.path:
            said.setdefault("name", f"{other} and {each.path} are both read: is one the other, compressed?")
    return tuple(said.values())


def _absolute(path: str | Path) -> str:
    # Not `resolve`: caches hold links under several names to files of equal content.
    return os.path.abspath(path)  # noqa: PTH100


def _of_one_split(found: Sequence[_Files]) -> list[list[ShardFile]]:
    """Return the files of each source that are read; refuse sources that together are of several splits."""
    chosen = [
        of_one_split(each.chosen, each.source.split, each.root, each.source.written)
        if each.source.split is not None
        else each.chosen
        for each in found
    ]
    undecided = [each for each in found if each.source.split is None]
    if len(undecided) == 1:
        (only,) = undecided
        of_one_split(only.chosen, None, only.root, only.source.written)
    elif undecided:
        for each in undecided:
            of_one_split(each.chosen, None, each.root, each.source.written)
        # Of `data/train` and `data/val` the folders themselves say the split.
        common = Path(os.path.commonpath([_absolute(each.root) for each in undecided]))
        files = [
            ShardFile(Path(os.path.relpath(file.path, common)).as_posix(), file.path)
            for each in undecided
            for file in each.chosen
        ]
        of_one_split(files, None, common, _behind_each([each.source for each in undecided]))
    return chosen


def _behind_each(sources: Sequence[_Source]) -> Callable[[str], str]:
    def written(split: str) -> str:
        if split == ALL:
            return " ".join(source.written(split) for source in sources[:2]) + " ..." * (len(sources) > 2)
        return f"the sources of {split}"

    return written


def _why_left_out(source: _Files, file: ShardFile, include: Sequence[str]) -> str:
    if file in source.chosen:
        return "of another split"
    if include:
        return "--include does not match it"
    if (what := side_file(file.path)) is not None:
        return what
    if file.path.suffix == ".json":
        return "plain .json may describe other files; name it to read it"
    if file.path.suffix == ".bin":
        return "no chunk of litData; token files need no build"
    return "of no kind that is read; --include reads it as text"


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") or part == OF_MACOS for part in name.parts)


def fetch_source(source: str, include: Sequence[str], say: Say) -> str:
    """Return a source as one of this machine; files of the Hugging Face Hub are downloaded.

    Raises:
        UnreadableCorpus: the repository has no such files, or they are of several splits.
        InvalidParameter: the source lies in another store.
    """
    parsed = _Source.parse(source)
    if (hub := HUB.match(parsed.path)) is None:
        if STORE.match(parsed.path):
            remedy = "copy it here first, for example with `aws s3 sync` or `rclone copy`, or mount it"
            accepted = "a path of this machine, or hf://..."
            raise InvalidParameter.expected("source", accepted, source, remedy=remedy)
        return source
    found, path = snapshot(hub[0]), parsed.path[hub.end() :].strip("/")
    depth = 0
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
    files = in_order(ShardFile(name[depth:], found.folder / name) for name in names)
    with said_of(str(found.folder), found.url):
        files = of_one_split(files, parsed.split, found.folder / path, parsed.written)
    names = [file.path.relative_to(found.folder).as_posix() for file in files]
    beside = {name.rpartition("/")[0] for name in names}
    lists = {f"{folder}/{name}".lstrip("/") for folder in beside for name in list_names()}
    found.fetch([*names, *sorted(lists & found.sizes.keys())], say)
    return parsed._replace(path=str(found.folder / path)).written(parsed.split)


def _files(source: _Source, include: Sequence[str]) -> _Files:
    if not source.path:  # an empty path would be the current folder
        raise InvalidParameter.expected("source", "a file, a folder or a pattern", source.path)
    with reading(source.path):  # a folder above it may not be for this user
        return _found(source, Path(source.path), include)


def _found(source: _Source, path: Path, include: Sequence[str]) -> _Files:
    if path.is_dir():
        there = [ShardFile(each.name, path / each.name) for each in in_order(walk(path))]
        chosen = [file for file in there if _is_chosen(Path(file.name), include)]
        if not chosen:
            wanted = f"that match {' or '.join(include)}" if include else f"of {', '.join(KINDS)}"
            remedy = None if include else _none_chosen(there)
            raise unreadable(path, f"expected files {wanted} in the folder, found none", remedy)
        return _Files(source, path, chosen, there, is_folder=True)
    if path.exists():
        _check_kind(path, include)
        file = ShardFile(path.name, path)
        return _Files(source, path.parent, [file], [file])
    paths = map(Path, glob.glob(source.path, recursive=True))  # noqa: PTH207 - any part may be a pattern
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
    is_plain = [_IS_PATTERN.search(part) is None for part in path.parts[:-1]]
    root = Path(*path.parts[: [*is_plain, False].index(False)])
    chosen = [ShardFile(each.relative_to(root).as_posix(), each) for each in found]
    beside = {each for folder in {each.parent for each in found} for each in folder.iterdir()} - {*found}
    others = (ShardFile(each.relative_to(root).as_posix(), each) for each in beside if each.is_file())
    return _Files(source, root, chosen, [*chosen, *others])


def _none_chosen(there: Sequence[ShardFile]) -> str:
    """Return what helps where a folder has no file that is read by itself."""
    if jsons := [file.name for file in there if file.name.endswith(".json")]:
        return f"name .json files themselves, as 'DIR/**/*.json' (here {jsons[0]})"
    return "read text files of other names with --include '*.md'"


def _is_chosen(path: Path, include: Sequence[str]) -> bool:
    """Tell whether a folder's file, named relative to the folder, is one of its sources."""
    if _is_hidden(path):
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
        if ".tar" in map(str.lower, path.suffixes):
            raise unreadable(path, "is of no kind that can be read", _UNPACK)
        as_text = f"known are {', '.join(KINDS)}; read it as text with --include '*{path.suffix}'"
        remedy = next(
            (each for suffixes, each in _NO_TEXT.items() if path.suffix.lower() in suffixes), as_text
        )
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
    with reading(str(path)), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if is_lfs_pointer(head):
        raise unreadable(path, *LFS_POINTER)
    if head and (wrong := misnamed(path.name, head)) is not None:
        raise unreadable(path, *wrong)
    name = url_of(Path(found.path)) or found.name
    if text_field is None:
        return dataclasses.replace(found, name=name)
    return dataclasses.replace(found, name=f"{name}?text={text_field}", text_field=text_field)
