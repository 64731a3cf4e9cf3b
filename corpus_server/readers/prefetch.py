"""Prefetch: a thread asks the kernel for the windows that readers will request next; 14 times the cold reads.

A request to the kernel starts a read and does not wait for it, until the disk's queue is full. So one
thread keeps the disk as busy as possible. Each worker process prefetches for the requests that it gets;
a page that is in memory or being read is not read twice. A bounded shuffle is read group by group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from corpus_server.corpus.corpus import Corpus
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.groups import GroupReader, GroupReaders
from corpus_server.readers.windows import Reader, Readers

# Windows in one call to the kernel. The call blocks while the disk's queue (commonly 256 requests) is
# full; between two calls the thread checks whether the windows are still of use.
_CALL_WINDOWS = 256

_SAMPLE_WINDOWS = 64  # a corpus of which 5 % are not resident passes for warm once in 27 times

_JOIN_SECONDS = 2.0  # a call takes some ms; a longer wait means a disk that hangs, perhaps for ever

_Work = tuple[Callable[[Any], None], Reader | GroupReader]

_log = logging.getLogger("corpus_server")


class Prefetcher:
    """Prefetches for all readers of a process; owns a thread. Safe to use from several threads.

    Args:
        budget_bytes: see `Readers`; with 0 nothing is prefetched.
        on_asked: called by the thread with the bytes of windows that it asked the kernel for.
    """

    def __init__(
        self, budget_bytes: int, *, on_asked: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        self._on_asked = on_asked
        self._readers = Readers(budget_bytes)
        self._groups = GroupReaders(budget_bytes)
        self._refused: set[str] = set()  # plans whose groups are too large, once that was logged
        self._changed = threading.Condition()  # guards the readers
        self._closed = False
        self._thread: threading.Thread | None = None
        if budget_bytes:
            # A daemon: the interpreter ends without it if it hangs in a read.
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread, waiting for at most 2 s; idempotent.

        If a disk or network file system hangs, the thread stays behind until its system call returns. Shards
        may be closed meanwhile, because the thread only gives hints and never reads mapped memory.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                _log.warning(
                    "the prefetch thread did not end within %g s and is left behind: "
                    "does the disk or the network file system hang?",
                    _JOIN_SECONDS,
                )

    def note(self, bound: BoundPlan, *, step: int, count: int, rows: int, rank: int, world_size: int) -> None:
        """Note a request before its windows are gathered, see `Readers.note`. Does not wait for the disk.

        Rows of pieces are not prefetched: a response asks for all of its own at once.
        """
        if self._thread is None or not bound.sampler.rows.is_window:
            return
        with self._changed:
            now = time.monotonic()
            if not self._groups.note(bound, step, now):
                self._readers.reserved_bytes = self._groups.num_bytes
                self._readers.note(
                    bound, step=step, count=count, rows=rows, rank=rank, world_size=world_size, now=now
                )
            if self._readers.has_work() or self._groups.next(now) is not None:
                self._changed.notify()

    def _run(self) -> None:
        """Run the thread: one turn of a reader and one piece of a group after another."""
        while (work := self._next()) is not None:
            for serve, reader in work:
                try:
                    serve(reader)
                except Exception:  # noqa: BLE001 - no response depends on prefetching
                    _log.exception("reading ahead failed for plan %s", reader.bound.plan.id)
                    with self._changed:
                        reader.give_up()

    def _next(self) -> list[_Work] | None:
        """Wait for readers that want a turn; None when closed."""
        with self._changed:
            while not self._closed:
                work: list[_Work] = []
                if (reader := self._readers.next()) is not None:
                    work.append((self._serve, reader))
                if (group := self._groups.next(time.monotonic())) is not None:
                    work.append((self._serve_group, group))
                if (group := self._groups.next_idle()) is not None:
                    work.append((self._drop, group))
                if work:
                    return work
                self._changed.wait()
        return None

    def _serve_group(self, reader: GroupReader) -> None:
        """Read one piece of a group, and drop the groups that were left."""
        with self._changed:
            steps = reader.take_steps(time.monotonic())
        if steps:
            reader.look(steps, self._others(reader))
        self._on_asked(reader.read_piece())

    def _drop(self, reader: GroupReader) -> None:
        reader.drop_all(self._others(reader))

    def _others(self, reader: GroupReader) -> list[Corpus]:
        """Return the corpora of the other plans that are being read."""
        with self._changed:
            bounds = [*self._readers.bounds(), *self._groups.bounds()]
        return [corpus for each in bounds if each is not reader.bound for corpus in each.corpora.values()]

    def _serve(self, reader: Reader) -> None:
        """Prefetch one turn of a reader, unless its windows are resident."""
        with self._changed:
            turn = reader.next_turn()
        locations, after = turn.locate()
        windows = locations.reshape(-1, 2)
        gatherer, length = reader.bound.gatherer, reader.bound.sampler.seq_len(turn.first) + 1
        spread = max(1, -(-len(windows) // _SAMPLE_WINDOWS))
        warm = turn.samples and len(windows) > 0 and gatherer.are_resident(windows[::spread])
        with self._changed:
            refusal = None if warm else self._refusal(reader.bound)
            if not reader.finish(turn, after, warm=warm):
                return
        if refusal is not None:
            _log.warning(refusal)
        for begin in range(0, len(windows), _CALL_WINDOWS):
            if self._closed or reader.step >= after:
                return
            part = windows[begin : begin + _CALL_WINDOWS]
            gatherer.read_ahead(part, length)
            self._on_asked(len(part) * length * reader.bound.dtype.itemsize)

    def _refusal(self, bound: BoundPlan) -> str | None:
        """Return, once, why a plan of a bounded shuffle on disk is read window by window."""
        if bound.sampler.groups is None or bound.plan.id in self._refused:
            return None
        self._refused.add(bound.plan.id)
        return self._groups.refusal(bound)
