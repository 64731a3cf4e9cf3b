"""A corpus: a named, immutable token sequence in one or more shards."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from corpus_server.corpus.files import Closing, Files, OpenFile
from corpus_server.corpus.fingerprints import SampledIds, check_fingerprints, sample_ids
from corpus_server.corpus.formats.layout import TokenDtype
from corpus_server.corpus.formats.masks import MASK_DTYPE
from corpus_server.corpus.metadata import DocumentTable
from corpus_server.corpus.metadata.files import metadata_files
from corpus_server.corpus.opening import find_eot, find_place, open_shards
from corpus_server.corpus.selection import missing_numbers
from corpus_server.corpus.shards import Shard, ShardDescription, contents
from corpus_server.corpus.snapshots import address_of
from corpus_server.corpus.tokenizers import Tokenizer, built_with, find_tokenizer, identity_of, open_tokenizer
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.described import described_keys
from corpus_server.errors import InvalidParameter, UnknownDocument, naming
from corpus_server.pieces import Pieces, split
from corpus_server.work import Budget


@described_keys
class ViewDescription(TypedDict):
    """Of which corpus a view is, and how it was made."""

    fingerprint: str
    """Of the corpus."""
    num_tokens: int
    """Of the corpus."""
    num_documents: int | None
    """Of the corpus."""
    made: dict[str, Any]
    """The options of `view create`."""
    metadata: str | None
    """Digest of the metadata; null if none was read."""
    encoding: str
    """Of the multiplicities: `bits`, `bytes`, `words` or `runs`."""
    size_bytes: int
    """Bytes of the view's file."""


@described_keys
class CorpusDescription(TypedDict):
    """One corpus."""

    name: str
    num_tokens: int
    dtype: str
    num_documents: int | None
    fingerprint: str
    fingerprint_kind: Literal["sampled", "full"]
    """`sampled`: blocks read at opening; `full`: recorded hashes of every byte."""
    fingerprints: dict[str, str]
    eot: int | None
    """Id of the end-of-text token, if it is known."""
    eot_first: bool
    """Whether documents begin with it; else they end with it."""
    tokenizer: str | None
    """`bytes` or the name of its file."""
    tokenizer_identity: str | None
    """The same for corpora of one tokenizer: `bytes` or a digest; null: not known."""
    num_masks: int
    """Shards with a loss mask; the others count as all ones."""
    has_metadata: bool
    """Whether its documents have metadata."""
    address: str | None
    """Where others can have it, as `serve` takes it; null: not known."""
    license: str | None
    """As its owners say it; null: not known."""
    shards: list[ShardDescription]
    view: NotRequired[ViewDescription]
    """Missing unless the corpus is a view."""


_LARGEST_LABEL: Final = 1000  # programs mark what is no target by -1 or -100


class Corpus(Closing):
    """An open corpus; use `open`.

    Attributes:
        starts: corpus-wide number of each shard's first token, then `num_tokens`.
        dtype: smallest type that holds the tokens of every shard.
        fingerprints: kind ("sampled", "full") -> value, all that are known.
        fingerprint_kind, fingerprint: the strongest of them.
        eot: id of the end-of-text token, if the user or the document ends say it.
        eot_first: whether documents begin with it, as the user or the document ends say, or else as is usual
            in the format of the shards.
        is_eot_place_said: whether the user says so.
        earlier: names of the corpora that hold what this one held before.
        address: where others can have it, None if it is not known; license: as its owners say it.
        tokenizer: decodes tokens to text, or None; `tokenizer_name` is "bytes" or the name of its file.
        tokenizer_identity: the same for corpora of one tokenizer, which is the one that a corpus was built
            with, if its manifest says that; None if it is not known.
        num_documents: documents of all shards; None unless every shard has an index.
        num_masks: shards that have a loss mask; the others count as all ones.
        mask_dtype: of loss masks: float16 if one of them holds weights, else bool.
        metadata_paths: files of the metadata of its documents, none if there is no metadata.
    """

    def __init__(
        self,
        spec: CorpusSpec,
        shards: Sequence[Shard],
        fingerprints: dict[str, str],
        *,
        eot: int | None,
        eot_first: bool,
        tokenizer: Path | str | None,
        metadata_paths: Sequence[Path] = (),
        files: Files | None = None,
    ) -> None:
        self.name = spec.name
        self.earlier = spec.earlier
        self.address, self.license = address_of(spec), spec.license
        self._is_whole = not (spec.include or spec.exclude)
        self.eot, self.eot_first, self.is_eot_place_said = eot, eot_first, spec.eot_at is not None
        self.shards = tuple(shards)
        self.starts = (0, *accumulate(shard.num_tokens for shard in shards))
        self.num_tokens = self.starts[-1]
        self.dtype: TokenDtype = np.result_type(*(shard.dtype for shard in shards))
        self.fingerprints = dict(fingerprints)
        self.fingerprint_kind: Literal["sampled", "full"] = "full" if "full" in fingerprints else "sampled"
        self.fingerprint = fingerprints[self.fingerprint_kind]
        self.tokenizer: Tokenizer | None = None if tokenizer is None else open_tokenizer(tokenizer)
        self.tokenizer_name = tokenizer.name if isinstance(tokenizer, Path) else tokenizer
        self._decodes_with = identity_of(spec, tokenizer)
        self.tokenizer_identity = built_with(spec) or self._decodes_with
        masks = [shard.mask for shard in shards if shard.mask is not None]
        self.num_masks = len(masks)
        self.mask_dtype: np.dtype[Any] = np.result_type(MASK_DTYPE, *(mask.dtype for mask in masks))
        indices = [shard.documents for shard in shards if shard.documents is not None]
        self._files = self._own((*(each.file for each in contents(shards)), *(each.file for each in indices)))
        self._indices = tuple(indices) if len(indices) == len(self.shards) else ()
        # Number of each shard's first document, then of all.
        self._document_starts = (0, *accumulate(index.num_documents for index in self._indices))
        self.num_documents = self._document_starts[-1] if self._indices else None
        self.metadata_paths = tuple(metadata_paths)
        self._open_file: Callable[[Path], OpenFile] = OpenFile if files is None else files.open
        self._metadata: DocumentTable | None = None
        self._metadata_lock = threading.Lock()

    @classmethod
    def open(cls, spec: CorpusSpec, files: Files | None = None) -> Corpus:
        """Open a corpus, in O(1) of the token count; `files` opens those of an object store.

        Raises:
            UnreadableCorpus: a file is not what it should be; nothing stays open.
            InvalidParameter: the spec contradicts the files.
        """
        with ExitStack() as on_error:
            shards = open_shards(spec, on_error, files=files)
            corpus = cls(
                spec,
                shards,
                check_fingerprints(spec, contents(shards)),
                eot=find_eot(spec, shards),
                eot_first=find_place(spec, shards),
                tokenizer=find_tokenizer(spec, [shard.dtype for shard in shards]),
                metadata_paths=metadata_files(spec),
                files=files,
            )
            on_error.pop_all()
        return corpus

    @cached_property
    def sampled_ids(self) -> SampledIds | None:
        """The smallest and the largest token id of a sample; None for an empty corpus."""
        return sample_ids(self.shards)

    def warnings(self) -> list[str]:
        """Return what is strange: ids that the tokenizer does not have, numbered files that are missing."""
        strange = [*self._strange_id(), *self._other_tokenizer()]
        said = missing_numbers(shard.name.partition(":")[0] for shard in self.shards)
        if self._is_whole and said:
            strange.append(f"corpus {self.name!r}: {said[0]}; were all of them copied?")
        return strange

    def _strange_id(self) -> list[str]:
        if (ids := self.sampled_ids) is None:
            return [f"corpus {self.name!r} holds no token: was what wrote it interrupted?"]
        said = "and no token has a negative id: are labels among them, and is the dtype the right one?"
        if ids.smallest < 0:
            return [f"corpus {self.name!r} holds token {ids.smallest}, {said}"]
        if ids.largest >= 2**32 - _LARGEST_LABEL:
            said = f"which is {ids.largest - 2**32} as int32, {said}"
            return [f"corpus {self.name!r} holds token {ids.largest}, {said}"]
        if self.tokenizer is None or (strange := ids.largest) < (size := self.tokenizer.vocab_size):
            return []
        return [
            f"corpus {self.name!r} holds token {strange}, but the ids of its tokenizer "
            f"({self.tokenizer_name}) are below {size}: is it the right tokenizer, and {self.dtype.name} the "
            "right dtype?"
        ]

    def _other_tokenizer(self) -> list[str]:
        if self._decodes_with in {None, self.tokenizer_identity}:
            return []
        return [
            f"corpus {self.name!r} was built with the tokenizer {self.tokenizer_identity}, and is served "
            f"with {self.tokenizer_name}, {self._decodes_with}: is its text the right one?"
        ]

    def check_unchanged(self, budget: Budget) -> None:
        """Raise `CorpusChanged` or `ReadFailed` if a token file, mask, index or view is not what it was.

        What lies in an object store never changes: copies of it that changed are staged anew.
        """
        for each in self._files:
            each.check_unchanged()
            budget.spend()

    def _own(self, files: Iterable[OpenFile]) -> tuple[OpenFile, ...]:
        """Have errors of files name the corpus; return each file once."""
        found = tuple(dict.fromkeys(files))
        for each in found:
            each.corpus = self.name
        return found

    def close(self) -> None:
        """Unmap and close all shards."""
        self.tokenizer = None  # a large vocabulary takes 100 MB
        for shard in self.shards:
            shard.close()
        if self._metadata is not None:
            self._metadata.close()

    def metadata(self) -> DocumentTable | None:
        """Return the metadata of the corpus's documents, opened at the first call; None if there is none.

        Raises:
            UnknownDocument: there is no document index.
            UnreadableCorpus: it is damaged, or has other rows than there are documents.
            MissingPackage: pyarrow is not installed.
        """
        if not self.metadata_paths:
            return None
        if self.num_documents is None:
            raise self.no_documents()
        with self._metadata_lock:
            if self._metadata is None:
                with naming(self.name):
                    self._metadata = DocumentTable(self.metadata_paths, self.num_documents, self._open_own)
            return self._metadata

    def _open_own(self, path: Path) -> OpenFile:
        (file,) = self._own([self._open_file(path)])
        return file

    def check_range(self, start: int, count: int) -> None:
        """Raise InvalidParameter unless tokens [start, start + count) lie in the corpus."""
        if not 0 <= start <= self.num_tokens:
            accepted = f"in [0, {self.num_tokens}], the tokens of corpus {self.name!r}"
            raise InvalidParameter.expected("start", accepted, start)
        if count < 0 or start + count > self.num_tokens:
            raise InvalidParameter(
                f"start + count must be at most {self.num_tokens}, the tokens of corpus {self.name!r}, "
                f"got {start} + {count}",
                parameter="count",
                received=count,
                accepted=f"start + count <= {self.num_tokens}",
            )

    def shards_of(self, start: int, stop: int) -> Sequence[Shard]:
        """Return the shards that hold tokens [start, stop), of a view those of its corpus."""
        return self.shards[bisect_right(self.starts, start) - 1 : bisect_left(self.starts, stop)]

    def pieces(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Pieces:
        """Return where ranges of tokens of the corpus lie, `(k,)` each: a row for each range."""
        return split(np.array(self.starts), starts, stops)

    def ranges_of(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return its tokens that are those of ranges of its base, `(m, 2)`: of a corpus the ranges."""
        return np.stack((starts, stops), axis=1)

    def extents(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ranges of its base that hold the tokens of ranges, `(k, 2)`: of a corpus the ranges."""
        return np.stack((starts, stops), axis=1)

    def base_token(self, token: int) -> int:
        """Return the number of a token in the corpus whose files hold it: its own, unless this is a view."""
        shard, start, _ = self.pieces(np.array([token]), np.array([token + 1])).places[0].tolist()
        return int(self.base.starts[shard]) + int(start)

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of a document, corpus-wide.

        Raises UnknownDocument also if there is no index, ReadFailed also if the index contradicts itself.
        """
        if not self._indices:
            raise self.no_documents(number)
        starts = self._document_starts
        if not 0 <= number < starts[-1]:
            raise UnknownDocument.expected("document", f"in [0, {starts[-1]})", number)
        shard_number = bisect_right(starts, number) - 1
        start, stop = self._indices[shard_number].document_range(number - starts[shard_number])
        return self.starts[shard_number] + start, self.starts[shard_number] + stop

    def documents(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the documents of its base with tokens in ranges: numbers, `(m,)`; how many each has, `(k,)`.

        Args:
            starts, stops: `(k,)`, tokens of the corpus, none empty; each range lies in one shard.
        """
        bounds = np.array(self.starts)
        shards = bounds.searchsorted(starts, side="right") - 1
        counts = np.zeros(starts.size, dtype=np.int64)
        parts, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number in np.unique(shards).tolist():
            its = np.flatnonzero(shards == number)
            found, counts[its] = self._indices[number].holding(
                starts[its] - self.starts[number], stops[its] - self.starts[number]
            )
            parts.append(found + self._document_starts[number])
            owners.append(np.repeat(its, counts[its]))
        return np.concatenate(parts)[np.concatenate(owners).argsort(kind="stable")], counts

    def document_edges(self, first: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return where documents [first, first + count) begin, corpus-wide, and where the last one ends.

        `(k, count + 1)` of `(k,)` numbers; behind the last document of a shard its end is repeated.
        """
        starts = np.array(self._document_starts)
        numbers = starts.searchsorted(first, side="right") - 1
        edges = np.empty((first.size, count + 1), dtype=np.int64)
        for number in np.bincount(numbers).nonzero()[0].tolist():
            its = numbers == number
            found: NDArray[np.int64] = self._indices[number].edges(first[its] - starts[number], count)
            found += self.starts[number]
            if its.all():
                return found
            edges[its] = found
        return edges

    @property
    def document_starts(self) -> tuple[int, ...]:
        """Number of each shard's first document, then of all; (0,) without an index."""
        return self._document_starts

    @property
    def base(self) -> Corpus:
        """The corpus whose files hold the tokens: itself, unless it is a view."""
        return self

    def sequences(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first token, corpus-wide, and the tokens of each sequence: `(n,) int64` each.

        Reads all document indices, see `DocumentIndex.sequence_lengths`; refuses a corpus that is cut.
        """
        if not self._indices:
            raise self.no_documents()
        starts, lengths = [], []
        for first, index in zip(self.starts, self._indices, strict=False):
            its = index.sequence_lengths()
            lengths.append(its)
            starts.append(first + its.cumsum() - its)
        return np.concatenate(starts), np.concatenate(lengths)

    def document_at(self, token: int) -> int | None:
        """Return the number of the document that holds a token, corpus-wide; None where no document does.

        Reads about log2(num_documents) entries of the index.
        """
        if not self._indices:
            return None
        shard_number = bisect_right(self.starts, token) - 1
        index, position = self._indices[shard_number], token - self.starts[shard_number]
        # The first document that ends behind the token: empty documents before it end at or before it.
        number = bisect_right(
            range(index.num_documents), position, key=lambda each: index.document_range(each)[1]
        )
        if number == index.num_documents or index.document_range(number)[0] > position:
            return None
        return self._document_starts[shard_number] + number

    def no_documents(self, number: int | None = None, *, spec: CorpusSpec | None = None) -> UnknownDocument:
        """Return the error for a corpus without an index of documents.

        Only a command gives its `spec`, whose path the error then names: a server tells no client its paths.
        """
        remedy = "make one with `corpus-server index PATH,eot=ID`, then restart the server"
        if spec is not None:
            remedy = f"make one with `{spec.index_command()}`"
        detail = f"corpus {self.name!r} has no document index"
        return UnknownDocument(detail, parameter="document", received=number, remedy=remedy)

    def describe(self) -> CorpusDescription:
        """Return the corpus's description: the JSON of `/v1/corpora/{name}`."""
        return {
            "name": self.name,
            "num_tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "num_documents": self.num_documents,
            "fingerprint": self.fingerprint,
            "fingerprint_kind": self.fingerprint_kind,
            "fingerprints": dict(self.fingerprints),
            "eot": self.eot,
            "eot_first": self.eot_first,
            "tokenizer": self.tokenizer_name,
            "tokenizer_identity": self.tokenizer_identity,
            "num_masks": self.num_masks,
            "has_metadata": bool(self.metadata_paths),
            "address": self.address,
            "license": self.license,
            "shards": [shard.describe() for shard in self.shards],
        }
