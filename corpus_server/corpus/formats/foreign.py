"""Kinds of files that are known but not served, each with what makes it servable.

Without this list a Parquet file could be served as tokens.
"""

from __future__ import annotations

import gzip
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from corpus_server.corpus.files import OpenFile, unreadable
from corpus_server.corpus.formats.layout import (
    Format,
    TokenDtype,
    build_ids,
    build_text,
    not_served,
    with_dtype,
)
from corpus_server.errors import UnreadableCorpus
from corpus_server.user_files import parse_json

_SAVE: Final = "save its tokens as NPY: numpy.save('tokens.npy', array.astype('uint32'))"
_TO_LINES: Final = "save it as JSON lines or Parquet, then run corpus-server build on that"
_UNPACK: Final = "unpack it, then name what it holds"

# What it is, what to do, name endings, and the bytes it begins with: at least 4, because fewer begin real
# token files, too. No remedy: `corpus-server build` reads it, see `_build`.
_KINDS: Final[tuple[tuple[str, str | None, tuple[str, ...], tuple[bytes, ...]], ...]] = (
    ("a Parquet file", None, (".parquet",), (b"PAR1",)),
    ("an Arrow file", None, (".arrow", ".feather"), (b"ARROW1",)),
    ("JSON lines", None, (".jsonl", ".ndjson", ".json"), ()),
    ("a text file", None, (".txt", ".text"), ()),
    ("an MDS shard", None, (".mds",), ()),
    ("a CSV file", None, (".csv", ".tsv"), ()),
    ("a TFRecord file", _TO_LINES, (".tfrecord",), ()),
    ("a NumPy archive", _SAVE, (".npz",), ()),
    ("an HDF5 file", _SAVE, (".h5", ".hdf5"), (b"\x89HDF\r\n\x1a\n",)),
    ("a torch file", "save the tokens with numpy.save(path, tensor.numpy())", (".pt", ".pth"), ()),
    ("a safetensors file", _SAVE, (".safetensors",), ()),
    ("a Python pickle", _SAVE, (".pkl",), ()),
    ("a tar archive", _UNPACK, (".tar", ".tgz"), ()),
    ("a 7-Zip archive", _UNPACK, (".7z",), ()),
    ("a zip archive", _UNPACK, (".zip",), ()),
    ("a zip archive (also .npz and .pt)", _SAVE, (), (b"PK\x03\x04",)),
)
# Name endings and first bytes of compressed files, and the program that decompresses them.
_COMPRESSED: Final = (
    ("gzip", (".gz",), (b"\x1f\x8b\x08\x00", b"\x1f\x8b\x08\x08"), "gunzip"),
    ("Zstandard", (".zst", ".zstd"), (b"\x28\xb5\x2f\xfd",), "zstd -d"),
    ("bzip2", (".bz2",), (b"BZh91AY&SY",), "bunzip2"),
    ("xz", (".xz",), (b"\xfd7zXZ\x00",), "unxz"),
    ("LZ4", (".lz4",), (), "lz4 -d"),
)
_BUILD_DECOMPRESSES: Final = ("gzip", "Zstandard", "bzip2", "xz")
_BUILD_COMPRESSED: Final = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".text", ".mds")

_SOME_ARE_SERVED: Final = (".arrow", ".feather", ".mds")  # the content decides

_ID_COLUMNS: Final = ("input_ids", "tokens", "token_ids")
_TEXT_COLUMNS: Final = ("text", "content")
_LINE_BYTES: Final = 1 << 20  # bytes; a longer first line of JSON is not looked into


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> None:
    path, head = file.path, file.head(16)
    _refuse_zarr(file)
    if path.suffix in (".txt", ".text") and dtype is not None:
        return  # bytes of text are tokens, if the user says so
    suffix = path.suffix.lower()
    for name, suffixes, magics, program in _COMPRESSED:
        if suffix not in suffixes and not head.startswith(magics):
            continue
        inner = Path(path.stem).suffix.lower() if suffix in suffixes else ""
        what = next((what for what, _, suffixes, _ in _KINDS if inner in suffixes), "a file")
        what = f"{what}, compressed with {name}"
        if name in _BUILD_DECOMPRESSES and inner in _BUILD_COMPRESSED:
            raise _build(file, what, inner, in_folder)
        raise not_served(file, what, f"a compressed file cannot be mapped; decompress it: {program} {path}")
    # The name decides before the content.
    named = [(what, remedy) for what, remedy, suffixes, _ in _KINDS if suffix in suffixes]
    named += [(what, remedy) for what, remedy, _, magics in _KINDS if magics and head.startswith(magics)]
    for what, remedy in named:
        raise _build(file, what, suffix, in_folder) if remedy is None else not_served(file, what, remedy)


def _build(file: OpenFile, what: str, suffix: str, in_folder: bool) -> UnreadableCorpus:
    """Return the error for a file that `build` reads, with the command that fits what it holds."""
    source = file.path.parent if in_folder else file.path
    if suffix in (".txt", ".text"):
        as_bytes = with_dtype(source, "uint8")
        return not_served(file, what, f"{build_text(source)}; or serve its bytes: {as_bytes}")
    if suffix in (".csv", ".tsv"):
        return not_served(file, what, build_text(source))
    if suffix == ".mds":
        return not_served(file, what, build_ids(source, "tokens"))
    try:
        columns = _columns(file.path)
    except Exception:  # noqa: BLE001  # whatever a damaged file makes its library raise: `build` reports it
        columns = {}
    for wanted, kind in ((_ID_COLUMNS, "token ids"), (_TEXT_COLUMNS, "text")):
        found = [name for name, holds in columns.items() if holds == kind]
        if found:
            name = next((each for each in wanted if each in found), found[0])
            remedy = build_ids(source, name) if kind == "token ids" else build_text(source, name)
            return not_served(file, f"{what} with {kind} in {name!r}", remedy)
    return not_served(file, what, _text_or_ids(source))


def _text_or_ids(source: Path) -> str:
    return f"if it holds text, {build_text(source)}; if it holds token ids, {build_ids(source)}"


def check_name(path: Path) -> None:
    """Raise UnreadableCorpus if a file's name says that it is not served; it need not be on this machine."""
    suffix = path.suffix.lower()
    is_compressed = any(suffix in suffixes for _, suffixes, _, _ in _COMPRESSED)
    inner = Path(path.stem).suffix.lower() if is_compressed else suffix
    if inner in _SOME_ARE_SERVED and not is_compressed:
        return
    named = ((what, remedy) for what, remedy, suffixes, _ in _KINDS if inner in suffixes)
    what, remedy = next(named, ("a compressed file" if is_compressed else None, _UNPACK))
    if what is not None:
        remedy = remedy or _text_or_ids(path.parent)
        raise unreadable(path, f"is {what}, which is not served", remedy)


def _columns(path: Path) -> dict[str, str]:
    """Return the columns of a file that hold text or token ids, as far as its first bytes tell.

    pyarrow is optional, and loaded only here: mostly nobody asks.
    """
    if ".parquet" in path.suffixes:
        return _kinds_in(import_module("pyarrow.parquet").read_schema(path))
    if path.suffix in (".arrow", ".feather"):
        ipc = import_module("pyarrow.ipc")
        with import_module("pyarrow").memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            return _kinds_in((ipc.open_file if is_file else ipc.open_stream)(file).schema)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        record = parse_json(file.readline(_LINE_BYTES))
    kinds = {}
    for name, value in record.items():
        if isinstance(value, str):
            kinds[name] = "text"
        elif isinstance(value, list) and value and type(value[0]) is int:
            kinds[name] = "token ids"
    return kinds


def _kinds_in(schema: Any) -> dict[str, str]:
    types, kinds = import_module("pyarrow.types"), {}
    for field in schema:
        if types.is_string(field.type) or types.is_large_string(field.type):
            kinds[field.name] = "text"
        elif types.is_nested(field.type) and types.is_integer(getattr(field.type, "value_type", field.type)):
            kinds[field.name] = "token ids"
    return kinds


def _refuse_zarr(file: OpenFile) -> None:
    """Refuse a chunk of a zarr array, which has a name like `0`, `0.0` or `c/0/0`."""
    if not file.path.name.replace(".", "").isdecimal():
        return
    for folder in list(file.path.parents)[:4]:
        if any((folder / name).is_file() for name in ("zarr.json", ".zarray")):
            raise not_served(
                file,
                f"a chunk of the zarr array {folder}",
                f"save the array as NPY: numpy.save('tokens.npy', zarr.open('{folder}')[:].astype('uint32'))",
            )


FORMAT: Final = Format(read=_read)
