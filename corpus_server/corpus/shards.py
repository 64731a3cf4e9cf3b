"""The shards of a corpus: runs of tokens in files that are open, checked and mapped."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NotRequired

import numpy as np
from typing_extensions import TypedDict

from corpus_server.corpus import guard
from corpus_server.corpus.files import Closing, OpenFile
from corpus_server.corpus.fingerprints import sampled_fingerprint
from corpus_server.corpus.formats.documents import CutDocuments, DocumentEnds, documents_path
from corpus_server.corpus.formats.layout import DocumentIndex, ShardLayout, TokenDtype
from corpus_server.corpus.formats.masks import mask_layout, sent_as
from corpus_server.corpus.formats.registry import find_mask, read_layout
from corpus_server.described import described_keys


@described_keys
class MaskDescription(TypedDict):
    """The loss mask of a shard: a number for each token, 0 where the token is no target."""

    file: str
    """The file, below the corpus's folder."""
    data_offset: int
    """Bytes before the number of the first token."""
    dtype: Literal["uint8", "float16"]
    """`uint8`: 0 or 1; `float16`: weights of the tokens' losses."""
    size_bytes: int
    """Bytes of the file."""


@described_keys
class ShardDescription(TypedDict):
    """One shard of a corpus."""

    name: str
    """Of its file; `:NUMBER` behind it if the file holds several."""
    file: str
    """The file, below the corpus's folder."""
    format: str
    num_tokens: int
    dtype: str
    data_offset: int
    """Bytes before the first token."""
    size_bytes: int
    """Bytes of the file."""
    loss_mask: NotRequired[MaskDescription]
    """Missing if the shard has none."""


class Shard(Closing):
    """One run of tokens of a mapped file; use `open_runs`.

    Attributes:
        name: of the file in the corpus (its path relative to the corpus's folder, posix, or its name), with
            `:NUMBER` behind it if the file holds several runs.
        file: open until the last shard of it is closed; `file.name` is its name in the corpus.
        format, reason, dtype, num_tokens, data_offset, documents, listed_ends: see `ShardLayout`.
        eot: id of the end-of-text token, if the sidecar of document ends says it.
        eot_first: whether documents begin with it, as the sidecar says, or else as is usual in the format.
        mask: the loss mask, if there is one: a shard itself, whose tokens are of a `MASK_DTYPES`.
        tokens: `(num_tokens,) dtype`, read-only view of the map; empty after `close`.
        address: address of `tokens[0]`, 0 for an empty or closed shard.
        edges: the first and the last token, where they are known although the tokens are not on this machine.
    """

    def __init__(
        self,
        file: OpenFile,
        layout: ShardLayout,
        number: int,
        mapped: memoryview | None,
        open_runs: set[Shard],
    ) -> None:
        self.file = file
        self.name = file.name if len(layout.runs) == 1 else f"{file.name}:{number}"
        self.path: Path = file.path
        self.format: str = layout.format
        self.reason: str = layout.reason
        self.dtype: TokenDtype = layout.dtype
        self.data_offset, self.num_tokens = layout.runs[number]
        self.documents: DocumentIndex | None = None
        self.listed_ends = layout.listed_ends
        self.eot: int | None = None
        self.eot_first = layout.eot_first
        self.mask: Shard | None = None
        self.size_bytes: int = file.size_bytes
        self.tokens: np.ndarray[tuple[int], np.dtype[Any]] = np.empty(0, self.dtype)
        self.address = 0
        self.edges: tuple[int, int] | None = None
        if mapped is not None and self.num_tokens:
            self.tokens = np.frombuffer(mapped, self.dtype, count=self.num_tokens, offset=self.data_offset)
            self.address = self.tokens.ctypes.data
        self.tokens.flags.writeable = False
        self._open_runs = open_runs  # of the same file; the last one that is closed closes it
        open_runs.add(self)

    @property
    def data_bytes(self) -> int:
        """Size of the tokens in bytes."""
        return self.num_tokens * self.dtype.itemsize

    def cut(self, start: int, stop: int) -> None:
        """Make the shard hold nothing but its tokens [start, stop), numbered from 0, and their documents."""
        self.tokens = self.tokens[start:stop]
        self.num_tokens = stop - start
        self.data_offset += start * self.dtype.itemsize
        self.address += start * self.dtype.itemsize
        if self.documents is not None:
            self.documents = CutDocuments(self.documents, start, stop)
        if self.mask is not None:
            self.mask.cut(start, stop)

    def describe(self) -> ShardDescription:
        """Return the shard's entry in a description."""
        described: ShardDescription = {
            "name": self.name,
            "file": self.file.name,
            "format": self.format,
            "num_tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "data_offset": self.data_offset,
            "size_bytes": self.size_bytes,
        }
        if (mask := self.mask) is not None:
            described["loss_mask"] = {
                "file": mask.file.name,
                "data_offset": mask.data_offset,
                "dtype": sent_as(mask.dtype),
                "size_bytes": mask.size_bytes,
            }
        return described

    @property
    def known_edges(self) -> tuple[int, int] | None:
        """The first and the last token; None if there is none, or if it takes a request to know them.

        Raises:
            CorpusChanged, ReadFailed: the file is not what was opened.
        """
        if not self.num_tokens or not self.file.is_local:
            return self.edges
        with self.file.unchanged():  # plans are refused by these tokens: zeros must not count as some
            return int(self.tokens[0]), int(self.tokens[-1])

    def read_edges(self) -> None:
        """Read the first and the last token, from the file."""
        size = self.dtype.itemsize
        content = self.read_data(0, size) + self.read_data(self.data_bytes - size, size)
        first, last = np.frombuffer(content, self.dtype).tolist()
        self.edges = first, last

    def read_data(self, offset: int, count: int) -> bytes:
        """Return `count` bytes of token data from byte `offset` of it, read from the file, not the map."""
        return self.file.read(self.data_offset + offset, count)

    def pieces(self, start: int, stop: int, num_bytes: int) -> Iterator[memoryview]:
        """Yield bytes [start, stop) of the token data, from the file; a piece overwrites the last."""
        buffer = memoryview(bytearray(min(num_bytes, stop - start)))
        for offset in range(start, stop, num_bytes):
            piece = buffer[: stop - offset]
            self.file.read_into(self.data_offset + offset, piece)
            yield piece

    def is_resident(self, token: int) -> bool:
        """Tell whether the page cache holds a token; False if the system cannot tell."""
        return self.file.is_resident(self.data_offset + token * self.dtype.itemsize)

    def release(self, start: int, stop: int) -> None:
        """Unmap the pages of tokens [start, stop): they stay in the page cache, and can be dropped there.

        With them those of their loss mask, which are read and dropped together.
        """
        # A view keeps the map alive: memory that the process got in its place would lose its content.
        tokens = self.tokens[start:stop]
        address = tokens.ctypes.data
        first = address - address % mmap.PAGESIZE
        if tokens.size:
            guard.libc().madvise(first, address + tokens.nbytes - first, mmap.MADV_DONTNEED)
        if self.mask is not None:
            self.mask.release(start, stop)

    def drop(self, start: int, stop: int) -> None:
        """Take tokens [start, stop) out of the page cache, but for pages that a process has not released."""
        itemsize = self.dtype.itemsize
        self.file.drop(self.data_offset + start * itemsize, (stop - start) * itemsize)
        if self.mask is not None:
            self.mask.drop(start, stop)

    def close(self) -> None:
        """Unmap; close the file with its last run. Views that callers hold stay valid."""
        self.address = 0
        # mmap.close() would fail while views exist; without it, the last view unmaps.
        self.tokens = np.empty(0, self.dtype)
        if self.mask is not None:
            self.mask.close()
        self._open_runs.discard(self)
        if not self._open_runs:
            if self.documents is not None:
                self.documents.close()
            self.file.close()


def open_runs(
    path: Path,
    *,
    name: str | None = None,
    dtype: TokenDtype | None = None,
    in_folder: bool = False,
    sidecar: bool = True,
    masks: bool = True,
    open_file: Callable[[Path], OpenFile] = OpenFile,
) -> list[Shard]:
    """Open, check and map a token file, in O(1) of the token count; return its runs, most often one.

    Args:
        name: of the file in the corpus; None: the name of the file.
        dtype, in_folder: as for `Format.read`.
        sidecar: open the sidecar of document ends, if the format has no documents.
        masks: open the loss mask, if there is one.
        open_file: opens the token file; another one than `OpenFile` if it lies in an object store.

    Raises:
        UnreadableCorpus: the file or its sidecar is not what it should be; nothing stays open.
    """
    with ExitStack() as on_error:
        file = on_error.enter_context(open_file(path))
        file.name = path.name if name is None else name
        layout = read_layout(file, dtype, in_folder=in_folder)
        documents, eot, eot_first = layout.documents, None, layout.eot_first
        if documents is not None:
            on_error.enter_context(documents)
        runs = _map_runs(file, layout)
        if sidecar and documents is None and (ends := open_sidecar(runs)) is not None:
            documents, eot = on_error.enter_context(ends), ends.header.eot
            eot_first = ends.header.eot_first if eot is not None else eot_first
        start = 0
        for run in runs:
            run.eot, run.eot_first, stop = eot, eot_first, start + run.num_tokens
            if documents is not None:
                is_whole = len(runs) == 1
                run.documents = documents if is_whole else CutDocuments(documents, start, stop, is_run=True)
            start = stop
        if masks and (mask := find_mask(path)) is not None:
            _open_mask(mask, runs, open_file)
        on_error.pop_all()
    return runs


def _map_runs(file: OpenFile, layout: ShardLayout) -> list[Shard]:
    mapped = None
    if layout.num_tokens:  # an empty file cannot be mapped
        size, runs = layout.dtype.itemsize, [run for run in layout.runs if run.num_tokens]
        start, stop = min(at for at, _ in runs), max(at + size * count for at, count in runs)
        mapped = file.map(range(start, stop))
    opened: set[Shard] = set()
    return [Shard(file, layout, number, mapped, opened) for number in range(len(layout.runs))]


def _open_mask(path: Path, runs: Sequence[Shard], open_file: Callable[[Path], OpenFile]) -> None:
    """Open and map the loss mask of a token file, and give each of its runs what is its own."""
    with ExitStack() as on_error:
        file = on_error.enter_context(open_file(path))
        file.name = PurePosixPath(runs[0].file.name).with_name(path.name).as_posix()
        layout = mask_layout(file, [run.num_tokens for run in runs])
        for run, mask in zip(runs, _map_runs(file, layout), strict=True):
            run.mask = mask
        on_error.pop_all()


def contents(shards: Iterable[Shard]) -> list[Shard]:
    """Return all that a corpus consists of, for fingerprints and hashes: each shard, then its loss mask."""
    return [each for shard in shards for each in (shard, shard.mask) if each is not None]


def content_digest(runs: Sequence[Shard]) -> bytes:
    """Return a digest of 32 bytes of 8 blocks of a file's tokens."""
    return bytes.fromhex(sampled_fingerprint(runs, samples=8).partition("-")[2])


def open_sidecar(runs: Sequence[Shard]) -> DocumentEnds | None:
    """Open the sidecar of document ends beside a file, given all of its runs; None if there is none."""
    path = documents_path(runs[0].path)
    if not path.exists():
        return None
    num_tokens = sum(run.num_tokens for run in runs)
    return DocumentEnds(path, num_tokens, runs[0].dtype, content_digest(runs))
