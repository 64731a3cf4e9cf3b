"""Run calls of a function in processes of this machine, which end when this one does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import NamedTuple, TypeVar

from corpus_server import watched
from corpus_server.errors import CorpusServerError
from corpus_server.user_files import reason_of

T = TypeVar("T")


LOOK_SECONDS = 0.5
"""Between two looks at what the processes have counted."""

_counts: list[Synchronized[int]] = []
"""Of a process that was started here: the number that all of them add to."""


class Count(NamedTuple):
    """What all processes have counted by now."""

    value: int


def count(more: int) -> None:
    """Add to what the processes count together; called by the work."""
    (total,) = _counts
    with total.get_lock():
        total.value += more


def in_processes(
    work: Callable[..., T], calls: Sequence[tuple[object, ...]], *, num_processes: int, what: str
) -> Iterator[T]:
    """Yield the results alone of `counted_in_processes`."""
    with closing(counted_in_processes(work, calls, num_processes=num_processes, what=what)) as found:
        for each in found:
            if not isinstance(each, Count):
                yield each


def counted_in_processes(
    work: Callable[..., T], calls: Sequence[tuple[object, ...]], *, num_processes: int, what: str
) -> Generator[T | Count, None, None]:
    """Yield the results of calls as they end in up to `num_processes` processes, and counts meanwhile.

    When this process ends, for whatever reason, they end at once; one that is killed ends the work. A result
    comes only if no file changed that its process has open.

    Args:
        work: a function of a module.
        calls: its arguments.
        what: the work, in the error of a process that ended.
    """
    if not calls:
        return
    # Not fork: a tokenizer's threads would not be in the child, but the locks that they hold would.
    context = multiprocessing.get_context("spawn")
    num_processes = min(num_processes, len(calls))
    try:
        total = context.Value("q")  # its lock, and the pool's, are semaphores of POSIX: files in /dev/shm
        theirs, ours = context.Pipe(duplex=False)
        executor = ProcessPoolExecutor(num_processes, context, initializer=_begin, initargs=(theirs, total))
    except OSError as error:
        raise CorpusServerError(
            f"{what} needs /dev/shm for the locks of its processes, which cannot be made: {reason_of(error)}",
            remedy="let this user write to /dev/shm, and make room there",
        ) from error
    try:
        with _interrupts_blocked():
            pending = {executor.submit(_watched, work, *call) for call in calls}
        while pending:
            ended, pending = wait(pending, LOOK_SECONDS, FIRST_COMPLETED)
            for future in ended:
                yield future.result()
            yield Count(total.value)
    except (BrokenProcessPool, ConnectionError) as error:  # the second: while it started
        remedy = "if it was killed for want of memory, use fewer --processes; the same command continues"
        raise CorpusServerError(f"a process ended during {what}", remedy=remedy) from error
    finally:
        ours.close()  # workers end in the middle of their calls
        executor.shutdown(cancel_futures=True)
        theirs.close()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Have the processes that are started in here never see Ctrl-C: the parent does, and ends them.

    A mask is inherited. To ignore the signal in the worker would be too late: it imports for a second first.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watched(work: Callable[..., T], *call: object) -> T:
    with watched.watching():
        return work(*call)


def _begin(parent: Connection, total: Synchronized[int]) -> None:
    """Prepare a worker: it ends when the parent closes its end of the pipe, or ends itself."""
    _counts.append(total)
    threading.Thread(target=_end_with, args=(parent,), name="end-with-parent", daemon=True).start()


def _end_with(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)
