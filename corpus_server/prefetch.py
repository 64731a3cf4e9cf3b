"""Read from disk ahead of the requests: a thread asks the kernel for the windows that readers want next.

Asking starts a read and does not wait for it, until the disk's queue is full: so one thread keeps the disk as
busy as it can be. Worker processes each read ahead from the requests that they see; a page that is there
already, or on its way, is not read twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from corpus_server.catalog import BoundPlan
from corpus_server.readers import Reader, Readers

_PART_WINDOWS = 256
"""Asked for in one call, which waits while the disk's queue (commonly of 256) is full; between two calls
it is seen whether they are still of use."""

_SAMPLE_WINDOWS = 64
"""A corpus of which 5 % are missing is taken for warm once in 27 times."""

_JOIN_SECONDS = 30.0

_log = logging.getLogger("corpus_server")


class Prefetcher:
    """Reads ahead; owns a thread. Safe to use from several threads.

    Args:
        budget_bytes: see `Readers`; 0: nothing is done.
        on_asked: called by the thread with the bytes of windows asked for.
    """

    def __init__(
        self, budget_bytes: int, *, on_asked: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        self._on_asked = on_asked
        self._readers = Readers(budget_bytes)
        self._changed = threading.Condition()  # guards the readers
        self._closed = False
        self._thread: threading.Thread | None = None
        if budget_bytes:
            self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread; idempotent. Maps may be closed only after it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def note(self, bound: BoundPlan, *, step: int, count: int, rows: int, rank: int, world_size: int) -> None:
        """Learn of a request, before its windows are gathered; see `Readers.note`. Waits for no disk."""
        if self._thread is None:
            return
        with self._changed:
            self._readers.note(
                bound,
                step=step,
                count=count,
                rows=rows,
                rank=rank,
                world_size=world_size,
                now=time.monotonic(),
            )
            if self._readers.has_work:
                self._changed.notify()

    def _run(self) -> None:
        """The thread: one block of one reader after another, in turn."""
        while (reader := self._next()) is not None:
            try:
                self._ask(reader)
            except Exception:  # noqa: BLE001 - no answer depends on it
                _log.exception("reading ahead failed for plan %s", reader.bound.plan.id)
                with self._changed:
                    reader.wanted = 0

    def _next(self) -> Reader | None:
        """Wait for a reader that wants a block; None when closed."""
        with self._changed:
            while not self._closed:
                if (reader := self._readers.next()) is not None:
                    return reader
                self._changed.wait()
        return None

    def _ask(self, reader: Reader) -> None:
        """Ask for the next block of a reader, unless its windows are resident."""
        with self._changed:
            block = reader.next_block()
        locations, after = block.locate()
        windows = locations.reshape(-1, 2)
        gatherer, plan, dtype = reader.bound.gatherer, reader.bound.plan, reader.bound.dtype
        warm = block.samples and len(windows) > 0
        if warm:
            spread = -(-len(windows) // _SAMPLE_WINDOWS)
            warm = gatherer.are_resident(windows[::spread])
        with self._changed:
            if not reader.finish(block, after, warm=warm):
                return
        for begin in range(0, len(windows), _PART_WINDOWS):
            if self._closed or reader.step >= after:
                return
            part = windows[begin : begin + _PART_WINDOWS]
            gatherer.read_ahead(part, plan.seq_len + 1)
            self._on_asked(len(part) * (plan.seq_len + 1) * dtype.itemsize)
