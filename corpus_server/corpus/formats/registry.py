"""All formats, in the order in which they are tried, and which files of a folder are no shards.

Code outside a format's file never names the format.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from corpus_server.corpus.files import OpenFile, unreadable
from corpus_server.corpus.formats import (
    arrow,
    datatrove,
    documents,
    foreign,
    litdata,
    llmc,
    masks,
    mds,
    megatron,
    npy,
    olmo,
    raw,
)
from corpus_server.corpus.formats.layout import LFS_POINTER, Format, ShardLayout, TokenDtype, not_served
from corpus_server.user_files import is_lfs_pointer

# The first format that does not answer None reads the file. Formats that look at a name or a
# neighbour come first, then those with a magic number; `raw` accepts anything and must be last.
FORMATS: Final[tuple[Format, ...]] = (
    megatron.FORMAT,
    datatrove.FORMAT,
    mds.FORMAT,
    litdata.FORMAT,
    arrow.FORMAT,
    documents.FORMAT,
    masks.FORMAT,
    foreign.FORMAT,
    npy.FORMAT,
    llmc.FORMAT,
    olmo.FORMAT,
    raw.FORMAT,
)
# Files that are found beside shards: glob patterns of names. Every other file in a folder is a shard or an
# error.
_MASKS: Final = {pattern: what for each in FORMATS for pattern, what in each.loss_masks.items()}
_SIDE_FILES: Final = {pattern: what for each in FORMATS for pattern, what in each.side_files.items()} | _MASKS
_OTHER_SIDE_FILES: Final = (
    *("*.json", "*.yaml", "*.yml", "*.toml", "*.md", "*.rst", "*.txt", "*.log", "*.py", "*.sh", "*.csv"),
    *("*.pkl", "*.model", "*.vocab", "*.tiktoken", "*.sha256", "*.sha1", "*.md5"),
    *("LICENSE", "README", "NOTICE", "_SUCCESS", "SHA256SUMS", "MD5SUMS"),
)
# Of the files beside shards those that nobody opens, and that may be large.
_UNREAD: Final = (".txt", ".log", ".md", ".rst", ".py", ".sh", ".pkl")
# Pictures, pages, programs: refused beside token files. A folder of nothing else holds no token files.
_OTHER_KINDS: Final = (
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".ico", ".pdf", ".mp4", ".mp3", ".wav", ".ttf"),
    *(".html", ".htm", ".css", ".js", ".ts", ".ipynb", ".tex", ".bib", ".docx", ".xml", ".lock", ".ini"),
    *(".c", ".h", ".cc", ".cpp", ".cu", ".hpp", ".rs", ".go", ".java", ".so", ".pyc", ".whl", ".cfg"),
)
_LEFT_OUT: Final = re.compile("|".join(map(fnmatch.translate, (*_SIDE_FILES, *_OTHER_SIDE_FILES))))


def side_file(path: Path) -> str | None:
    """Return what a format's side file is (`a Megatron index`); None for any other file."""
    return next(
        (what for pattern, what in _SIDE_FILES.items() if fnmatch.fnmatchcase(path.name, pattern)), None
    )


def read_layout(file: OpenFile, dtype: TokenDtype | None, *, in_folder: bool = False) -> ShardLayout:
    """Return the layout of an open file, see `Format.read`; refuse another dtype than the user named."""
    if (what := side_file(file.path)) is not None:
        raise not_served(file, what, "name the token file beside it")
    if is_lfs_pointer(file.head(32)):
        raise file.unreadable(*LFS_POINTER)
    layout = next(found for each in FORMATS if (found := each.read(file, dtype, in_folder)) is not None)
    if dtype is not None and layout.dtype != dtype:
        if layout.documents is not None:
            layout.documents.close()
        raise file.unreadable(
            f"holds {layout.dtype.name} tokens, but dtype {dtype.name} was asked for",
            "leave the dtype out: this format says it itself",
        )
    return layout


def data_path(path: Path) -> Path:
    """Return the data file that `path` stands for (Megatron: X and X.idx stand for X.bin), or `path`."""
    return next((data for each in FORMATS if (data := each.find_data(path)) is not None), path)


def is_side_file(path: Path) -> bool:
    """Tell whether a file of a folder accompanies shards and is none."""
    return _LEFT_OUT.match(path.name) is not None


def is_unread(path: Path) -> bool:
    """Tell whether a file that lies beside shards is never opened."""
    return is_side_file(path) and path.suffix in _UNREAD


def is_other_kind(path: Path) -> bool:
    """Tell whether a file's name says that it is a picture, a program or the like, and holds no tokens."""
    return path.suffix.lower() in _OTHER_KINDS


def mask_names(name: str) -> list[str]:
    """Return the names that the loss mask of a token file may have; it lies in the same folder."""
    return [mask for each in FORMATS for mask in each.mask_names(name)]


def is_mask(path: Path) -> bool:
    """Tell whether a file's name says that it is a loss mask."""
    return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _MASKS)


def find_mask(path: Path) -> Path | None:
    """Return the loss mask of a token file, None if it has none; refuse two."""
    found = [mask for name in mask_names(path.name) if (mask := path.with_name(name)).exists()]
    if len(found) > 1:
        what = f"has {len(found)} loss masks: {', '.join(mask.name for mask in found)}"
        raise unreadable(path, what, "move all but one of them out of the folder")
    return found[0] if found else None


def check_masks(paths: Collection[Path]) -> None:
    """Raise UnreadableCorpus if a loss mask, among all files of a folder, is that of no token file there.

    Training on tokens that a mask was to leave out would fail in silence.
    """
    if not (masks := {path for path in paths if is_mask(path)}):
        return
    used = {
        path.with_name(mask) for path in paths if not is_side_file(path) for mask in mask_names(path.name)
    }
    if left := sorted(masks - used):
        raise unreadable(
            left[0],
            "is named like a loss mask, but is that of no token file beside it",
            "name it after its token file (FILE.mask.npy), or leave all masks of the corpus out (mask=no)",
        )


def check_lists(chosen: Collection[Path], found: Collection[Path], of_split: Collection[Path]) -> None:
    """Hold folders that list their own files to the list; see `Format.listed`.

    Args:
        chosen: files of a corpus.
        found: all files below the corpus's folder, on this machine or not.
        of_split: those of them whose names say no other split: lists of others do not count.

    Raises:
        UnreadableCorpus: a listed file is missing, or a chosen one is not listed.
    """
    lists = list_names()
    above = {parent for folder in {path.parent for path in chosen} for parent in (folder, *folder.parents)}
    for path in sorted(path for path in of_split if path.name in lists):
        for each in FORMATS:
            if path.name != each.list_name or not path.is_file() or (listed := each.listed(path)) is None:
                continue
            names = {name for some in listed for name in some}
            if path.parent not in above and any(path.parent / name in found for name in names):
                continue  # a list of files that were not chosen
            for some in listed:
                if not any(path.parent / name in found for name in some):
                    raise unreadable(
                        path.parent / next(iter(some)),
                        f"is missing: {path.name} beside it lists it",
                        f"copy it again; if the others are all that you want, remove it from {path.name}",
                    )
            strange = [
                file
                for file in chosen
                if file.parent == path.parent and each.is_listed(file.name) and file.name not in names
            ]
            if strange:
                raise unreadable(
                    min(strange),
                    f"is not among the {len(listed):,} files that {path.name} beside it lists",
                    "is it left over from an earlier run? Move it away",
                )


def list_names() -> set[str]:
    """Return the names of files that list the other files of their folder."""
    return {each.list_name for each in FORMATS} - {""}


def check_folder(paths: Collection[Path], *, dtype_given: bool) -> None:
    """Raise UnreadableCorpus if a file of a folder lacks its counterpart, see `Format.check_folder`."""
    for each in FORMATS:
        each.check_folder(paths, dtype_given)
