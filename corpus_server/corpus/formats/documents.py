"""Documents whose ends lie in a file as one array, and our own such file, the sidecar `<shard>.documents`.

The sidecar is for shards whose format has no documents. Layout, little-endian, 96 bytes of header:

    byte  0  b"CORPDOCS"
          8  <u8 version: 1, or 2 where documents begin with the end-of-text token
         16  <u8 id of the end-of-text token; 2^64 - 1 if a side file listed the ends
         24  <u8 num_tokens of the shard
         32  <u8 num_documents
         40  dtype of the shard, ASCII, padded with zero bytes to 8
         48  32 bytes, the shard's fingerprint: sampled, 8 blocks, this shard alone
         80  <u8 xxh3-64 of the ends
         88  <u8 xxh3-64 of bytes 0 to 87
         96  <u8 ends[num_documents]

Document n is the tokens [ends[n - 1], ends[n]) of the shard, including its end-of-text token; the
first begins at 0, and the last one ends with the shard. So a shard that is cut inside a document has a last
document without an end-of-text token, or in version 2 a first one. An empty shard has no documents.

A shard may hold 10^9 documents, so single ends are read from the file, never all of them at once.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.layout import (
    TOKEN_DTYPES,
    DocumentIndex,
    Ends,
    Format,
    TokenDtype,
    read_header,
)
from corpus_server.errors import InvalidParameter, ReadFailed
from corpus_server.pieces import expanded

CHUNK_ENDS: Final = 1 << 17  # ends; 1 MiB of int64
HEADER_BYTES: Final = 96
END_DTYPE: Final[np.dtype[np.uint64]] = np.dtype("<u8")

_MAGIC: Final = b"CORPDOCS"
_LAST, _FIRST = 1, 2  # versions, by where a document has its end-of-text token
_LISTED: Final = 2**64 - 1  # in place of an end-of-text id
_HEADER: Final = struct.Struct("<8sQQQQ8s32sQ")
_SUFFIX: Final = ".documents"
_AGAIN: Final = "run corpus-server index on the corpus again, or delete the file"


class CumulativeEnds(DocumentIndex):
    """An open file that holds the end of every document; document n begins where n - 1 ends.

    Args:
        file: closed with the index.
        at: byte of the file at which the ends begin.
        num_tokens: of the shard; no document ends behind it.
        entry: dtype of the ends on disk.
        origin, unit: an entry of token end `e` is `origin + unit * e` (litData stores bytes of the file).
    """

    remedy: ClassVar = "run corpus-server verify, then copy the index again"

    def __init__(
        self,
        file: OpenFile,
        *,
        at: int,
        num_documents: int,
        num_tokens: int,
        entry: str = "<u8",
        origin: int = 0,
        unit: int = 1,
    ) -> None:
        self.file = file
        self.num_documents = num_documents
        self.num_tokens = num_tokens
        self._at, self._entry = at, np.dtype(entry)
        self._origin, self._unit = origin, unit

    def ends(self, first: int, count: int) -> Ends:
        """Return the ends of documents [first, first + count), in tokens."""
        size = self._entry.itemsize
        data = self.file.read(self._at + first * size, count * size)
        return (np.frombuffer(data, self._entry).astype(np.int64) - self._origin) // self._unit

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of document `number` in [0, num_documents)."""
        with self.file.unchanged():
            start, stop = self.ends(number - 1, 2).tolist() if number else (0, int(self.ends(0, 1)[0]))
        if 0 <= start <= stop <= self.num_tokens:
            return start, stop
        raise ReadFailed(
            f"{self.file.full_name}: the entry of document {number} contradicts its neighbours",
            remedy=self.remedy,
        )

    def edges(self, first: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """See `DocumentIndex.edges`."""
        before = first - 1  # a document begins where the one before it ends
        last = self.num_documents - count - 1
        if last >= 0:
            edges = self._ends_from(before.clip(0, last), count + 1).astype(np.int64, copy=False)
        else:
            edges = np.zeros((first.size, count + 1), dtype=np.int64)
        outside = (before < 0) | (before > last)
        edges[outside] = 0
        for low in set(before[outside].tolist()):
            begin, stop = max(low, 0), min(low + count + 1, self.num_documents)
            if begin >= stop:  # no document, or no token before the first one
                continue
            known = self._ends_from(np.array([begin]), stop - begin)[0]
            edges[before == low] = [0] * (begin - low) + np.pad(
                known, (0, low + count + 1 - stop), "edge"
            ).tolist()
        self.file.check_unchanged()  # afterwards: a page that could not be read holds zeros
        falls = edges.ravel()[1:] < edges.ravel()[:-1]
        falls[count :: count + 1] = False  # from one row to the next
        if falls.any() or (edges[:, 0] < 0).any() or (edges[:, -1] > self.num_tokens).any():
            raise ReadFailed(f"{self.file.full_name}: it contradicts itself", remedy=self.remedy)
        return edges

    def holding(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `DocumentIndex.holding`."""
        if not self.num_documents:
            return np.empty(0, np.int64), np.zeros_like(starts)
        with self.file.unchanged():
            # The first document that ends behind a token holds it: empty ones before it end at or before it.
            low, high = self._first_behind(np.stack((starts, stops - 1)))
            ranges, numbers = expanded(low, np.minimum(high + 1, self.num_documents) - low)
            begins, ends = self.edges(numbers, 1).T
        held = begins < ends
        return numbers[held], np.bincount(ranges[held], minlength=starts.size)

    def _first_behind(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first document that ends behind each token; their number where none does."""
        if (ends := self._sorted_ends) is not None:
            found: NDArray[np.int64] = ends.searchsorted(
                (self._origin + self._unit * tokens).astype(ends.dtype), side="right"
            )
            return found
        low, high = np.zeros_like(tokens), np.full_like(tokens, self.num_documents)
        while (low < high).any():
            middle = (low + high) // 2
            numbers = np.minimum(middle, self.num_documents - 1).ravel()
            is_behind = (self.edges(numbers, 1)[:, 1].reshape(tokens.shape) > tokens) | (low >= high)
            high = np.where(is_behind, np.minimum(middle, high), high)
            low = np.where(is_behind, low, middle + 1)
        return low

    @property
    def _sorted_ends(self) -> NDArray[Any] | None:
        """The ends as entries of the file's map; None if NumPy would copy them all to search among them."""
        ends = self._mapped_array(self._entry, self._at, self.num_documents)
        return ends if ends.flags.aligned else None

    @cached_property
    def _mapped(self) -> memoryview:
        return self.file.map()

    def _ends_from(self, first: NDArray[np.int64], count: int) -> Ends:
        """Return the ends of documents [first, first + count), all of which exist, from the map of the file.

        `(k, count)` of `(k,)` numbers.
        """
        found = runs_of(self._mapped_array(self._entry, self._at, self.num_documents), first, count)
        ends: Ends = found.astype(np.int64)
        if (self._origin, self._unit) != (0, 1):
            ends -= self._origin
            ends //= self._unit
        return ends

    def _mapped_array(self, dtype: np.dtype[Any] | str, at: int, count: int) -> NDArray[Any]:
        return np.frombuffer(self._mapped, dtype, count=count, offset=at)

    def sequence_lengths(self) -> Ends:
        """Return the tokens of each document."""
        with self.file.unchanged():
            return np.diff(self.ends(0, self.num_documents), prepend=0)

    def find_problem(self) -> str | None:
        """Read all ends in bounded memory; return the first contradiction, or None."""
        number = first_disorder(self.ends, self.num_documents, self.num_tokens)
        if number is None:
            return None
        return f"{self.file.path.name}: document {number} ends before it begins, or behind the shard"


def runs_of(array: NDArray[Any], first: NDArray[np.int64], count: int) -> NDArray[Any]:
    """Return the items [first, first + count) of an array: `(k, count)` of `(k,)` places.

    Each is one item of an array of long ones that overlap, so one copy: a tenth of the time of an index each.
    """
    if not first.size:
        return np.empty((0, count), dtype=array.dtype)
    size = array.itemsize
    runs = np.ndarray(array.size - count + 1, f"V{count * size}", array, strides=(size,))
    return runs[first].view(array.dtype).reshape(-1, count)


def first_disorder(read: Callable[[int, int], Ends], count: int, most: int) -> int | None:
    """Return the number of the first entry that is below the one before it, or 0, or above `most`."""
    previous = 0
    for first in range(0, count, CHUNK_ENDS):
        entries = read(first, min(CHUNK_ENDS, count - first))
        wrong = np.flatnonzero((np.diff(entries, prepend=previous) < 0) | (entries > most))
        if wrong.size:
            return first + int(wrong[0])
        previous = int(entries[-1])
    return None


class CutDocuments(DocumentIndex):
    """The documents that touch tokens [start, stop) of a shard.

    The first and the last one are cut there: what is left of them counts as a document. Ranges are numbered
    from token `start`.

    Args:
        is_run: whether the tokens are a run of the file, as opposed to a range that the user chose.
    """

    def __init__(self, whole: DocumentIndex, start: int, stop: int, *, is_run: bool = False) -> None:
        self.file, self._is_run = whole.file, is_run
        self._whole, self._start, self._stop = whole, start, stop
        numbers = range(whole.num_documents)
        self._first = bisect_right(numbers, start, key=lambda number: whole.document_range(number)[1])
        end = bisect_left(numbers, stop, key=lambda number: whole.document_range(number)[0])
        self.num_documents = end - self._first if start < stop else 0  # an empty run is inside a document

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of document `number` in [0, num_documents)."""
        start, stop = self._whole.document_range(self._first + number)
        return max(start, self._start) - self._start, min(stop, self._stop) - self._start

    def edges(self, first: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """See `DocumentIndex.edges`."""
        return self._whole.edges(self._first + first, count).clip(self._start, self._stop) - self._start

    def holding(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `DocumentIndex.holding`."""
        numbers, counts = self._whole.holding(starts + self._start, stops + self._start)
        return numbers - self._first, counts

    def sequence_lengths(self) -> Ends:
        """Return the tokens of each document; refuse what the user cut, which would be another sequence."""
        edges = self._whole.edges(np.array([self._first]), self.num_documents)[0]
        is_cut = self.num_documents and not self._start <= edges[0] <= edges[-1] <= self._stop
        if (is_cut and not self._is_run) or self._whole.joins_sequences:
            raise InvalidParameter(
                f"{self.file.full_name}: the token_range of the corpus, [{self._start}, {self._stop}) of it, "
                "may cut a sequence in two",
                parameter="token_range",
                remedy="serve it without token_range; order megatron has a split of its own",
            )
        lengths: Ends = np.diff(edges.clip(self._start, self._stop))
        return lengths

    def find_problem(self) -> str | None:
        """Read the shard's whole index in bounded memory; return the first contradiction, or None."""
        return self._whole.find_problem()


def documents_path(path: Path) -> Path:
    """Return where the document ends of the token file `path` are kept."""
    return path.with_name(path.name + _SUFFIX)


class DocumentsHeader(NamedTuple):
    """The header of a sidecar, see the layout above."""

    eot: int | None  # None: a side file listed the ends
    eot_first: bool  # whether documents begin with it
    num_tokens: int
    num_documents: int
    dtype: TokenDtype
    fingerprint: bytes
    ends_checksum: int

    def pack(self) -> bytes:
        """Return the header's bytes."""
        eot, version = _LISTED if self.eot is None else self.eot, _FIRST if self.eot_first else _LAST
        fields = _HEADER.pack(_MAGIC, version, eot, *self[2:4], self.dtype.name.encode(), *self[5:])
        return fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")

    @classmethod
    def unpack(cls, file: OpenFile) -> DocumentsHeader:
        """Read and check the header of an open sidecar."""
        magic = file.head(len(_MAGIC))
        if magic != _MAGIC:
            raise file.unreadable(f"expected it to begin with {_MAGIC!r}, got {magic!r}", _AGAIN)
        *fields, checksum = read_header(file, f"{_HEADER.format}Q", "the header", remedy=_AGAIN)
        _, version, eot, num_tokens, num_documents, dtype, *digests = fields
        if version not in (_LAST, _FIRST):
            raise file.unreadable(f"version {version} is unknown (known: {_LAST}, {_FIRST})", _AGAIN)
        name = dtype.rstrip(b"\0").decode("ascii", "replace")
        if checksum != xxhash.xxh3_64_intdigest(_HEADER.pack(*fields)) or name not in TOKEN_DTYPES:
            raise file.unreadable("its header is damaged", _AGAIN)
        return cls(
            None if eot == _LISTED else eot,
            version == _FIRST,
            num_tokens,
            num_documents,
            TOKEN_DTYPES[name],
            *digests,
        )


class DocumentEnds(CumulativeEnds):
    """An open sidecar, checked in O(1) against the tokens, dtype and fingerprint of the shard beside it.

    Raises:
        UnreadableCorpus: it is damaged, or was made for other content.
    """

    remedy = "run corpus-server index on the corpus again, then restart the server"

    def __init__(self, path: Path, num_tokens: int, dtype: TokenDtype, fingerprint: bytes) -> None:
        with ExitStack() as on_error:
            file = on_error.enter_context(OpenFile(path))
            self.header = DocumentsHeader.unpack(file)
            num_documents = self.header.num_documents
            super().__init__(file, at=HEADER_BYTES, num_documents=num_documents, num_tokens=num_tokens)
            if problem := self._contradiction(dtype, fingerprint):
                raise file.unreadable(problem, _AGAIN)
            on_error.pop_all()

    def find_problem(self) -> str | None:
        """Read all ends in bounded memory; return the first contradiction, or None."""
        if problem := super().find_problem():
            return problem
        checksum = xxhash.xxh3_64()
        for first in range(0, self.num_documents, CHUNK_ENDS):
            ends = self.ends(first, min(CHUNK_ENDS, self.num_documents - first))
            checksum.update(ends.astype(END_DTYPE).data)
        if checksum.intdigest() != self.header.ends_checksum:
            return f"{self.file.path.name}: its document ends differ from the ones written; {_AGAIN}"
        return None

    def _contradiction(self, dtype: TokenDtype, fingerprint: bytes) -> str | None:
        header, num_documents = self.header, self.num_documents
        expected_bytes = HEADER_BYTES + END_DTYPE.itemsize * num_documents
        if self.file.size_bytes != expected_bytes:
            return f"{num_documents} documents need {expected_bytes} bytes, found {self.file.size_bytes}"
        last = int(self.ends(num_documents - 1, 1)[0]) if num_documents else 0
        if last != header.num_tokens:
            return f"its last document ends at token {last}, expected {header.num_tokens}"
        made, holds = f"{header.num_tokens} {header.dtype.name}", f"{self.num_tokens} {dtype.name}"
        if made != holds:
            return f"made for {made} tokens, the file beside it holds {holds}"
        if header.fingerprint != fingerprint:
            return "made for other tokens than the file beside it holds"
        return None


# Not a token format; listed so that folders know the suffix.
FORMAT: Final = Format(
    read=lambda file, dtype, in_folder: None, side_files={f"*{_SUFFIX}": "document boundaries"}
)
