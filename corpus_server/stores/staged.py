"""A token file in an object store, as the rest of the server sees it: a file whose map comes and goes.

    opened       size known; single ranges are read from the store             (headers, fingerprints)
    cached       the whole shard is a local file
    attached     that file is mapped, and locked against removal

The map's addresses are reserved when the file is opened, and stay: attaching maps the local file over the
reservation, detaching the reservation over the file. So a `Gatherer` computes its addresses once, as for
local files. Reading the reservation ends the process rather than giving a wrong token; `held` prevents it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeGuard

from corpus_server.corpus import guard
from corpus_server.corpus.files import OpenFile, address_of, map_over, reserve
from corpus_server.errors import CorpusServerError, NotStaged, ReadFailed
from corpus_server.stores.cache import Cache
from corpus_server.stores.download import Recorded, stage
from corpus_server.stores.objects import Store, StoreObject

END_BYTES: Final = 16 << 10
"""Read at both ends of a file before it is opened: the longest header, and the samples of a fingerprint of 32
shards or more. So opening costs two requests a shard, in parallel."""


class StagedFile(OpenFile):
    """A file in an object store; `attach`, `detach` and `held` may be called from any thread.

    Args:
        path: where the corpus's folder has it, see `mirror`.
        what: the version that is served.

    Attributes:
        recorded: what to check when it is staged, for each run of tokens.
        stage: brings the whole shard into the cache, see `download.stage`.
        sync, touch, discard: those of `Cache` for the local copy; `release` touches it as no longer planned.
    """

    is_local: ClassVar = False

    def __init__(self, path: Path, store: Store, what: StoreObject, cache: Cache) -> None:
        self.path = path
        self.name = path.name
        self.owner = ""
        self.size_bytes = what.size_bytes
        self.recorded: list[Recorded] = []
        self.stage = partial(stage, store, what, cache, self.recorded)
        self.sync = partial(cache.sync, what.key)
        self.touch = partial(cache.touch, what.key)
        self.release = partial(cache.touch, what.key, planned=False)
        self.discard = partial(cache.discard, what.key)
        self._store, self._what, self._cache = store, what, cache
        self._ends: list[tuple[int, bytes]] = []
        self._reserved: mmap.mmap | None = None
        self._address = 0
        self._lock = threading.Lock()  # of the three below
        self._local: OpenFile | None = None
        self._guarded: guard.GuardedRange | None = None
        self._num_held = 0

    def read_ends(self) -> None:
        """Read both ends, so that opening the file needs no further request."""
        if not self._cache.has(self._what.key):
            size = self.size_bytes
            ends = [(0, min(END_BYTES, size)), (max(END_BYTES, size - END_BYTES), size)]
            self._ends = [(a, bytes(self._store.read(self._what, a, b))) for a, b in ends if a < b]

    def forget_ends(self) -> None:
        """Free what `read_ends` has read."""
        self._ends = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset`: from the cache, or else from the store."""
        with self._open_local() or nullcontext() as local:
            if local is not None:
                local.read_into(offset, buffer)
                return
        for start, content in self._ends:
            if start <= offset and offset + len(buffer) <= start + len(content):
                buffer[:] = content[offset - start : offset - start + len(buffer)]
                return
        if buffer:
            buffer[:] = self._store.read(self._what, offset, offset + len(buffer))

    def map(self) -> mmap.mmap:
        """Reserve the addresses of a map."""
        # Kept until `close`: whatever was mapped at these addresses afterwards would be overwritten.
        self._reserved = reserve(self.path, self.size_bytes)
        self._address = address_of(self._reserved)
        return self._reserved

    @property
    def is_attached(self) -> bool:
        """Whether tokens can be read."""
        return self._local is not None

    @property
    def is_cached(self) -> bool:
        """Whether the whole file is on this machine."""
        return self.is_attached or self._cache.has(self._what.key)

    def attach(self) -> bool:
        """Map the file if the cache has it; return whether it is mapped now."""
        with self._lock:
            if self._local is not None:
                return True
            local = self._open_local()
            if local is None:
                return False
            local.name, local.owner = self.name, self.owner
            if self._reserved is not None:  # an empty shard has no map
                try:
                    map_over(self.path, self._address, len(self._reserved), local.fd)
                except CorpusServerError:
                    local.close()
                    raise
                self._guarded = guard.guard(self._address, self.size_bytes)
            self._local = local
            return True

    def detach(self) -> bool:
        """Unmap the file, so that the cache may remove it; return False if tokens are being copied."""
        with self._lock:
            if self._num_held:
                return False
            if self._local is not None:
                self._detach()
            return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the file attached.

        Raises:
            NotStaged: it is not.
        """
        with self._lock:
            if self._local is None:
                raise NotStaged(f"{self.owner}{self.name} is not on this machine")
            self._num_held += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_held -= 1

    def is_resident(self, offset: int) -> bool:
        """Tell whether the page cache holds the byte at `offset`."""
        with self._lock:
            return self._local is not None and self._local.is_resident(offset)

    def drop(self, offset: int, count: int) -> None:
        """Take whole pages of the local copy out of the page cache, if there is one."""
        with self._lock:
            if self._local is not None:
                self._local.drop(offset, count)

    def check_unchanged(self) -> None:
        """Raise if bytes copied from the map may be wrong; a version in a store never changes."""
        with self._lock:
            local, guarded = self._local, self._guarded
            if local is None:
                return
            local.check_unchanged()
            if not os.fstat(local.fd).st_nlink:  # see `Cache.sync`; what is in use is removed by nothing else
                raise ReadFailed(
                    f"{self.owner}{self.name}: the cache's disk did not take it",
                    remedy="the shard is staged anew",
                )
            if guarded is not None and guarded.num_faults:
                raise ReadFailed(
                    f"{self.owner}{self.name}: the cache's disk did not deliver {guarded.num_faults} pages",
                    remedy="look at the kernel's log; the shard is staged anew",
                )

    def close(self) -> None:
        """Detach for good; a second call does nothing."""
        with self._lock:
            if self._local is not None:
                self._detach()
            self._reserved, self._address = None, 0

    def _detach(self) -> None:
        assert self._local is not None
        if self._guarded is not None and self._reserved is not None:
            guard.release(self._guarded)
            map_over(self.path, self._address, len(self._reserved), -1)
        self._guarded = None
        self._local.close()
        self._local = None

    def _open_local(self) -> OpenFile | None:
        """Open the local copy if it is whole; throw away one that was cut or extended since it was staged."""
        local = self._cache.open(self._what.key)
        if local is None or local.size_bytes == self.size_bytes:
            return local
        local.close()
        self.discard()
        return None


def is_staged(file: OpenFile) -> TypeGuard[StagedFile]:
    """Tell whether a file must be staged before its tokens can be read."""
    return not file.is_local
