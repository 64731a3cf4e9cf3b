"""Make a view: choose documents of a corpus, count how often each comes, write the file."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import unreadable
from corpus_server.corpus.metadata.files import metadata_digest
from corpus_server.corpus.progress import Meter, Progress
from corpus_server.corpus.publish import check_new
from corpus_server.corpus.views.file import MAX_MULTIPLICITY, Multiplicities, ViewHeader
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.pieces import Int64Array
from corpus_server.tools.viewing.make import make_view
from corpus_server.tools.viewing.metadata import Metadata
from corpus_server.user_files import read_given, reason_of

_FRACTION_BITS: Final = 53
_MAX_LIST_BYTES: Final = 1 << 34  # of 10^9 documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which documents of a corpus a view holds, and how often; see docs/views.md."""

    where: str | None = None  # expression: a condition
    repeat: str | None = None  # expression: a number
    dedup: str | None = None  # column: only the first document of each value
    documents: Path | None = None  # file: only these documents
    without: Path | None = None  # file: not these documents
    key: str | None = None  # column: the files hold its values instead of numbers
    seed: int = 0  # chooses the documents of a fractional repetition

    @property
    def asks_metadata(self) -> bool:
        """Whether it has an expression or names a column."""
        return any(each is not None for each in (self.where, self.repeat, self.dedup, self.key))

    def described(self) -> dict[str, Any]:
        """Return what was given, for the view's header."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def create(spec: CorpusSpec, selection: Selection, out: Path, progress: Progress | None = None) -> ViewHeader:
    """Write a view of a corpus; progress is in documents.

    Raises:
        InvalidParameter: an expression or a list is not what it should be, or `out` exists.
        UnreadableCorpus: the corpus or its metadata is not.
        UnknownDocument: the corpus has no document index.
    """
    if spec.view is not None:
        raise InvalidParameter("a view of a view is not made: name the corpus", parameter="view")
    if selection.key is not None and selection.documents is None and selection.without is None:
        raise InvalidParameter("--key needs --documents or --without", parameter="key")
    if selection.seed and selection.repeat is None:
        raise InvalidParameter("--seed needs --repeat, whose fractions it decides", parameter="seed")
    check_new(out)
    with Corpus.open(spec) as corpus:
        if corpus.num_documents is None:
            raise corpus.no_documents(spec=spec)
        digest = None
        if selection.asks_metadata:
            # Closed before the index is made, which takes memory, too.
            with _metadata(corpus, out) as metadata:
                counts = _count(selection, corpus.num_documents, metadata, progress)
                digest = metadata_digest(metadata.files) if metadata.files else None
        else:
            counts = _count(selection, corpus.num_documents, None, progress)
        made = selection.described()
        return make_view(corpus, counts, out, made=made, metadata=digest, progress=progress)


def _metadata(corpus: Corpus, out: Path) -> Metadata:
    try:
        return Metadata(corpus, out.absolute().parent)
    except OSError as error:
        raise unreadable(out, f"cannot be written: {error.strerror}", "name another place") from error


def _count(
    selection: Selection, num_documents: int, metadata: Metadata | None, progress: Progress | None
) -> Multiplicities:
    counts = np.ones(num_documents, dtype=np.uint16)
    if selection.documents is not None:
        counts[:] = 0
        counts[_listed("documents", selection.documents, selection.key, num_documents, metadata)] = 1
    if selection.without is not None:
        counts[_listed("without", selection.without, selection.key, num_documents, metadata)] = 0
    if metadata is None:
        return counts
    if selection.where is not None:
        first, meter = 0, Meter("choosing", num_documents, progress)
        for chosen in metadata.condition("where", selection.where):
            counts[first : first + chosen.size] *= chosen
            first += chosen.size
            meter.add(chosen.size)
    if selection.repeat is not None:
        first, meter = 0, Meter("repeating", num_documents, progress)
        for numbers in metadata.numbers("repeat", selection.repeat):
            its = counts[first : first + numbers.size]
            its *= _repeated(numbers, its > 0, first, selection.seed)
            first += numbers.size
            meter.add(numbers.size)
    if selection.dedup is not None:
        kept, meter = np.zeros(num_documents, dtype=bool), Meter("comparing", num_documents, progress)
        for firsts in metadata.firsts(selection.dedup, counts):
            kept[firsts] = True
            meter.add(firsts.size)
        counts *= kept
    return counts


def _repeated(
    numbers: NDArray[np.float64], chosen: NDArray[np.bool_], first: int, seed: int
) -> Multiplicities:
    """Return whole numbers: 1.5 is 2 for half of the documents, by a hash of seed and document."""
    wrong = np.flatnonzero(chosen & ~((numbers >= 0) & (numbers <= MAX_MULTIPLICITY)))
    if wrong.size:
        number = numbers[wrong[0]]
        given = "null" if np.isnan(number) else f"{number:g}"
        raise InvalidParameter(
            f"--repeat: {given} for document {first + int(wrong[0])}; expected a number in "
            f"[0, {MAX_MULTIPLICITY}], null is not one (coalesce(..., 1))",
            parameter="repeat",
        )
    numbers = np.where(chosen, numbers, 0)
    whole = np.floor(numbers)
    draws = _draws(np.arange(first, first + numbers.size, dtype=np.uint64), seed)
    return (whole + (draws < numbers - whole)).astype(np.uint16)


def _draws(documents: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) of each document: splitmix64 of the document, keyed by the seed."""
    key = xxhash.xxh3_64_intdigest(f"corpus-server view repeat 1 {seed}".encode())
    mixed = (documents + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(64 - _FRACTION_BITS)) / 2.0**_FRACTION_BITS


def _listed(
    what: str, path: Path, key: str | None, num_documents: int, metadata: Metadata | None
) -> Int64Array:
    """Return the documents that the lines of a file name."""
    if key is None:
        return read_list(what, path, num_documents)
    assert metadata is not None  # a key asks it
    return metadata.keyed(what, key, _lines(what, path))


def read_list(what: str, path: Path, num_documents: int) -> Int64Array:
    """Return the documents whose numbers stand in a file, one a line.

    Args:
        what: the option that names the file, in errors.

    Raises:
        InvalidParameter: a line is no document.
    """
    lines = _lines(what, path)
    for number, line in enumerate(lines):
        if not re.fullmatch("[0-9]{1,18}", line) or int(line) >= num_documents:
            raise InvalidParameter(
                f"--{what}: {path}: line {number + 1} is {line[:40]!r}, expected a document in "
                f"[0, {num_documents}); ids need --key COLUMN",
                parameter=what,
            )
    return np.array(lines, dtype=np.int64)


def _lines(what: str, path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in read_given(path, max_bytes=_MAX_LIST_BYTES).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else "is not UTF-8 text"
        raise InvalidParameter(f"--{what}: {path}: {why}", parameter=what) from error
    return [line for line in lines if line]
