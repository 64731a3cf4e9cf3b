"""Document ends that lie in a file as one array, and the documents of a part of a shard."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import ClassVar, Final

import numpy as np

from corpus_server.corpus.files import TokenFile
from corpus_server.corpus.formats.layout import DocumentIndex, Ends
from corpus_server.errors import InvalidParameter, ReadFailed

CHUNK_ENDS: Final = 1 << 17  # ends; 1 MiB of int64


class CumulativeEnds(DocumentIndex):
    """An open file that holds the end of every document; document n begins where n - 1 ends.

    Of datatrove, litData, and our own sidecar.

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
        file: TokenFile,
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
        self._num_tokens = num_tokens
        self._at, self._entry = at, np.dtype(entry)
        self._origin, self._unit = origin, unit

    def ends(self, first: int, count: int) -> Ends:
        """Return the ends of documents [first, first + count), in tokens."""
        size = self._entry.itemsize
        data = self.file.read(self._at + first * size, count * size)
        return (np.frombuffer(data, self._entry).astype(np.int64) - self._origin) // self._unit

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of document `number` in [0, num_documents)."""
        self.file.check_unchanged()
        start, stop = self.ends(number - 1, 2).tolist() if number else (0, int(self.ends(0, 1)[0]))
        if 0 <= start <= stop <= self._num_tokens:
            return start, stop
        raise ReadFailed(
            f"{self.file.path.name}: the end of document {number} contradicts its neighbours",
            remedy=self.remedy,
        )

    def sequence_lengths(self) -> Ends:
        """Return the tokens of each document."""
        self.file.check_unchanged()
        return np.diff(self.ends(0, self.num_documents), prepend=0)

    def find_problem(self) -> str | None:
        """Read all ends in bounded memory; return the first contradiction, or None."""
        previous = 0
        for first in range(0, self.num_documents, CHUNK_ENDS):
            ends = self.ends(first, min(CHUNK_ENDS, self.num_documents - first))
            wrong = np.flatnonzero((np.diff(ends, prepend=previous) < 0) | (ends > self._num_tokens))
            if wrong.size:
                number = first + int(wrong[0])
                return f"{self.file.path.name}: document {number} ends before it begins, or behind the shard"
            previous = int(ends[-1])
        return None


class CutDocuments(DocumentIndex):
    """The documents that touch tokens [start, stop) of a shard.

    The first and the last one are cut there: what is left of them counts as a document. Ranges are numbered
    from token `start`.
    """

    def __init__(self, whole: DocumentIndex, start: int, stop: int) -> None:
        self.file = whole.file
        self._whole, self._start, self._stop = whole, start, stop
        numbers = range(whole.num_documents)
        self._first = bisect_right(numbers, start, key=lambda number: whole.document_range(number)[1])
        end = bisect_left(numbers, stop, key=lambda number: whole.document_range(number)[0])
        self.num_documents = end - self._first if start < stop else 0  # an empty run is inside a document

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of document `number` in [0, num_documents)."""
        start, stop = self._whole.document_range(self._first + number)
        return max(start, self._start) - self._start, min(stop, self._stop) - self._start

    def sequence_lengths(self) -> Ends:
        """Refuse: a cut sequence would be another one."""
        raise InvalidParameter(
            f"{self.file.path.name}: a corpus with token_range has no whole sequences",
            parameter="token_range",
            remedy="serve it without token_range; order megatron has a split of its own",
        )

    def find_problem(self) -> str | None:
        """Read the shard's whole index in bounded memory; return the first contradiction, or None."""
        return self._whole.find_problem()
