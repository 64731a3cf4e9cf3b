r"""Megatron's indexed datasets: tokens in `X.bin`, sequences and documents in `X.idx`.

Layout of the index (Megatron-LM `indexed_dataset.py`), little-endian:

    b"MMIDIDX\0\0" | <u8 version | flags | <u1 dtype code | <u8 num_sequences | <u8 num_indices
    <i4 lengths[num_sequences]      tokens of each sequence
    <i8 pointers[num_sequences]     byte in X.bin at which each begins
    <i8 indices[num_indices]        first sequence of each document, then num_sequences
    <i1 modes[num_sequences]        only in multimodal files; ignored

Version 1 has no flags. Versions 2 and 3 (Fast-LLM) have one and two flag bytes. A flag announces an
extra array; a file is served if all flags are 0.

An index may hold 10^9 sequences, so it is never read whole: opening checks the sizes, both ends and
a few places between, and a look-up reads single entries. Only views map it.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.files import OpenFile, unreadable
from corpus_server.corpus.formats.documents import CHUNK_ENDS, CumulativeEnds, first_disorder, runs_of
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    TOKEN_DTYPES,
    Ends,
    Format,
    Run,
    ShardLayout,
    TokenDtype,
    not_served,
    read_header,
    whole_number,
)
from corpus_server.errors import UnreadableCorpus
from corpus_server.pieces import steps_of

_MAGIC: Final = b"MMIDIDX\x00\x00"
_LEGACY_MAGIC: Final = b"TNTIDX\x00\x00"

# dtype code -> name; there is no uint32
_DTYPE_NAMES: Final = dict(
    enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), start=1)
)
_NUM_FLAGS: Final = {1: 0, 2: 1, 3: 2}  # version -> flag bytes
_COPY_AGAIN: Final = "was the copy interrupted? Copy .bin and .idx again"
_OVERFLOWED: Final = (
    "its byte pointers overflowed 32 bits (merged by an old tool)",
    "merge the files again with a Megatron of today; the .bin itself is whole and can be served as raw "
    "tokens from a folder without the .idx",
)
_SAMPLED_SEQUENCES: Final = 16


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    path, index_path = file.path, file.path.with_suffix(".idx")
    if path.suffix == ".bin" and index_path.exists():
        return _read_pair(file, index_path)
    head = file.head(len(_MAGIC))
    if head == _MAGIC:
        raise not_served(file, "a Megatron index under another name", "name it X.idx, beside X.bin")
    if head.startswith(_LEGACY_MAGIC):
        raise not_served(file, "an index of the legacy fairseq format", "build it again as MMIDIDX")
    if dtype is None and path.name.endswith(("_text_document.bin", "_text_sentence.bin")):
        raise file.unreadable(
            f"named like one half of a Megatron dataset, but {index_path.name} is missing",
            f"put the index beside it, or say the dtype ({ACCEPTED_DTYPES}) to serve it as raw tokens",
        )
    return None


def _read_pair(file: OpenFile, index_path: Path) -> ShardLayout:
    with ExitStack() as on_error:
        index = on_error.enter_context(OpenFile(index_path))
        magic = index.head(len(_MAGIC))
        if magic != _MAGIC:
            what = "a legacy fairseq index" if magic.startswith(_LEGACY_MAGIC) else "no Megatron index"
            raise index.unreadable(
                f"is {what}: expected it to begin with MMIDIDX, got {magic!r}",
                f"build the index again, or move it away to serve {file.path.name} as raw tokens",
            )
        documents = MegatronIndex(index, data=file)
        on_error.pop_all()  # from here on the layout's owner closes the index
    return ShardLayout(
        format="megatron",
        reason="an .idx of the same name beside it",
        dtype=documents.dtype,
        runs=(Run(0, documents.num_tokens),),
        documents=documents,
    )


def _find_data(path: Path) -> Path | None:
    """Return X.bin for X.idx, and for the prefix X if both files are there."""
    if path.suffix == ".idx":
        data = path.with_suffix(".bin")
        if not data.is_file():
            raise unreadable(path, f"is an index, but {data.name} is missing beside it", "put the .bin there")
        return data
    data = path.parent / f"{path.name}.bin"  # the root has no name
    if not path.exists() and data.is_file() and data.with_suffix(".idx").is_file():
        return data
    return None


def _check_folder(paths: Collection[Path], dtype_given: bool) -> None:
    """Check that no `.idx` lacks its `.bin` and, if any `.bin` has an `.idx`, that all have one."""
    indices = {path.with_suffix("") for path in paths if path.suffix == ".idx"}
    data = {path.with_suffix("") for path in paths if path.suffix == ".bin"}
    if orphans := sorted(indices - data):
        raise unreadable(
            orphans[0].with_name(f"{orphans[0].name}.idx"),
            f"is an index, but {orphans[0].name}.bin is missing beside it",
            "put the .bin there or remove the .idx",
        )
    if indices and (alone := sorted(data - indices)) and not dtype_given:
        raise unreadable(
            alone[0].with_name(f"{alone[0].name}.bin"),
            "has no .idx, but other files of the folder do: it may be raw tokens or half of a Megatron pair",
            "put its .idx there, or give the dtype to serve it as raw tokens",
        )


_COMPARED_DOCUMENTS: Final = 1 << 23  # 64 MiB, in 10 ms


class MegatronIndex(CumulativeEnds):
    """An open `.idx` file, checked in O(1) against its own size and its `.bin`."""

    remedy = "run corpus-server verify, then copy or build the index again"
    joins_sequences = True

    def __init__(self, file: OpenFile, *, data: OpenFile) -> None:
        self.file = file
        self.dtype, self.num_sequences, num_indices, self.header_bytes = _read_header(file)
        self.num_documents = num_indices - 1
        self.num_tokens = whole_number(data, self.dtype.itemsize, f"{self.dtype.name} tokens", _COPY_AGAIN)
        self._check_ends(data)
        self._check_sample()

    def ends(self, first: int, count: int) -> Ends:
        """Return the ends of documents [first, first + count), in tokens; -1 for an impossible one."""
        return np.array([self._sequence_start(each) for each in self._indices(first + 1, count).tolist()])

    def _ends_from(self, first: NDArray[np.int64], count: int) -> Ends:
        """See `CumulativeEnds`."""
        pointers = self._mapped_array("<i8", self.header_bytes + 4 * self.num_sequences, self.num_sequences)
        numbers, last = first + 1, self.num_sequences - count
        if self._is_plain:
            first, is_run = numbers, numbers <= last
        else:
            sequences = runs_of(self._mapped_indices, numbers, count)
            first, is_next = sequences[:, 0], steps_of(sequences.ravel()) == 1
            is_next[count - 1 :: count] = (first >= 0) & (first <= last)
            is_run = is_next if is_next.all() else is_next.reshape(-1, count).all(axis=1)
        ends = (
            runs_of(pointers, first.clip(0, last), count)
            if last >= 0
            else np.empty((first.size, count), "<i8")
        )
        ends >>= self.dtype.itemsize.bit_length() - 1  # to tokens, in half the time of a division
        if not is_run.all():
            some = runs_of(self._mapped_indices, numbers[~is_run], count)
            is_one = (some >= 0) & (some < self.num_sequences)
            its = np.where(some == self.num_sequences, self.num_tokens, -1)
            its[is_one] = pointers[some[is_one]] // self.dtype.itemsize
            ends[~is_run] = its
        return ends

    @property
    def _mapped_indices(self) -> NDArray[np.int64]:
        """Return the first sequence of each document, then their number, from the map of the file."""
        return self._mapped_array("<i8", self.header_bytes + 12 * self.num_sequences, self.num_documents + 1)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether each document is known to be one sequence: a large index is not read for it."""
        if self.num_documents != self.num_sequences or self.num_documents > _COMPARED_DOCUMENTS:
            return False
        indices = self._mapped_indices
        starts = range(0, indices.size, CHUNK_ENDS)
        return all((steps_of(indices[start : start + CHUNK_ENDS + 1])[:-1] == 1).all() for start in starts)

    @property
    def _sorted_ends(self) -> None:
        """See `CumulativeEnds`: a document's end is that of its last sequence, which another array names."""

    def sequence_lengths(self) -> Ends:
        """Return the tokens of each sequence: Megatron shuffles these, and a document may have several."""
        with self.file.unchanged():
            return self._lengths(0, self.num_sequences)

    def find_problem(self) -> str | None:
        """Read the whole index in bounded memory; return the first contradiction, or None."""
        name, end = self.file.path.name, 0
        for start in range(0, self.num_sequences, CHUNK_ENDS):
            count = min(CHUNK_ENDS, self.num_sequences - start)
            lengths, begins = self._lengths(start, count), self._pointers(start, count)
            expected = end + np.cumsum([0, *lengths * self.dtype.itemsize])
            wrong = np.flatnonzero((lengths < 0) | (begins != expected[:-1]))
            if wrong.size:
                what = "does not begin where the one before it ends, or has a negative length"
                return f"{name}: sequence {start + int(wrong[0])} {what}"
            end = int(expected[-1])
        document = first_disorder(self._indices, self.num_documents + 1, self.num_sequences)
        return None if document is None else f"{name}: document {document} begins before the one before it"

    def _lengths(self, start: int, count: int) -> Ends:
        return self._entries(4 * start, count, "<i4").astype("<i8")

    def _pointers(self, start: int, count: int) -> Ends:
        return self._entries(4 * self.num_sequences + 8 * start, count, "<i8")

    def _indices(self, start: int, count: int) -> Ends:
        return self._entries(12 * self.num_sequences + 8 * start, count, "<i8")

    def _entries(self, offset: int, count: int, dtype: str) -> Ends:
        data = self.file.read(self.header_bytes + offset, count * np.dtype(dtype).itemsize)
        return np.frombuffer(data, dtype)

    def _extent(self, number: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a sequence in the `.bin`."""
        begin = int(self._pointers(number, 1)[0])
        return begin, begin + int(self._lengths(number, 1)[0]) * self.dtype.itemsize

    def _sequence_start(self, number: int) -> int:
        """Return the first token of a sequence; behind the last sequence, the number of tokens."""
        if number == self.num_sequences:
            return self.num_tokens
        if not 0 <= number < self.num_sequences:
            return -1
        return int(self._pointers(number, 1)[0]) // self.dtype.itemsize

    def _check_ends(self, data: OpenFile) -> None:
        num_sequences = self.num_sequences
        first, last = int(self._indices(0, 1)[0]), int(self._indices(self.num_documents, 1)[0])
        if (first, last) != (0, num_sequences):
            raise self.file.unreadable(
                f"its documents cover sequences {first} to {last}, expected 0 to {num_sequences}",
                "build the index again",
            )
        begin, end = (self._extent(0)[0], self._extent(num_sequences - 1)[1]) if num_sequences else (0, 0)
        if begin != 0:
            raise self.file.unreadable(f"its first sequence begins at byte {begin}, expected 0", _COPY_AGAIN)
        if end != data.size_bytes:
            what = f"its sequences end at byte {end}, but {data.path.name} holds {data.size_bytes} bytes"
            raise self._wrong(data.size_bytes - end, what, _COPY_AGAIN)

    def _check_sample(self) -> None:
        """Check at a few places that each sequence begins where the one before it ends."""
        last = self.num_sequences - 2
        for number in {last * i // (_SAMPLED_SEQUENCES - 1) for i in range(_SAMPLED_SEQUENCES) if last >= 0}:
            (begin, end), (after, _) = self._extent(number), self._extent(number + 1)
            if begin < 0 or end != after:
                what = f"sequence {number + 1} begins at byte {after}, the one before it ends at byte {end}"
                remedy = "tokens must lie one after another: build the dataset again"
                raise self._wrong(0 if begin < 0 else end - after, what, remedy)

    def _wrong(self, num_bytes: int, what: str, remedy: str) -> UnreadableCorpus:
        """Return the error for a pointer that is wrong by so many bytes."""
        return self.file.unreadable(*(_OVERFLOWED if num_bytes % 2**32 == 0 else (what, remedy)))


def _read_header(file: OpenFile) -> tuple[TokenDtype, int, int, int]:
    """Return dtype, num_sequences, num_indices and the size of the header in bytes; check the file's size."""
    _, version = read_header(file, "<9sQ", "the Megatron header", remedy=_COPY_AGAIN)
    if version not in _NUM_FLAGS:
        raise file.unreadable(
            f"Megatron index version {version} is unknown (served: 1; 2 and 3 without spans)",
            "build the index again as version 1, or serve the .bin alone as raw tokens",
        )
    form = f"<17x{_NUM_FLAGS[version]}sBQQ"
    flags, code, num_sequences, num_indices = read_header(
        file, form, "the Megatron header", remedy=_COPY_AGAIN
    )
    if any(flags):
        raise file.unreadable(
            f"Megatron index version {version} with spans (Fast-LLM) is not served",
            "build it again without loss-masking or preference spans",
        )
    name = _DTYPE_NAMES.get(code, "unknown")
    if name not in TOKEN_DTYPES:
        raise file.unreadable(
            f"its tokens are {name} (dtype code {code}), served are {ACCEPTED_DTYPES}",
            "build the dataset again with uint16 or int32 tokens",
        )
    if num_indices < 1:
        raise file.unreadable("it holds no document entries, expected at least 1", "build the index again")
    header_bytes = struct.calcsize(form)
    expected_bytes = header_bytes + 12 * num_sequences + 8 * num_indices
    if file.size_bytes not in (expected_bytes, expected_bytes + num_sequences):  # with modes
        raise file.unreadable(
            f"{num_sequences} sequences and {num_indices} document entries need {expected_bytes} bytes, "
            f"the index holds {file.size_bytes}",
            _COPY_AGAIN,
        )
    return TOKEN_DTYPES[name], num_sequences, num_indices, header_bytes


FORMAT: Final = Format(
    read=_read, side_files={"*.idx": "a Megatron index"}, find_data=_find_data, check_folder=_check_folder
)
