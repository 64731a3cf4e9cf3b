"""A view as a corpus: the chosen documents of each shard laid end to end, without a copy of a token.

    shard 0 of the corpus     A B C D          multiplicities 1 0 2 1
    shard 0 of the view       A C D C

Everything that a corpus says of tokens and documents is in the view's own numbers; `base` is the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus, CorpusDescription, ViewDescription
from corpus_server.corpus.files import Files
from corpus_server.corpus.fingerprints import SampledIds
from corpus_server.corpus.metadata import DocumentTable
from corpus_server.corpus.views.file import ViewFile
from corpus_server.corpus.views.places import Places
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter, UnknownDocument
from corpus_server.pieces import Int64Array, Pieces
from corpus_server.work import Budget

_SAMPLED_GROUPS: Final = 64
_CHUNK_DOCUMENTS: Final = 1 << 20
_REMEDY: Final = "make a view of this corpus with corpus-server view create, or serve the one that it is of"


def open_corpus(spec: CorpusSpec, files: Files | None = None) -> Corpus:
    """Open a corpus, see `Corpus.open`, or a view of one if the spec names it."""
    if spec.view is None:
        return Corpus.open(spec, files)
    with ExitStack() as on_error:
        base = on_error.enter_context(Corpus.open(replace(spec, view=None), files))
        file = on_error.enter_context(ViewFile(Path(spec.view)))
        view = View(spec, base, file)
        on_error.pop_all()
    return view


class View(Corpus):
    """An open view, which closes its corpus; use `open_corpus`.

    Attributes:
        file: the view.
        places: where its tokens lie in the corpus.

    Raises:
        UnreadableCorpus: the view is of another corpus.
    """

    def __init__(self, spec: CorpusSpec, base: Corpus, file: ViewFile) -> None:
        self._base, self.file, header = base, file, file.header
        if base.num_documents is None:
            raise base.no_documents(spec=spec)
        self._check(base)
        self.eot, self.eot_first, self.is_eot_place_said = base.eot, base.eot_first, base.is_eot_place_said
        self.shards, self.dtype = base.shards, base.dtype
        self.num_masks, self.mask_dtype = base.num_masks, base.mask_dtype
        self.tokenizer, self.tokenizer_name = base.tokenizer, base.tokenizer_name
        self.tokenizer_identity, self._decodes_with = base.tokenizer_identity, base._decodes_with
        self.metadata_paths, self._is_whole = base.metadata_paths, base._is_whole
        self.name, self.earlier = spec.name, spec.earlier
        self._files = self._own((file.file, *base._files))
        self.address, self.license = spec.address, spec.license
        self.fingerprints = {kind: header.fingerprint(value) for kind, value in base.fingerprints.items()}
        self.fingerprint_kind = base.fingerprint_kind
        self.fingerprint = self.fingerprints[self.fingerprint_kind]
        self.num_documents = header.num_chosen
        bounds = np.array(base.document_starts)
        groups = file.groups
        at = groups.first_document.searchsorted(bounds)
        self.starts = tuple(groups.token[at].tolist())
        self.num_tokens = self.starts[-1]
        self._document_starts = tuple(groups.chosen[at].tolist())

        def last(documents: Int64Array) -> Int64Array:
            return bounds[bounds.searchsorted(documents, side="right")]

        self.places = Places(file, base.document_edges, last)
        sample = np.linspace(0, groups.first_document.size - 1, _SAMPLED_GROUPS).astype(np.int64)
        if groups.first_document.size:
            self.places.check(np.unique(sample))

    def _check(self, base: Corpus) -> None:
        header = self.file.header
        both = header.fingerprints.keys() & base.fingerprints.keys()
        if not both or any(header.fingerprints[kind] != base.fingerprints[kind] for kind in both):
            made, has = (next(iter(each.values())) for each in (header.fingerprints, base.fingerprints))
            raise self.file.file.unreadable(f"is a view of corpus {made}, not of {has}", _REMEDY)
        if header.num_documents != base.num_documents:
            what = f"was made for {header.num_documents} documents, the corpus has {base.num_documents}"
            raise self.file.file.unreadable(what, "serve the document index that it was made with")

    @property
    def base(self) -> Corpus:
        """The corpus of which it is a view."""
        return self._base

    @property
    def sampled_ids(self) -> SampledIds | None:
        """Those of the corpus."""
        return self._base.sampled_ids

    def pieces(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Pieces:
        """See `Corpus.pieces`: in the shards of the corpus."""
        with self.file.file.unchanged():
            found = self.places.pieces(starts, stops)
        pieces = self._base.pieces(found.starts, found.stops)
        counts = np.bincount(found.owners, np.diff(pieces.borders), minlength=starts.size)
        return Pieces(pieces.places, np.concatenate(([0], counts.cumsum())).astype(np.int64))

    def ranges_of(self, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """See `Corpus.ranges_of`: as often as the view has them."""
        with self.file.file.unchanged():
            return np.stack(self.places.ranges(starts, stops)[1:], axis=1)

    def documents(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Corpus.documents`: of the corpus, in which the view finds them."""
        with self.file.file.unchanged():
            found = self.places.pieces(starts, stops)
        numbers, counts = self._base.documents(found.starts, found.stops)
        return numbers, np.bincount(found.owners, counts, minlength=starts.size).astype(np.int64)

    def extents(self, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """See `Corpus.extents`: where the groups of documents lie that hold them."""
        with self.file.file.unchanged():
            return np.stack(self.places.extents(starts, stops), axis=1)

    def metadata(self) -> DocumentTable | None:
        """Return the metadata of the corpus, whose documents have other numbers."""
        return self._base.metadata()

    def document_edges(self, first: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Refuse: only a corpus has them."""
        raise InvalidParameter("a view of a view is not served", parameter="view", remedy=_REMEDY)

    def _document(self, number: int) -> tuple[int, int, int]:
        if not 0 <= number < self.file.header.num_chosen:
            raise UnknownDocument.expected("document", f"in [0, {self.file.header.num_chosen})", number)
        with self.file.file.unchanged():
            return self.places.document(number)

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of a document, in the view's numbers."""
        _, start, stop = self._document(number)
        return start, stop

    def base_document(self, number: int) -> int:
        """Return the number in the corpus of a document of the view."""
        return self._document(number)[0]

    def own_document(self, base_document: int) -> int:
        """Return the number in the view of the first copy of a document of its corpus."""
        number, groups = base_document, self.file.groups
        if 0 <= number < self.file.header.num_documents:
            with self.file.file.unchanged():
                group = int(groups.first_document.searchsorted(number, side="right")) - 1
                # Nothing is chosen before the first group.
                first = int(groups.first_document[group]) if group >= 0 else number
                times = self.file.decoded(first, number + 1)
                if times[-1]:
                    return int(groups.chosen[group]) + int(np.count_nonzero(times[:-1]))
        raise UnknownDocument.expected("document", f"one that view {self.name!r} holds", number)

    def document_at(self, token: int) -> int | None:
        """Return the number of the document that holds a token, both in the view's numbers."""
        if not 0 <= token < self.num_tokens:
            return None
        with self.file.file.unchanged():
            return self.places.document_at(token)

    def sequences(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first token, in the view, and the tokens of each of its documents: `(n,) int64` each."""
        with self.file.file.unchanged():
            lengths = self.places.lengths()
        return lengths.cumsum() - lengths, lengths

    def is_chosen(self) -> NDArray[np.bool_]:
        """Return which documents of the corpus the view holds: `(n,)`."""
        return self.file.decoded(0, self.file.header.num_documents) > 0

    def find_problem(self) -> str | None:
        """Read the whole view, and where the documents of its corpus end; return what is wrong, or None."""
        if (problem := self.file.find_problem()) is not None:
            return f"{self.file.file.name}: {problem}"
        if documents_digest(self._base, Budget()) != self.file.header.documents:
            return f"{self.file.file.name}: was made for documents that end elsewhere"
        return None

    def describe(self) -> CorpusDescription:
        """Return the view's description."""
        header, base = self.file.header, self._base
        view: ViewDescription = {
            "fingerprint": base.fingerprint,
            "num_tokens": base.num_tokens,
            "num_documents": base.num_documents,
            "made": dict(header.made),
            "metadata": header.metadata,
            "encoding": header.encoding,
            "size_bytes": self.file.file.size_bytes,
        }
        return {**super().describe(), "view": view}

    def close(self) -> None:
        """Close the view and its corpus."""
        self.tokenizer = None
        self.file.close()
        self._base.close()


def documents_digest(corpus: Corpus, budget: Budget) -> str:
    """Return a digest of where the documents of a corpus end, in bounded memory."""
    digest = xxhash.xxh3_128()
    for _, edges in document_chunks(corpus):
        digest.update(np.ascontiguousarray(edges[1:], dtype="<i8").data)
        budget.spend()
    return f"xxh3-{digest.hexdigest()}"


def document_chunks(corpus: Corpus) -> Iterator[tuple[int, Int64Array]]:
    """Yield the documents of a corpus in parts of one shard: number of the first, edges `(n + 1,)`."""
    for first, stop in pairwise(corpus.document_starts):
        for number in range(first, stop, _CHUNK_DOCUMENTS):
            count = min(_CHUNK_DOCUMENTS, stop - number)
            yield number, corpus.document_edges(np.array([number]), count)[0]
