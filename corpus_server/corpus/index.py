"""Find the documents of shards whose format has none, and keep their ends in a sidecar.

Each shard is read once, in a few MiB of memory. Its sidecar is published when it is complete, so an
interrupted run keeps the shards that it finished.
"""

from __future__ import annotations

import dataclasses
import errno
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Final, Literal

import numpy as np
import xxhash

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.documents import END_DTYPE, HEADER_BYTES, DocumentsHeader, documents_path
from corpus_server.corpus.formats.layout import Ends
from corpus_server.corpus.opening import check_eot, find_eot, open_shards
from corpus_server.corpus.progress import Meter, Progress
from corpus_server.corpus.publish import publishing, remove_stale
from corpus_server.corpus.shards import Shard, content_digest, open_sidecar
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter, UnreadableCorpus, counted

_PIECE_TOKENS: Final = 1 << 20  # a piece gives at most 8 MiB of ends
_READ_ONLY_REMEDY: Final = (
    "run it where the folder may be written to and copy the .documents files beside the shards, "
    "or index and serve a folder of your own that holds hard links to the shards (make the links "
    "while no server has the shards open: to a server a new link is a change)"
)


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """What `index` did for one token file, whose format may have its `own` index."""

    name: str
    action: Literal["written", "kept", "own"]
    sidecar: Path | None
    num_documents: int
    num_found: int | None  # documents with an end-of-text token; None if it was not searched


@dataclass(frozen=True, slots=True)
class Indexed:
    """What `index` did."""

    eot: int | None
    eot_first: bool  # whether documents begin with it
    is_sure: bool  # whether the user, the format or the tokens at the ends of the shards say so
    shards: tuple[IndexedShard, ...]
    num_tokens: int

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def found_nowhere(self) -> bool:
        """Whether shards were searched and none holds the end-of-text token: is it the right id?"""
        found = [shard.num_found for shard in self.shards if shard.num_found is not None]
        return bool(found) and self.num_tokens > 0 and not any(found)


def index(spec: CorpusSpec, *, force: bool = False, progress: Progress | None = None) -> Indexed:
    """Write the document ends of every shard of a corpus that needs them.

    Keeps a sidecar that is right already, unless `force` is set, and replaces one for other content; one for
    another token only with `force`. Skips a shard whose format has its own index. A document ends behind an
    end-of-text token, or begins with one: as the spec says, as is usual in the format, or as the tokens at
    the ends of the shards look. If the spec says no token, the ends are those that side files list (OLMo's
    `.csv.gz`), or the token is that of the sidecars that are there. If token and side files differ, only
    `force` takes those of the token. Shards are indexed whole, also where the corpus has a `token_range`.

    Raises:
        InvalidParameter: the spec says no end-of-text id, or one that no token can have; or, without `force`,
            a sidecar is for another one, or the tokens at the ends of the shards look as if documents had it
            at their other end.
        CorpusChanged: a shard was written to meanwhile; nothing of it is published.
        UnreadableCorpus: not a corpus, or its folder cannot be written to.
    """
    # Old sidecars are not opened: `index` repairs those that are damaged.
    with ExitStack() as opened:
        shards = open_shards(dataclasses.replace(spec, token_range=None), opened, sidecars=False)
        if (eot := spec.eot) is not None:
            check_eot(eot, shards)
        elif any(shard.documents is None and shard.listed_ends is None for shard in shards):
            eot = _indexed_eot(spec)
            if eot is None:
                raise InvalidParameter(
                    "the id of the end-of-text token is missing", parameter="eot", remedy=spec.index_command()
                )
        files = [list(runs) for _, runs in groupby(shards, key=lambda shard: shard.file)]
        eot_first, is_sure = (False, True) if eot is None else _find_place(spec, files, eot, force=force)
        if eot is not None and not force:
            for runs in files:
                _check_made(spec, runs, eot, eot_first=eot_first)
        missing = sum(shard.data_bytes for shard in shards if shard.documents is None)
        meter = Meter("reading", missing, progress)
        done = tuple(_index_file(runs, eot, meter, eot_first=eot_first, force=force) for runs in files)
        return Indexed(eot, eot_first, is_sure, done, sum(shard.num_tokens for shard in shards))


def _indexed_eot(spec: CorpusSpec) -> int | None:
    """Return the end-of-text id of the sidecars that are there; None if there are none, or damaged ones."""
    with ExitStack() as opened:
        try:
            return find_eot(spec, open_shards(dataclasses.replace(spec, token_range=None), opened))
        except UnreadableCorpus:
            return None


def _find_place(
    spec: CorpusSpec, files: Sequence[Sequence[Shard]], eot: int, *, force: bool
) -> tuple[bool, bool]:
    """Return whether documents begin with end-of-text, and whether that is sure.

    Whoever writes whole documents begins the first shard with one, and ends the last shard with one, also
    where shards between are cut inside documents.
    """
    edges = looks_first([run for runs in files if runs[0].documents is None for run in runs], eot)
    usual = all(runs[0].eot_first for runs in files)
    said = usual or edges is True if spec.eot_at is None else spec.eot_at == "first"
    if edges is (not said) and not force:
        how = ("end", "last", "begin") if said else ("begin", "first", "end")
        raise InvalidParameter(
            f"{spec.path}: its shards look as if documents {how[0]} with end-of-text ({eot}): say "
            f"eot_at={how[1]}, or --force if they {how[2]} with it",
            parameter="eot_at",
        )
    return said, edges is not None or spec.eot_at is not None or usual


def _check_made(spec: CorpusSpec, runs: Sequence[Shard], eot: int, *, eot_first: bool) -> None:
    """Refuse to replace the documents that another end-of-text token gave for the same content."""
    made = None
    with suppress(UnreadableCorpus):  # is written anew
        if runs[0].documents is None and (documents := open_sidecar(runs)) is not None:
            with documents:
                made = documents.header
    if made is None or made.eot is None:
        return
    if made.eot != eot or (spec.eot_at is None and made.eot_first != eot_first):
        word, place = ("begin", "first") if made.eot_first else ("end", "last")
        raise InvalidParameter(
            f"{runs[0].path} has documents that {word} with token {made.eot}: say eot={made.eot},"
            f"eot_at={place} to keep them, or --force to find them by token {eot} "
            f"at their {'begin' if eot_first else 'end'}",
            parameter="eot",
        )


def looks_first(shards: Sequence[Shard], eot: int) -> bool | None:
    """Return whether shards look as if documents begin with end-of-text; None if they do not tell."""
    some = [edges for shard in shards if (edges := shard.known_edges) is not None]
    if not some:
        return None
    begins, ends = some[0][0] == eot, some[-1][1] == eot
    return begins if begins != ends else None


def _index_file(
    runs: list[Shard], eot: int | None, meter: Meter, *, eot_first: bool, force: bool
) -> IndexedShard:
    name, last = runs[0].file.name, runs[-1]
    if runs[0].documents is not None:
        num_documents = sum(run.documents.num_documents for run in runs if run.documents is not None)
        return IndexedShard(name, "own", None, num_documents, None)
    sidecar = documents_path(last.path)
    header = kept = None if force else _right_header(runs, eot, eot_first=eot_first)
    try:
        if header is None:
            with publishing(sidecar, of=[runs[0].file]) as file:  # there may be ten thousand
                ends = _find_ends(runs, eot, meter, eot_first=eot_first)
                header = write_ends(runs, eot, ends, file, eot_first=eot_first)
                if eot is not None and runs[0].listed_ends is not None and not force:
                    _check_listed(runs, eot, header)
        else:
            remove_stale(sidecar)
            meter.add(sum(run.data_bytes for run in runs))
    except OSError as error:
        what = f"the document ends cannot be written: {error.strerror}"
        remedy = "make room, then run it again: shards that are done stay done"
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            remedy = _READ_ONLY_REMEDY
        elif isinstance(error, BlockingIOError):
            remedy = "wait until it is done"
        raise unreadable(sidecar, what, remedy) from error
    edges = [token for run in runs for token in run.known_edges or ()]
    is_cut = bool(edges) and edges[0 if eot_first else -1] != eot
    num_found = None if eot is None else header.num_documents - is_cut
    return IndexedShard(name, "written" if kept is None else "kept", sidecar, header.num_documents, num_found)


def _check_listed(runs: Sequence[Shard], eot: int, found: DocumentsHeader) -> None:
    """Refuse ends of an end-of-text token that differ from those that a side file of the shard lists."""
    with io.BytesIO() as file:
        listed = write_ends(runs, None, _find_ends(runs, None, Meter("", 0, None)), file)
    if (listed.num_documents, listed.ends_checksum) != (found.num_documents, found.ends_checksum):
        raise runs[0].file.unreadable(
            f"token {eot} ends {counted(found.num_documents, 'document')}, the table beside it lists "
            f"{listed.num_documents:,}, or others",
            "leave eot out to take those of the table, or say --force to take those of the token",
        )


def _right_header(runs: Sequence[Shard], eot: int | None, *, eot_first: bool) -> DocumentsHeader | None:
    """Return the header of the file's sidecar if it is undamaged and for this content and id."""
    with suppress(UnreadableCorpus):
        if (documents := open_sidecar(runs)) is not None:
            with documents:
                header = documents.header
                if (header.eot, header.eot_first) == (eot, eot_first) and documents.find_problem() is None:
                    return header
    return None


def write_ends(
    runs: Sequence[Shard], eot: int | None, ends: Iterable[Ends], file: BinaryIO, *, eot_first: bool = False
) -> DocumentsHeader:
    """Write the sidecar of a token file to `file`; the header last, when the counts are known.

    `ends` come in pieces, in order, and count over the tokens of all `runs` of the file; the last document
    ends with the last run in any case. Without `eot` they were listed, and not found.
    """
    file.write(bytes(HEADER_BYTES))
    checksum, num_documents, last_end = xxhash.xxh3_64(), 0, 0

    def write(piece: Ends) -> None:
        nonlocal num_documents, last_end
        if piece.size:
            data = piece.astype(END_DTYPE).data
            file.write(data)
            checksum.update(data)
            num_documents, last_end = num_documents + piece.size, int(piece[-1])

    for piece in ends:
        write(piece)
    if last_end != (num_tokens := sum(run.num_tokens for run in runs)):
        write(np.array([num_tokens]))
    digests = content_digest(runs), checksum.intdigest()
    header = DocumentsHeader(eot, eot_first, num_tokens, num_documents, runs[0].dtype, *digests)
    file.seek(0)
    file.write(header.pack())
    runs[0].file.check_unchanged()
    return header


def _find_ends(
    runs: Sequence[Shard], eot: int | None, meter: Meter, *, eot_first: bool = False
) -> Iterator[Ends]:
    """Yield where documents end, piece by piece; without `eot`, where a side file says so."""
    if eot is None:
        listed = runs[0].listed_ends
        yield from listed() if listed is not None else ()
        meter.add(sum(run.data_bytes for run in runs))
        return
    base = 0
    for run in runs:
        for piece in run.pieces(0, run.data_bytes, _PIECE_TOKENS * run.dtype.itemsize):
            tokens = np.frombuffer(piece, run.dtype)
            ends = np.flatnonzero(tokens == eot) + (base + (not eot_first))
            yield ends[1:] if ends.size and not ends[0] else ends  # nothing ends where the first one begins
            base += tokens.size
            meter.add(len(piece))
