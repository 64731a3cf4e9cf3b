"""Finds the documents of shards whose format has none, and keeps their ends beside the shards.

Every shard is read once, piece by piece, in a few MiB of memory, and its sidecar published whole;
shards that are done stay done when a run is broken off.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

import numpy as np
import xxhash

from corpus_server.corpus import open_shards
from corpus_server.errors import InvalidParameter, UnreadableCorpus
from corpus_server.formats import TokenDtype, token_dtype
from corpus_server.formats.documents import (
    END_DTYPE,
    HEADER_BYTES,
    DocumentsHeader,
    documents_path,
)
from corpus_server.formats.recognise import data_path
from corpus_server.publish import publishing, remove_stale
from corpus_server.shard import Shard

Progress = Callable[[int, int], None]
"""Called with (bytes_done, bytes_total) after every piece."""

_PIECE_TOKENS: Final = 1 << 20  # where every token ends a document, a piece gives 8 MiB of ends


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedShard:
    """What `index` did for one shard.

    Attributes:
        name: of the shard.
        action: `written` its sidecar now, `kept` one that was right already, or left alone a shard
            whose format has its `own` index.
        sidecar: where the document ends are; None with an own index.
        num_documents: of the shard.
        num_found: end-of-text tokens in it; None with an own index.
    """

    name: str
    action: Literal["written", "kept", "own"]
    sidecar: Path | None
    num_documents: int
    num_found: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexed:
    """What `index` did."""

    eot: int
    shards: tuple[IndexedShard, ...]
    num_tokens: int
    bytes_read: int

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def found_nowhere(self) -> bool:
        """Whether shards were searched and no end-of-text token was in any: is it the right id?"""
        found = [shard.num_found for shard in self.shards if shard.num_found is not None]
        return bool(found) and self.num_tokens > 0 and not any(found)


def index(
    path: str | Path,
    *,
    eot: int,
    dtype: object = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Indexed:
    """Write the document ends of every shard of the corpus `path` that needs them.

    A sidecar that is right already is kept, one for another id or other content is replaced. A
    shard whose format has its own index (Megatron) is left alone.

    Args:
        path: a token file or a folder of shards.
        eot: id of the end-of-text token; a document ends behind it.
        dtype: what headerless files hold (None: uint16).
        force: write also those that are right already.
        progress: told how far it is.

    Raises:
        InvalidParameter: no token of the corpus can have the id `eot`.
        CorpusChanged: a shard was written to meanwhile; nothing of it is published.
        ReadFailed: the disk did not deliver.
        UnreadableCorpus: not a corpus, or its folder cannot be written to.
    """
    accepted: TokenDtype | None = None if dtype is None else token_dtype(dtype)
    # Old sidecars are not opened: whatever is wrong with them, this makes them right.
    shards = open_shards(data_path(Path(path)), dtype=accepted, sidecars=False)
    try:
        _check_eot(eot, shards)
        tick = _Ticker(sum(shard.data_bytes for shard in shards if shard.documents is None), progress)
        done = tuple(_index_shard(shard, eot, tick, force=force) for shard in shards)
        return Indexed(
            eot=eot,
            shards=done,
            num_tokens=sum(shard.num_tokens for shard in shards),
            bytes_read=tick.bytes_read,
        )
    finally:
        for shard in shards:
            shard.close()


class _Ticker:
    """Counts bytes that are done and, among them, those that were read."""

    def __init__(self, bytes_total: int, progress: Progress | None) -> None:
        self.bytes_read = 0
        self._bytes_done = 0
        self._bytes_total = bytes_total
        self._progress = progress

    def add(self, num_bytes: int, *, read: bool = True) -> None:
        self._bytes_done += num_bytes
        self.bytes_read += num_bytes if read else 0
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)


def _check_eot(eot: int, shards: Sequence[Shard]) -> None:
    most = max(int(np.iinfo(shard.dtype).max) for shard in shards)
    if isinstance(eot, bool) or not isinstance(eot, int) or not 0 <= eot <= most:
        names = ", ".join(sorted({shard.dtype.name for shard in shards}))
        raise InvalidParameter(
            f"eot must be a token id in [0, {most}] ({names} tokens), got {eot!r}",
            parameter="eot",
            received=eot,
            accepted=f"[0, {most}]",
        )


def _index_shard(shard: Shard, eot: int, tick: _Ticker, *, force: bool) -> IndexedShard:
    if shard.documents is not None:
        return IndexedShard(
            name=shard.name,
            action="own",
            sidecar=None,
            num_documents=shard.documents.num_documents,
            num_found=None,
        )
    sidecar = documents_path(shard.path)
    header = None if force else _right_header(shard, eot)
    kept = header is not None
    try:
        if header is None:
            with publishing(sidecar) as file:
                header = _write_ends(shard, eot, file, tick)
        else:
            remove_stale(sidecar)
            tick.add(shard.data_bytes, read=False)
    except OSError as error:
        raise _cannot_write(sidecar, error) from error
    unfinished = shard.num_tokens > 0 and int(shard.tokens[-1]) != eot
    return IndexedShard(
        name=shard.name,
        action="kept" if kept else "written",
        sidecar=sidecar,
        num_documents=header.num_documents,
        num_found=header.num_documents - unfinished,
    )


def _right_header(shard: Shard, eot: int) -> DocumentsHeader | None:
    """Return the header of a whole sidecar of this content and this id, or None."""
    try:
        documents = shard.open_sidecar()
    except UnreadableCorpus:
        return None
    if documents is None:
        return None
    try:
        return documents.header if documents.eot == eot and documents.find_problem() is None else None
    finally:
        documents.close()


def _write_ends(shard: Shard, eot: int, file: BinaryIO, tick: _Ticker) -> DocumentsHeader:
    """Write the sidecar of a shard to `file`; its header comes last, when the counts are known."""
    file.write(bytes(HEADER_BYTES))
    itemsize = shard.dtype.itemsize
    buffer = memoryview(bytearray(min(_PIECE_TOKENS, shard.num_tokens) * itemsize))
    checksum, num_documents, last_end = xxhash.xxh3_64(), 0, 0

    for first in range(0, shard.num_tokens, _PIECE_TOKENS):
        piece = buffer[: (shard.num_tokens - first) * itemsize]
        shard.read_data_into(first * itemsize, piece)
        ends = np.flatnonzero(np.frombuffer(piece, shard.dtype) == eot).astype(END_DTYPE)
        ends += END_DTYPE.type(first + 1)
        at_end = first + _PIECE_TOKENS >= shard.num_tokens
        last_end = int(ends[-1]) if ends.size else last_end
        if at_end and last_end != shard.num_tokens:
            ends = np.append(ends, END_DTYPE.type(shard.num_tokens))
        file.write(ends.data)
        checksum.update(ends.data)
        num_documents += ends.size
        tick.add(len(piece))

    header = DocumentsHeader(
        eot=eot,
        num_tokens=shard.num_tokens,
        num_documents=num_documents,
        dtype=shard.dtype,
        fingerprint=shard.content_digest(),
        ends_checksum=checksum.intdigest(),
    )
    file.seek(0)
    file.write(header.pack())
    shard.check_unchanged()
    return header


def _cannot_write(sidecar: Path, error: OSError) -> UnreadableCorpus:
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        remedy = (
            "run it where the folder may be written to and copy the .documents files beside the shards, "
            "or index and serve a folder of your own that holds hard links to the shards"
        )
    elif isinstance(error, BlockingIOError):
        remedy = "wait until it is done"
    else:
        remedy = "make room, then run it again: shards that are done stay done"
    return UnreadableCorpus(
        f"{sidecar}: the document ends cannot be written: {error.strerror}; {remedy}",
        received=str(sidecar),
        remedy=remedy,
    )
