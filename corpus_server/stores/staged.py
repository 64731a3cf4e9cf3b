"""A token file in an object store, as the rest of the server sees it, and its extents.

opened       size known; single ranges are read from the store             (headers, fingerprints)
cached       an extent, a fixed part of the file, is a local file
attached     that local file is mapped, and locked against removal          (`attached`)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeGuard

import numpy as np

from corpus_server.corpus import guard
from corpus_server.corpus.files import OpenFile
from corpus_server.errors import naming
from corpus_server.pieces import Int64Array
from corpus_server.stores.attached import PartlyMappedFile, Sign, Span
from corpus_server.stores.cache import Cache
from corpus_server.stores.cuts import Cuts
from corpus_server.stores.download import Part, Recorded, check_whole, stage
from corpus_server.stores.objects import Store, StoreObject

_EDGE_BYTES: Final = 4  # of the widest token
END_BYTES: Final = 16 << 10
"""Read at both ends of a file before it is opened: the longest header, and the samples of a fingerprint of 32
shards or more. So opening costs two requests a shard, in parallel."""


class Extent(NamedTuple):
    """Bytes [start, stop) of a file in an object store: what is fetched, kept and removed as one.

    Those of two orders may overlap. A value; its methods may be called from any thread.
    """

    file: StagedFile
    start: int
    stop: int

    @property
    def part(self) -> Part:
        """Where it lies in the file, and its key in the cache."""
        return Part(f"{self.file.key}/{self.start}-{self.stop}", self.start, self.stop)

    @property
    def size_bytes(self) -> int:
        """Bytes of it, see `Cuts`."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """What errors call it: the file, and which bytes unless it is the only extent."""
        return self.file.name_of(self.start, self.stop)

    @property
    def is_whole(self) -> bool:
        """Whether it holds all that is staged of its file."""
        return (self.start, self.stop) == (self.file.data.start, self.file.data.stop)

    @property
    def is_cached(self) -> bool:
        """Whether it is on this machine."""
        return self.file.is_attached(self) or self.file.cache.has(self.part.key)

    def open(self) -> OpenFile | None:
        """Open its copy in the cache, if there is one; throw away one that was cut or extended."""
        local = self.file.cache.open(self.part.key)
        if local is None or local.size_bytes == self.size_bytes:
            return local
        local.close()
        self.discard()
        return None

    def attach(self) -> bool:
        """Map it if the cache has it; return whether it is mapped now."""
        return self.file.attach(self, self.open)

    def detach(self) -> bool:
        """Unmap it, so that the cache may remove it; return False if tokens are being copied."""
        return self.file.detach(self)

    def check_unchanged(self) -> None:
        """Raise if bytes copied from its map may be wrong; a version in a store never changes."""
        if (its := self.file.attached(self)) is not None:
            its.check_unchanged()

    def stage(
        self,
        fetchers: ThreadPoolExecutor,
        stopping: threading.Event,
        *,
        urgent: bool,
        on_bytes: Callable[[int], object],
    ) -> None:
        """Bring it into the cache, see `download.stage`.

        When extents hold all of the file, its MD5 is checked, if it is known.
        """
        file = self.file
        with naming(file.corpus):
            stage(
                file.store,
                file.what,
                self.part,
                file.cache,
                file.recorded,
                fetchers,
                stopping,
                is_all=self.is_whole,
                urgent=urgent,
                on_bytes=on_bytes,
            )
            if not self.is_whole and not file.recorded:
                check_whole(file.store, file.what, file.data, file.cache)

    def touch(self, *, planned: bool = True) -> None:
        """Note whether it is planned for, see `Cache.touch`."""
        self.file.cache.touch(self.part.key, planned=planned)

    def discard(self) -> None:
        """See `Cache.discard`."""
        self.file.cache.discard(self.part.key)

    def sync(self) -> None:
        """See `Cache.sync`."""
        self.file.cache.sync(self.part.key)


class StagedFile(PartlyMappedFile):
    """A file in an object store; safe to use from several threads.

    Args:
        path: where the corpus's folder has it, see `mirror`.
        what: the version that is served.

    Attributes:
        cache: of its extents.
        recorded: what to check of them, for each run of tokens.
    """

    def __init__(self, path: Path, store: Store, what: StoreObject, cache: Cache) -> None:
        super().__init__(path, what.size_bytes)
        self.cache = cache
        self.recorded: list[Recorded] = []
        self.store, self.what = store, what
        self._ends: list[tuple[int, bytes]] = []

    @property
    def key(self) -> str:
        """What the keys of its extents in the cache begin with: it names one version of one object."""
        return self.what.key

    @property
    def extents(self) -> list[Extent]:
        """All of them, where no order cuts them: one at least."""
        return self._extents(np.arange(int(self._cuts.lasts[0]) + 1))

    def _extents(self, numbers: Int64Array) -> list[Extent]:
        starts, stops = (
            self.data.start + each for each in self._cuts.bounds(np.zeros_like(numbers), numbers)
        )
        return [Extent(self, *each) for each in zip(starts.tolist(), stops.tolist(), strict=True)]

    @property
    def _cuts(self) -> Cuts:
        low = np.zeros(1, np.int64)
        return Cuts.of(low, low + len(self.data), self.cache.extent_bytes)

    def sign(self) -> Sign:
        """See `PartlyMappedFile.sign`, and `Cache.given_up`."""
        return self.cache.given_up(), guard.last_fault()

    def attach_anew(self, span: Span) -> None:
        """See `PartlyMappedFile.attach_anew`."""
        extent = Extent(self, *span[1:])
        if not extent.attach():
            raise self.not_here(extent)
        self.cache.on_attached(extent)

    def read_ends(self) -> None:
        """Read both ends, so that opening the file needs no further request."""
        size = self.size_bytes
        ends = [(0, min(END_BYTES, size)), (max(END_BYTES, size - END_BYTES), size)]
        self._ends = [(a, bytes(self.store.read(self.what, a, b))) for a, b in ends if a < b]

    def has_ends(self, offset: int, count: int) -> bool:
        """Tell whether both ends of a range were read while the file was opened."""
        edges = (offset, offset + _EDGE_BYTES), (offset + count - _EDGE_BYTES, offset + count)
        return all(self._at_end(max(0, start), stop) is not None for start, stop in edges)

    def forget_ends(self) -> None:
        """Free what was read while the file was opened."""
        self._ends = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset`: from the cache, or else from the store."""
        stop, extent = offset + len(buffer), None
        if self.data.start <= offset < self.data.stop:
            at = np.array([offset - self.data.start])
            (extent,) = self._extents(self._cuts.at(at, np.zeros_like(at)))
        if extent is not None and extent.stop < stop:
            self.read_into(offset, buffer[: extent.stop - offset])
            self.read_into(extent.stop, buffer[extent.stop - offset :])
        elif extent is not None and (local := extent.open()) is not None:
            local.name, local.corpus = extent.name, self.corpus
            with local:
                local.read_into(offset - extent.start, buffer)
        elif (content := self._at_end(offset, stop)) is not None:
            buffer[:] = content
        elif buffer and not self._ends:
            with naming(self.corpus):
                buffer[:] = self.store.read(self.what, offset, stop)
        elif buffer:
            # It is being opened: what a fingerprint reads is read again for its ids, from whole ones.
            start = max(0, offset - 16)
            self._ends.append((start, bytes(self.store.read(self.what, start, stop))))
            buffer[:] = self._ends[-1][1][offset - start :]

    def _at_end(self, offset: int, stop: int) -> bytes | None:
        """Return bytes that were read while the file was opened."""
        for start, content in self._ends:
            if start <= offset and stop <= start + len(content):
                return content[offset - start : stop - start]
        return None

    def map(self, data: range | None = None) -> memoryview:
        """Reserve the addresses of a map, so that extents of `data` can be mapped."""
        if data is not None:
            self.data = data
        return self._reserve(self.data.start)


def is_staged(file: object) -> TypeGuard[StagedFile]:
    """Tell whether a file must be staged before its tokens can be read."""
    return isinstance(file, StagedFile)
