r"""Megatron's indexed datasets: tokens in `X.bin`, sequences and documents in `X.idx`.

Layout of the index (Megatron-LM `indexed_dataset.py`), little-endian:

    b"MMIDIDX\0\0" | <u8 version | flags | <u1 dtype code | <u8 num_sequences | <u8 num_indices
    <i4 lengths[num_sequences]      tokens of each sequence
    <i8 pointers[num_sequences]     byte in X.bin at which each begins
    <i8 indices[num_indices]        first sequence of each document, then num_sequences
    <i1 modes[num_sequences]        only in multimodal files; tokens are served as they lie

Version 1 has no flags. Versions 2 and 3 (Fast-LLM) have one and two flag bytes, each announcing
extra arrays; such a file is served when the flags are 0.

An index may hold 10^9 sequences, so it is never read whole: opening checks the sizes, both ends and
a few places between, a look-up reads single entries. They are read, not mapped: an index truncated
under a running server then gives an error instead of a SIGBUS.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from corpus_server.errors import ReadFailed
from corpus_server.formats.layout import ACCEPTED_DTYPES, TOKEN_DTYPES, ShardLayout, TokenDtype, unreadable
from corpus_server.openfile import OpenFile

MAGIC: Final = b"MMIDIDX\x00\x00"
LEGACY_MAGIC: Final = b"TNTIDX\x00\x00"

_DTYPE_NAMES: Final = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_NUM_FLAGS: Final = {1: 0, 2: 1, 3: 2}
_COPY_AGAIN: Final = "was the copy interrupted? Copy .bin and .idx again"
_SAMPLED_SEQUENCES: Final = 16
_CHUNK_ENTRIES: Final = 1 << 18


def index_path(path: Path) -> Path:
    """Return where the index of the data file `path` lies."""
    return path.with_suffix(".idx")


def read(file: OpenFile, index: OpenFile) -> ShardLayout:
    """Return the layout of the data `file` with its `index`; the layout owns `index` from here on."""
    documents = MegatronIndex.parse(index, data=file)
    return ShardLayout(
        path=file.path,
        format="megatron",
        dtype=documents.dtype,
        data_offset=0,
        num_tokens=documents.num_tokens,
        documents=documents,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronIndex:
    """An open `.idx` file whose sizes and ends agree with its `.bin`."""

    file: OpenFile
    dtype: TokenDtype
    num_tokens: int
    num_sequences: int
    num_documents: int
    header_bytes: int

    @classmethod
    def parse(cls, file: OpenFile, *, data: OpenFile) -> MegatronIndex:
        """Read the header of `file` and check it against both sizes, in O(1)."""
        dtype, num_sequences, num_indices, header_bytes = _read_header(file)
        _check_size(file, num_sequences, num_indices, header_bytes)
        if data.size_bytes % dtype.itemsize:
            raise unreadable(
                data.path, f"{data.size_bytes} bytes are no whole {dtype.name} tokens", _COPY_AGAIN
            )
        index = cls(
            file=file,
            dtype=dtype,
            num_tokens=data.size_bytes // dtype.itemsize,
            num_sequences=num_sequences,
            num_documents=num_indices - 1,
            header_bytes=header_bytes,
        )
        index._check_ends(data)
        index._check_sample()
        return index

    @property
    def size_bytes(self) -> int:
        """Size of the index file."""
        return self.file.size_bytes

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of document `number` in [0, num_documents)."""
        self.file.check_unchanged()
        first, end = (int(entry) for entry in self._indices(number, 2))
        if 0 <= first <= end <= self.num_sequences:
            start, stop = self._sequence_start(first), self._sequence_start(end)
            if 0 <= start <= stop <= self.num_tokens:
                return start, stop
        raise ReadFailed(
            f"{self.file.path.name}: the entry of document {number} contradicts its neighbours",
            remedy="run corpus-server verify, then copy or build the index again",
        )

    def find_problem(self) -> str | None:
        """Read the whole index in bounded memory; return what contradicts itself, or None."""
        name, itemsize, expected = self.file.path.name, self.dtype.itemsize, 0
        for start in range(0, self.num_sequences, _CHUNK_ENTRIES):
            count = min(_CHUNK_ENTRIES, self.num_sequences - start)
            ends = expected + np.cumsum(self._lengths(start, count).astype(np.int64) * itemsize)
            begins = np.concatenate(([expected], ends[:-1]))
            wrong = np.flatnonzero(self._pointers(start, count) != begins)
            if wrong.size:
                return f"{name}: sequence {start + int(wrong[0])} does not begin where the one before it ends"
            expected = int(ends[-1])
        previous = 0
        for start in range(0, self.num_documents + 1, _CHUNK_ENTRIES):
            indices = self._indices(start, min(_CHUNK_ENTRIES, self.num_documents + 1 - start))
            wrong = np.flatnonzero(np.diff(indices, prepend=previous) < 0)
            if wrong.size:
                return f"{name}: document {start + int(wrong[0])} begins before the one before it"
            previous = int(indices[-1])
        return None

    def close(self) -> None:
        """Close the index file; a second call does nothing."""
        self.file.close()

    def _lengths(self, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.frombuffer(self.file.read(self.header_bytes + 4 * start, 4 * count), "<i4")

    def _pointers(self, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        offset = self.header_bytes + 4 * self.num_sequences + 8 * start
        return np.frombuffer(self.file.read(offset, 8 * count), "<i8")

    def _indices(self, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        offset = self.header_bytes + 12 * self.num_sequences + 8 * start
        return np.frombuffer(self.file.read(offset, 8 * count), "<i8")

    def _sequence_start(self, number: int) -> int:
        """Return the first token of a sequence; behind the last one, the number of tokens."""
        if number == self.num_sequences:
            return self.num_tokens
        return int(self._pointers(number, 1)[0]) // self.dtype.itemsize

    def _check_ends(self, data: OpenFile) -> None:
        path, num_sequences = self.file.path, self.num_sequences
        first, last = int(self._indices(0, 1)[0]), int(self._indices(self.num_documents, 1)[0])
        if (first, last) != (0, num_sequences):
            raise unreadable(
                path,
                f"its documents cover sequences {first} to {last}, expected 0 to {num_sequences}",
                "build the index again",
            )
        begin = end = 0
        if num_sequences:
            begin = int(self._pointers(0, 1)[0])
            last_pointer = int(self._pointers(num_sequences - 1, 1)[0])
            end = last_pointer + int(self._lengths(num_sequences - 1, 1)[0]) * self.dtype.itemsize
        if begin != 0:
            raise unreadable(path, f"its first sequence begins at byte {begin}, expected 0", _COPY_AGAIN)
        if end != data.size_bytes and (data.size_bytes - end) % 2**32 == 0:
            raise _overflowed(path)
        if end != data.size_bytes:
            raise unreadable(
                path,
                f"its sequences end at byte {end}, but {data.path.name} holds {data.size_bytes} bytes",
                _COPY_AGAIN,
            )

    def _check_sample(self) -> None:
        """Check at a few places that each sequence begins where the one before it ends."""
        last = self.num_sequences - 2
        for number in {last * i // (_SAMPLED_SEQUENCES - 1) for i in range(_SAMPLED_SEQUENCES) if last >= 0}:
            begin, after = (int(pointer) for pointer in self._pointers(number, 2))
            end = begin + int(self._lengths(number, 1)[0]) * self.dtype.itemsize
            if end == after and begin >= 0:
                continue
            if begin < 0 or (end - after) % 2**32 == 0:
                raise _overflowed(self.file.path)
            raise unreadable(
                self.file.path,
                f"sequence {number + 1} begins at byte {after}, the one before it ends at byte {end}",
                "tokens must lie one after another: build the dataset again",
            )


def _overflowed(path: Path) -> Exception:
    return unreadable(
        path,
        "its byte pointers overflowed 32 bits (merged by an old tool)",
        "merge the files again with a Megatron of today; the .bin itself is whole and can be served as raw "
        "tokens from a folder without the .idx",
    )


def _read_header(file: OpenFile) -> tuple[TokenDtype, int, int, int]:
    """Return dtype, num_sequences, num_indices and the size of the header in bytes."""
    head = file.head(40)
    if len(head) < 17:
        raise unreadable(file.path, f"{file.size_bytes} bytes end inside the Megatron header", _COPY_AGAIN)
    (version,) = struct.unpack_from("<Q", head, 9)
    if version not in _NUM_FLAGS:
        raise unreadable(
            file.path,
            f"Megatron index version {version} is unknown (served: 1; 2 and 3 without spans)",
            "build the index again as version 1, or serve the .bin alone as raw tokens",
        )
    position = 17 + _NUM_FLAGS[version]
    header_bytes = position + 17
    if len(head) < header_bytes:
        raise unreadable(file.path, f"{file.size_bytes} bytes end inside the Megatron header", _COPY_AGAIN)
    if any(head[17:position]):
        raise unreadable(
            file.path,
            f"Megatron index version {version} with spans (Fast-LLM) is not served",
            "build it again without loss-masking or preference spans",
        )
    code, num_sequences, num_indices = struct.unpack_from("<BQQ", head, position)
    name = _DTYPE_NAMES.get(code, "unknown")
    if name not in TOKEN_DTYPES:
        raise unreadable(
            file.path,
            f"its tokens are {name} (dtype code {code}), served are {ACCEPTED_DTYPES}",
            "build the dataset again with uint16 or int32 tokens",
        )
    if num_indices < 1:
        raise unreadable(
            file.path, "it holds no document entries, expected at least 1", "build the index again"
        )
    return TOKEN_DTYPES[name], num_sequences, num_indices, header_bytes


def _check_size(file: OpenFile, num_sequences: int, num_indices: int, header_bytes: int) -> None:
    expected_bytes = header_bytes + 12 * num_sequences + 8 * num_indices
    if file.size_bytes not in (expected_bytes, expected_bytes + num_sequences):  # with modes
        raise unreadable(
            file.path,
            f"{num_sequences} sequences and {num_indices} document entries need {expected_bytes} bytes, "
            f"the index holds {file.size_bytes}",
            _COPY_AGAIN,
        )
