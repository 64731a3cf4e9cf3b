"""The documents of a part of a shard, or of one run of a file."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from corpus_server.corpus.formats.layout import DocumentIndex, Ends
from corpus_server.errors import InvalidParameter


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
