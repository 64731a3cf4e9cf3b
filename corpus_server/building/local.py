"""Run parts in processes on this machine.

Each worker gets one part at a time over a pipe of its own. When the parent ends, for whatever reason, its
workers end at once; a worker that is killed ends the build.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from corpus_server.building.job import BuildOptions, Job, Part
from corpus_server.building.part import PartResult, build_part
from corpus_server.errors import CorpusServerError, ReadFailed

_END_SECONDS = 5


@dataclass(frozen=True)
class LocalProcesses:
    """Runs parts in up to `num_processes` processes; a `RunParts`."""

    num_processes: int

    def __call__(self, job: Job, parts: Sequence[Part], folder: Path) -> Iterator[PartResult]:
        """Yield the results as parts end; an error of a part ends all processes."""
        # Not fork: a tokenizer's threads would not be in the child, but the locks that they hold would.
        context = multiprocessing.get_context("spawn")
        waiting = iter(parts)
        workers: dict[Connection, BaseProcess] = {}
        with ExitStack() as stack:
            for number, part in zip(range(self.num_processes), waiting, strict=False):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work,
                    args=(theirs, job.options, folder),
                    name=f"corpus-build-{number}",
                    daemon=True,
                )
                try:
                    process.start()
                except ConnectionError:  # it was killed before it had read what to run
                    raise _ended(process, "while it started") from None
                stack.callback(_end, process, ours)
                theirs.close()  # the worker has the only one now, so its end is the end of the pipe
                _send(ours, part)
                workers[ours] = process
            while workers:
                for ready in wait(list(workers)):
                    assert isinstance(ready, Connection)
                    yield _receive(ready, workers[ready])
                    if following := next(waiting, None):
                        _send(ready, following)
                    else:
                        del workers[ready]
                        ready.close()


def _send(connection: Connection, part: Part) -> None:
    # A worker that is dead is found, and named, by who waits for its result.
    with suppress(ConnectionError):
        connection.send(part)


def _receive(connection: Connection, worker: BaseProcess) -> PartResult:
    try:
        outcome = connection.recv()
    except (EOFError, ConnectionError):
        worker.join(_END_SECONDS)
        raise _ended(worker, f"with exit code {worker.exitcode} while it built a part") from None
    if isinstance(outcome, PartResult):
        return outcome
    raise outcome


def _ended(worker: BaseProcess, how: str) -> ReadFailed:
    remedy = "if it was killed for want of memory, use fewer --processes; the same command continues"
    return ReadFailed(f"process {worker.name} ended {how}", remedy=remedy)


def _end(worker: BaseProcess, connection: Connection) -> None:
    connection.close()
    worker.kill()  # it may be in the middle of a part, of which only complete files count
    worker.join(_END_SECONDS)


def _work(connection: Connection, options: BuildOptions, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    # As many processes as cores run already; read when the library is first imported.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(EOFError, ConnectionError):
        while True:
            part = connection.recv()
            try:
                outcome: PartResult | Exception = build_part(options, part, folder)
            except (CorpusServerError, OSError) as error:
                outcome = error
            connection.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
