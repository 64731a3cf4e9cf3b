"""Tells the format of a file by its content, its neighbours and, last, its name.

X.idx beside X.bin           Megatron (the index says what the data are)
a known foreign name/magic   refused by name
\\x93NUMPY                    NPY
llm.c's magics               llm.c
else                         raw: headerless tokens; so is an .npy without its magic (OLMo)
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from corpus_server.formats import foreign, llmc, megatron, npy, raw
from corpus_server.formats.layout import ShardLayout, TokenDtype, token_dtype, unreadable
from corpus_server.openfile import OpenFile

# In a folder only these names may hold headerless tokens: a stray file must not become a shard.
RAW_SUFFIXES: Final = frozenset({".bin", ".npy", ".ds", ".raw", ".tokens"})

_HEAD_BYTES: Final = 16


def recognise(path: str | Path, *, dtype: object = None) -> ShardLayout:
    """Return the layout of the token file `path` (also Megatron's prefix X or X.idx for X.bin).

    Args:
        path: the file.
        dtype: what headerless files hold (None: uint16); a header that says otherwise is an error.

    Raises:
        UnreadableCorpus: not a token file, or header, index and size do not agree.
        InvalidParameter: dtype is none of the accepted.
    """
    with OpenFile(data_path(Path(path))) as file:
        return recognise_open(file, dtype=None if dtype is None else token_dtype(dtype))


def recognise_open(file: OpenFile, *, dtype: TokenDtype | None, in_folder: bool = False) -> ShardLayout:
    """Return the layout of an open file; `in_folder` asks raw files for a name that says so."""
    layout = _read(file, dtype, in_folder)
    if dtype is not None and layout.dtype != dtype:
        if layout.documents is not None:
            layout.documents.close()
        raise unreadable(
            file.path,
            f"holds {layout.dtype.name} tokens, but dtype {dtype.name} was asked for",
            "leave the dtype out: this format says it itself",
        )
    return layout


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout:
    path = file.path
    head = file.head(_HEAD_BYTES)
    if path.suffix == ".bin" and megatron.index_path(path).exists():
        return _read_megatron(file)
    foreign.refuse(path, head)
    if head.startswith(npy.MAGIC):
        return npy.read(file)
    if llmc.matches(head):
        return llmc.read(file)
    if in_folder and path.suffix not in RAW_SUFFIXES:
        raise unreadable(
            path,
            "is neither a known token file nor a known side file",
            f"move it out of the corpus folder, or name raw tokens {', '.join(sorted(RAW_SUFFIXES))}",
        )
    return raw.read(file, dtype)


def _read_megatron(file: OpenFile) -> ShardLayout:
    index = OpenFile(megatron.index_path(file.path))
    try:
        magic = index.head(len(megatron.MAGIC))
        if magic == megatron.MAGIC:
            return megatron.read(file, index)
        what = "a legacy fairseq index" if magic.startswith(megatron.LEGACY_MAGIC) else "no Megatron index"
        raise unreadable(
            index.path,
            f"is {what}: expected it to begin with MMIDIDX, got {magic!r}",
            f"build the index again, or move it away to serve {file.path.name} as raw tokens",
        )
    except BaseException:
        index.close()
        raise


def data_path(path: Path) -> Path:
    """Return the file that holds the tokens when `path` is a file, X.idx or a Megatron prefix X."""
    if path.suffix == ".idx":
        data = path.with_suffix(".bin")
        if not data.is_file():
            raise unreadable(path, f"is an index, but {data.name} is missing beside it", "put the .bin there")
        return data
    if not path.exists():
        data = path.with_name(path.name + ".bin")
        if data.is_file() and megatron.index_path(data).is_file():
            return data
    return path
