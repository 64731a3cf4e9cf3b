"""Fill a cache with what steps of a plan read, before anybody asks for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from corpus_server.errors import CacheTooSmall, StoreFailed
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.extents import RankExtents
from corpus_server.stores import Extent
from corpus_server.stores.download import RANGES_AT_ONCE

_EXTENTS_AT_ONCE = RANGES_AT_ONCE  # each has a range at least on its way
_LOOK_SECONDS = 0.1  # whether another process has staged an extent by now
_REPORT_SECONDS = 1.0  # until `on_progress` is called again
_KEEP_SECONDS = 3.0  # until extents that are here are touched again, so that nobody removes them
_TRIES = 6  # of an extent whose store fails, after 1, 2, 4, 8 and 16 s


def needed(bound: BoundPlan, steps: range) -> list[Extent]:
    """Return the extents that steps of all ranks read, first used first, each once.

    Raises:
        InvalidParameter: the plan does not have all of these steps.
    """
    found: dict[Extent, None] = {}
    work = RankExtents(bound, rank=0, world_size=1, steps=steps)
    while work.next < steps.stop:
        bound.sampler.check_part(work.next, rank=0, world_size=1)
        located = work.locate(steps.stop)
        found.update(dict.fromkeys(located.uses))
        work.add(located.num_steps, located.step_windows)
    return list(found)


def fill(
    extents: Sequence[Extent],
    limit_bytes: int,
    on_progress: Callable[[int], object],
    stopping: threading.Event,
) -> int:
    """Bring extents into the cache, in their order; return how many bytes were fetched.

    Those that are there stay. So a second call goes on where one was ended.

    Args:
        limit_bytes: of the cache.
        on_progress: told of the bytes that have come, each second.
        stopping: set by whoever wants the work given up.

    Raises:
        CacheTooSmall: the cache does not hold them together.
        StoreFailed: the store failed several times in a row.
        CorpusChanged, CacheFull: what is in the cache stays there.
    """
    total = sum(each.size_bytes for each in extents)
    if total > limit_bytes:
        detail = f"the steps read {total:,} bytes, and the cache holds {limit_bytes:,}"
        raise CacheTooSmall(detail, remedy="name fewer steps, or give a larger --cache-bytes")
    count = _Count()
    with ThreadPoolExecutor(_EXTENTS_AT_ONCE) as threads, ThreadPoolExecutor(RANGES_AT_ONCE) as fetchers:
        left: set[Future[None]] = set()
        try:
            left = {threads.submit(_bring, each, fetchers, stopping, count) for each in extents}
            keep_at = 0.0
            while left:
                if time.monotonic() >= keep_at:
                    for each in extents:
                        each.touch()
                    keep_at = time.monotonic() + _KEEP_SECONDS
                done, left = wait(left, _REPORT_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                on_progress(count.num_bytes)
        finally:
            if left:
                stopping.set()
            for future in left:
                future.cancel()
    return count.num_bytes


class _Count:
    """Bytes that have come, counted by several threads."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


def _bring(extent: Extent, fetchers: ThreadPoolExecutor, stopping: threading.Event, count: _Count) -> None:
    tries = 0
    while not extent.is_cached and not stopping.is_set():
        try:
            extent.stage(fetchers, stopping, urgent=False, on_bytes=count.add)
        except BlockingIOError:  # another process stages it
            stopping.wait(_LOOK_SECONDS)
        except StoreFailed:
            tries += 1
            if tries == _TRIES:
                raise
            stopping.wait(2.0 ** (tries - 1))
