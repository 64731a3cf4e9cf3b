"""Run the parts of a build: in processes on this machine, or as tasks of a Ray cluster.

Each function is a `RunParts`. An error of a part ends all of it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from corpus_server.errors import InvalidParameter, ReadFailed
from corpus_server.extras import optional_package
from corpus_server.tools.building.job import Job, Part
from corpus_server.tools.building.part import PartResult, build_part

# Enough to keep some hundred cores busy; Ray takes milliseconds to look through ten thousand pending tasks.
_IN_FLIGHT: Final = 1000


def in_processes(
    job: Job, parts: Sequence[Part], folder: Path, *, num_processes: int
) -> Iterator[PartResult]:
    """Yield the results as parts end in up to `num_processes` processes.

    When this process ends, for whatever reason, they end at once; one that is killed ends the build.
    """
    if not parts:
        return
    # Not fork: a tokenizer's threads would not be in the child, but the locks that they hold would.
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    num_processes = min(num_processes, len(parts))
    executor = ProcessPoolExecutor(num_processes, context, initializer=_begin, initargs=(theirs,))
    try:
        with _interrupts_blocked():
            futures = [executor.submit(build_part, job.options, part, folder) for part in parts]
        for future in as_completed(futures):
            yield future.result()
    except (BrokenProcessPool, ConnectionError) as error:  # the second: while it started
        remedy = "if it was killed for want of memory, use fewer --processes; the same command continues"
        raise ReadFailed("a process of the build ended while it built a part", remedy=remedy) from error
    finally:
        ours.close()  # workers end in the middle of their parts, of which only complete files count
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


def _begin(parent: Connection) -> None:
    """Prepare a worker: it ends when the parent closes its end of the pipe, or ends itself."""
    threading.Thread(target=_end_with, args=(parent,), name="end-with-parent", daemon=True).start()


def _end_with(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


def on_ray(job: Job, parts: Sequence[Part], folder: Path) -> Iterator[PartResult]:
    """Yield the results as parts end on a Ray cluster. A task whose machine dies is run again by Ray.

    Uses the process's connection to Ray, if there is one, else connects to the cluster of RAY_ADDRESS or to
    one that runs on this machine, until all parts are done. Never starts a cluster. Its machines need this
    package in the same release, and the sources, the tokenizer and the folder beside OUT under the same
    paths: a shared file system.
    """
    ray = optional_package("ray", extra="ray", purpose="a build on Ray")
    connected = ray.is_initialized()
    if not connected:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            remedy = "set RAY_ADDRESS, and RAY_AUTH_TOKEN if the cluster wants one, or build without Ray"
            raise InvalidParameter(f"expected a Ray cluster: {error}", remedy=remedy) from error
    try:
        task = ray.remote(num_cpus=1)(build_part)
        options = ray.put(job.options)
        waiting = iter(parts)
        pending = [task.remote(options, part, folder) for part in islice(waiting, _IN_FLIGHT)]
        while pending:
            (done,), pending = ray.wait(pending)
            try:
                yield ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            pending += [task.remote(options, part, folder) for part in islice(waiting, 1)]
    finally:
        if not connected:
            ray.shutdown()
