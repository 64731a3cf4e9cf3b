"""A corpus: a named, immutable token sequence in one or more shards."""

from __future__ import annotations

import resource
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from corpus_server.errors import InvalidParameter, UnknownDocument, UnreadableCorpus
from corpus_server.fingerprint import check_fingerprints
from corpus_server.formats import DocumentIndex, TokenDtype, list_shards, token_dtype
from corpus_server.formats.documents import DocumentEnds
from corpus_server.formats.layout import unreadable
from corpus_server.formats.recognise import data_path
from corpus_server.shard import Shard

Tokenizer = Path | Literal["bytes"] | None

_MAX_OPEN_FILES = 1 << 20


class Corpus:
    """An open corpus; use `open`. A context manager; `close` may be called twice.

    Attributes:
        name: what requests call it.
        shards: its files in natural order.
        num_tokens: tokens of all shards.
        starts: corpus-wide number of each shard's first token, then `num_tokens`.
        dtype: the type that holds the tokens of every shard.
        fingerprints: kind ("sampled", "full") -> value, all that are known.
        fingerprint_kind, fingerprint: the strongest of them.
        tokenizer_path: a tokenizer.json, "bytes" where a token is a byte, or None.
        num_documents: documents of all shards; None unless every shard has an index.
    """

    def __init__(
        self, name: str, shards: Sequence[Shard], fingerprints: dict[str, str], tokenizer: Tokenizer
    ) -> None:
        self.name = name
        self.shards = tuple(shards)
        self.starts = (0, *accumulate(shard.num_tokens for shard in shards))
        self.num_tokens = self.starts[-1]
        self.dtype: TokenDtype = np.result_type(*(shard.dtype for shard in shards))
        self.fingerprints = dict(fingerprints)
        self.fingerprint_kind: Literal["sampled", "full"] = "full" if "full" in fingerprints else "sampled"
        self.fingerprint = fingerprints[self.fingerprint_kind]
        self.tokenizer_path: Tokenizer = tokenizer
        indices = [shard.documents for shard in shards if shard.documents is not None]
        self._document_starts: tuple[int, ...] | None = None
        if len(indices) == len(self.shards):
            self._document_starts = (0, *accumulate(index.num_documents for index in indices))
        self.num_documents = self._document_starts[-1] if self._document_starts else None

    @classmethod
    def open(
        cls, path: str | Path, *, name: str, dtype: object = None, tokenizer: str | Path | None = None
    ) -> Corpus:
        """Open a token file or a folder of shards, in O(1) of the token count.

        Args:
            path: a file in any known format, Megatron's prefix, or a folder.
            name: what requests will call it.
            dtype: what headerless files hold (None: uint16).
            tokenizer: "bytes" or the path of a tokenizer.json; None takes the tokenizer.json beside
                the shards, or else "bytes" if all tokens are uint8.

        Raises:
            UnreadableCorpus: a file is not what it should be; nothing stays open.
            InvalidParameter: dtype is none of the accepted.
        """
        path = data_path(Path(path))
        shards = open_shards(path, dtype=None if dtype is None else token_dtype(dtype))
        try:
            _check_one_eot(path, shards)
            fingerprints = check_fingerprints(path, shards)
            return cls(name, shards, fingerprints, _find_tokenizer(path, shards, tokenizer))
        except BaseException:
            for shard in shards:
                shard.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap and close all shards; a second call does nothing."""
        for shard in self.shards:
            shard.close()

    def locate_range(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """Return the pieces of tokens [start, start + count): (shard number, start, stop in the shard)."""
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise InvalidParameter(
                f"corpus {self.name!r}: tokens [{start}, {start + count}) are outside [0, {self.num_tokens})",
                parameter="start" if start < 0 or start > self.num_tokens else "count",
                received=start if start < 0 or start > self.num_tokens else count,
                accepted=f"0 <= start, start + count <= {self.num_tokens}",
            )
        pieces = []
        number = bisect_right(self.starts, start) - 1
        position, stop = start, start + count
        while position < stop:
            end = min(stop, self.starts[number + 1])
            if end > position:
                base = self.starts[number]
                pieces.append((number, position - base, end - base))
                position = end
            number += 1
        return pieces

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of a document, corpus-wide."""
        starts = self._document_index(number)
        if not 0 <= number < starts[-1]:
            raise UnknownDocument(
                f"corpus {self.name!r}: document must be in [0, {starts[-1]}), got {number}",
                parameter="document",
                received=number,
                accepted=f"[0, {starts[-1]})",
            )
        shard_number = bisect_right(starts, number) - 1
        start, stop = self._shard_documents(shard_number).document_range(number - starts[shard_number])
        return self.starts[shard_number] + start, self.starts[shard_number] + stop

    def document_of(self, token: int) -> int:
        """Return the number of the document that holds a token, given corpus-wide.

        Raises:
            UnknownDocument: the corpus has no document index.
            InvalidParameter: the corpus has no such token.
        """
        document_starts = self._document_index(token)
        if not 0 <= token < self.num_tokens:
            raise InvalidParameter(
                f"corpus {self.name!r}: token must be in [0, {self.num_tokens}), got {token}",
                parameter="token",
                received=token,
                accepted=f"[0, {self.num_tokens})",
            )
        shard_number = bisect_right(self.starts, token) - 1
        documents, within = self._shard_documents(shard_number), token - self.starts[shard_number]
        # The first document that ends behind the token; Megatron's may also be empty.
        number = bisect_right(
            range(documents.num_documents), within, key=lambda n: documents.document_range(n)[1]
        )
        return document_starts[shard_number] + number

    def _document_index(self, asked: int) -> tuple[int, ...]:
        """Return the number of each shard's first document, then the number of documents."""
        if self._document_starts is None:
            remedy = "make one with `corpus-server index PATH --eot ID`, then restart the server"
            raise UnknownDocument(
                f"corpus {self.name!r} has no document index",
                parameter="document",
                received=asked,
                remedy=remedy,
            )
        return self._document_starts

    def _shard_documents(self, shard_number: int) -> DocumentIndex:
        shard = self.shards[shard_number]
        if shard.documents is None:
            raise UnknownDocument(f"shard {shard.name} has no document index")
        return shard.documents

    def describe(self) -> dict[str, Any]:
        """Return the corpus's description: the JSON of `/v1/corpora/{name}`."""
        tokenizer = self.tokenizer_path
        return {
            "name": self.name,
            "num_tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "num_documents": self.num_documents,
            "fingerprint": self.fingerprint,
            "fingerprint_kind": self.fingerprint_kind,
            "fingerprints": dict(self.fingerprints),
            "tokenizer": tokenizer.name if isinstance(tokenizer, Path) else tokenizer,
            "shards": [shard.describe() for shard in self.shards],
        }


def open_shards(path: Path, *, dtype: TokenDtype | None = None, sidecars: bool = True) -> list[Shard]:
    """Open every shard of `path`, a data file or a folder; on an error nothing stays open.

    `sidecars` opens those of document ends too.
    """
    files = list_shards(path, any_dtype=dtype is None)
    _allow_open_files()
    in_folder = path.is_dir()
    shards: list[Shard] = []
    try:
        shards.extend(
            Shard.open(file.path, name=file.name, dtype=dtype, in_folder=in_folder, sidecar=sidecars)
            for file in files
        )
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return shards


def _allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one, as Go programs do at start.

    A shard takes up to three descriptors (its own, the map's duplicate, the index), and the usual
    soft limit of 1,024 is there for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_one_eot(path: Path, shards: Sequence[Shard]) -> None:
    """Check that all sidecars of a corpus mean the same end-of-text token."""
    made = {s.documents.eot: s.name for s in shards if isinstance(s.documents, DocumentEnds)}
    if len(made) > 1:
        (one, first), (other, second), *_ = sorted(made.items())
        raise unreadable(
            path,
            f"the documents of {first} end at token {one}, those of {second} at token {other}",
            "was indexing broken off? Run corpus-server index on the corpus again",
        )


def _find_tokenizer(path: Path, shards: Sequence[Shard], asked: str | Path | None) -> Tokenizer:
    if asked == "bytes":
        return "bytes"
    if asked is not None:
        if not Path(asked).is_file():
            raise UnreadableCorpus(
                f"tokenizer must be 'bytes' or the path of a tokenizer.json, found no file {asked}",
                parameter="tokenizer",
                received=str(asked),
                accepted="'bytes' or the path of a tokenizer.json",
            )
        return Path(asked)
    beside = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if beside.is_file():
        return beside
    return "bytes" if all(shard.dtype.name == "uint8" for shard in shards) else None
