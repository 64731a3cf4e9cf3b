"""Run parts in processes on this machine.

When the parent ends, for whatever reason, its workers end at once; a worker that is killed ends the build.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from corpus_server.building.job import Job, Part
from corpus_server.building.part import PartResult, build_part
from corpus_server.errors import ReadFailed


@dataclass(frozen=True)
class LocalProcesses:
    """Runs parts in up to `num_processes` processes; a `RunParts`."""

    num_processes: int

    def __call__(self, job: Job, parts: Sequence[Part], folder: Path) -> Iterator[PartResult]:
        """Yield the results as parts end; an error of a part ends all processes."""
        if not parts:
            return
        # Not fork: a tokenizer's threads would not be in the child, but the locks that they hold would.
        context = multiprocessing.get_context("spawn")
        theirs, ours = context.Pipe(duplex=False)
        num_processes = min(self.num_processes, len(parts))
        executor = ProcessPoolExecutor(num_processes, context, initializer=_begin, initargs=(theirs,))
        try:
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


def _begin(parent: Connection) -> None:
    """Prepare a worker: it ends when the parent closes its end of the pipe, or ends itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    threading.Thread(target=_end_with, args=(parent,), name="end-with-parent", daemon=True).start()


def _end_with(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)
