"""Formats of the field that are known but not served: refused by name, with the way out.

Without this a Parquet file would be served as random tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from corpus_server.formats.layout import unreadable

_DECODE: Final = "tokenize its text and write the tokens as one flat .bin or .npy file"
_FLATTEN: Final = "write its tokens as one flat .bin or .npy file"
_UNPACK: Final = "unpack it first: a compressed file cannot be mapped"

_BY_SUFFIX: Final = {
    ".mds": ("an MDS shard (MosaicML Streaming)", _FLATTEN),
    ".parquet": ("a Parquet file", _DECODE),
    ".arrow": ("an Arrow file", _DECODE),
    ".feather": ("an Arrow file", _DECODE),
    ".jsonl": ("JSON lines", _DECODE),
    ".ndjson": ("JSON lines", _DECODE),
    ".json": ("a JSON file", _DECODE),
    ".csv": ("a CSV file", _DECODE),
    ".npz": ("a NumPy archive", "save the array itself with numpy.save"),
    ".h5": ("an HDF5 file", _FLATTEN),
    ".hdf5": ("an HDF5 file", _FLATTEN),
    ".pt": ("a torch file", "save the tokens with numpy.save(path, tensor.numpy())"),
    ".pth": ("a torch file", "save the tokens with numpy.save(path, tensor.numpy())"),
    ".safetensors": ("a safetensors file", "save the tokens with numpy.save"),
    ".pkl": ("a Python pickle", "save the tokens with numpy.save"),
    ".tfrecord": ("a TFRecord file", _DECODE),
    ".gz": ("a gzip file", _UNPACK),
    ".zst": ("a Zstandard file", _UNPACK),
    ".zstd": ("a Zstandard file", _UNPACK),
    ".bz2": ("a bzip2 file", _UNPACK),
    ".xz": ("an xz file", _UNPACK),
    ".lz4": ("an LZ4 file", _UNPACK),
    ".zip": ("a zip archive", _UNPACK),
    ".tar": ("a tar archive", _UNPACK),
    ".tgz": ("a tar archive", _UNPACK),
    ".7z": ("a 7-Zip archive", _UNPACK),
    ".index": ("a datatrove index", "name the .ds file beside it"),
    ".metadata": ("datatrove metadata", "name the .ds file beside it"),
    ".documents": ("document boundaries", "name the token file beside it"),
}

# At least 4 bytes each: shorter ones begin real token files too.
_BY_MAGIC: Final = (
    (b"MMIDIDX\x00\x00", ("a Megatron index under another name", "name it X.idx, beside X.bin")),
    (b"TNTIDX\x00\x00", ("an index of the legacy fairseq format", "build it again as MMIDIDX")),
    (b"PAR1", ("a Parquet file", _DECODE)),
    (b"ARROW1", ("an Arrow file", _DECODE)),
    (b"PK\x03\x04", ("a zip archive (also .npz and .pt)", "save the tokens with numpy.save")),
    (b"\x89HDF\r\n\x1a\n", ("an HDF5 file", _FLATTEN)),
    (b"\x28\xb5\x2f\xfd", ("a Zstandard file", _UNPACK)),
    (b"\x1f\x8b\x08\x00", ("a gzip file", _UNPACK)),
    (b"\x1f\x8b\x08\x08", ("a gzip file", _UNPACK)),
    (b"\xfd7zXZ\x00", ("an xz file", _UNPACK)),
    (b"BZh91AY&SY", ("a bzip2 file", _UNPACK)),
)


def refuse(path: Path, head: bytes) -> None:
    """Raise UnreadableCorpus if `path`, which begins with `head`, is of a known format not served."""
    found = _BY_SUFFIX.get(path.suffix.lower())
    found = found or next((kind for magic, kind in _BY_MAGIC if head.startswith(magic)), None)
    if found is None and path.name.startswith("chunk-") and (path.parent / "index.json").is_file():
        found = ("a litData chunk", _FLATTEN)
    if found is not None:
        what, remedy = found
        raise unreadable(path, f"is {what}, which is not served", remedy)
