"""Writers of token files for tests, written from the formats' descriptions and not from the readers."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.layout import ShardLayout, token_dtype
from corpus_server.corpus.formats.registry import data_path, read_layout
from corpus_server.corpus.selection import list_shards
from corpus_server.corpus.shards import Shard, open_runs
from corpus_server.corpus_spec import CorpusSpec

Tokens = npt.ArrayLike

MEGATRON_CODES = {
    "uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8,
}  # fmt: skip


def spec(path: Path | str, name: str = "c", **options: Any) -> CorpusSpec:
    """Return what a user says of a corpus."""
    return CorpusSpec(name=name, path=Path(path), **options)


def open_corpus(path: Path | str, name: str = "c", **options: Any) -> Corpus:
    """Open a corpus; the caller closes it."""
    return Corpus.open(spec(path, name, **options))


def open_shard(path: Path, **options: Any) -> Shard:
    """Open a token file that holds one run; see `open_runs`."""
    (shard,) = open_runs(path, **options)
    return shard


def some_tokens(count: int, *, dtype: str = "uint16", vocabulary: int = 50_000, seed: int = 0) -> np.ndarray:
    """Return `(count,) dtype` random tokens below `vocabulary` (and within the dtype)."""
    limit = min(vocabulary, int(np.iinfo(dtype).max) + 1)
    return np.random.default_rng(seed).integers(0, limit, count).astype(dtype)


def open_descriptors() -> int:
    """Return how many files this process holds open."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


def open_files() -> set[tuple[str, str]]:
    """Return the files and folders that this process has open: descriptors and paths.

    Those that are there later and were not before were opened since then; others may have been closed in
    between, because an earlier test left them to the collector or to a thread.
    """
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed a moment ago, as the listing itself
            path = str(each.readlink())
            if path.startswith("/") and not path.startswith(("/dev/", "/proc/")):
                found.add((each.name, path))
    return found


def write_raw(path: Path, tokens: Tokens, *, dtype: str = "uint16") -> Path:
    """Write headerless tokens."""
    path.write_bytes(np.asarray(tokens).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    return path


def write_npy(path: Path, tokens: Tokens, *, dtype: str = "uint16") -> Path:
    """Write a real NPY file."""
    with path.open("wb") as file:
        np.save(file, np.asarray(tokens).astype(dtype))
    return path


def write_llmc(path: Path, tokens: Tokens, *, dtype: str = "uint16") -> Path:
    """Write llm.c's format: version 1 for uint16, version 7 (Llama 3) for uint32."""
    magic, version = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[dtype]
    array = np.asarray(tokens).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, array.size
    path.write_bytes(header.tobytes() + array.tobytes())
    return path


def megatron_index(
    lengths: Sequence[int],
    *,
    dtype: str = "uint16",
    documents: Sequence[int] | None = None,
    pointers: Sequence[int] | None = None,
    modes: bool = False,
    version: int = 1,
    flags: bytes = b"",
) -> bytes:
    """Return the bytes of an `.idx` for sequences of `lengths` tokens.

    Args:
        lengths: tokens of each sequence.
        dtype: type of the tokens.
        documents: first sequence of each document, then their number; default one sequence each.
        pointers: byte of each sequence; default one behind the other.
        modes: append the int8 modes of multimodal files.
        version, flags: as Fast-LLM's versions 2 and 3 have them.
    """
    itemsize = np.dtype(dtype).itemsize if dtype in MEGATRON_CODES else 2
    if pointers is None:
        pointers = (np.cumsum([0, *lengths])[:-1] * itemsize).tolist()
    if documents is None:
        documents = range(len(lengths) + 1)
    return b"".join(
        (
            b"MMIDIDX\x00\x00",
            struct.pack("<Q", version),
            flags,
            struct.pack("<BQQ", MEGATRON_CODES.get(dtype, 99), len(lengths), len(documents)),
            np.asarray(lengths, "<i4").tobytes(),
            np.asarray(pointers, "<i8").tobytes(),
            np.asarray(documents, "<i8").tobytes(),
            bytes(len(lengths)) if modes else b"",
        )
    )


def write_megatron(prefix: Path, documents: Sequence[Sequence[int]], **index: Any) -> Path:
    """Write `prefix`.bin and `prefix`.idx with one sequence per document; return the .bin's path."""
    dtype = index.get("dtype", "uint16")
    path = prefix.with_name(prefix.name + ".bin")
    tokens = [token for document in documents for token in document]
    write_raw(path, tokens, dtype=dtype)
    idx = megatron_index([len(document) for document in documents], **index)
    prefix.with_name(prefix.name + ".idx").write_bytes(idx)
    return path


def write_arrow(path: Path, table: Any, *, rows: int = 1000, kind: str = "stream", **options: Any) -> Path:
    """Write a pyarrow table in batches of `rows` rows, as a stream or a file; `options` are pyarrow's."""
    import pyarrow.ipc  # few tests need it

    new = {"stream": pyarrow.ipc.new_stream, "file": pyarrow.ipc.new_file}[kind]
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        new(file, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer,
    ):
        writer.write_table(table, max_chunksize=rows)
    return path


def write_sparse(
    path: Path, num_tokens: int, *, dtype: str = "uint16", at: dict[int, int] | None = None
) -> Path:
    """Write a raw file of `num_tokens` zeros that takes no disk space; `at` sets single tokens."""
    itemsize = np.dtype(dtype).itemsize
    with path.open("wb") as file:
        os.truncate(file.fileno(), num_tokens * itemsize)
        for position, token in (at or {}).items():
            file.seek(position * itemsize)
            file.write(int(token).to_bytes(itemsize, "little"))
    return path


def rewrite_in_place(path: Path, content: bytes) -> None:
    """Write over a file and restore its modification time, as `rsync --inplace -t` does."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock ticks every few milliseconds
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def recognise(path: Path | str, *, dtype: object = None) -> ShardLayout:
    """Return the layout of a token file; the caller's document index, if any, stays open."""
    with OpenFile(data_path(Path(path))) as file:
        return read_layout(file, None if dtype is None else token_dtype(dtype))


def discover(folder: Path, *, dtype: object = None) -> list[ShardLayout]:
    """Return the layouts of all shards of a folder, in natural order."""
    accepted = None if dtype is None else token_dtype(dtype)
    layouts = []
    for shard in list_shards(spec(folder, dtype=dtype)):
        with OpenFile(shard.path) as file:
            layouts.append(read_layout(file, accepted, in_folder=True))
    return layouts


def write_megatron_lengths(prefix: Path, lengths: np.ndarray, *, eot: int) -> Path:
    """Write documents of these lengths, each of which ends with `eot`; return the .bin's path."""
    tokens = np.random.default_rng(1).integers(10, 50_000, int(lengths.sum())).astype("uint16")
    tokens[lengths.cumsum() - 1] = eot
    path = write_raw(prefix.with_name(prefix.name + ".bin"), tokens)
    prefix.with_name(prefix.name + ".idx").write_bytes(megatron_index(lengths.tolist()))
    return path
