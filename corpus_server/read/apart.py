"""Work in a process of its own: what would let no other thread run for seconds, or take memory for ever.

`json.loads` of a plan of 14 MB, and the checks of a million ranges, take 0.8 s, in which no other thread of a
process can run. What comes back has its ranges as arrays and its canonical JSON, and takes some milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from typing import NoReturn, TypeVar

from corpus_server.errors import CorpusServerError, ReadFailed
from corpus_server.plan import Plan
from corpus_server.plan.chain import Link, parse_document
from corpus_server.plan.draft import Draft
from corpus_server.work import Budget

T = TypeVar("T")

MAX_SECONDS = 60
"""A document of 32 MiB, the largest, takes 3 s on a free core; a loaded machine may have none."""

MAX_MEMORY_BYTES = 4 * 2**30
"""Address space. Parsed JSON takes up to 30 times the bytes of its text."""

_REMEDY = "see the server's log; -9 means that the machine has too little memory"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def parse_apart(
    document: bytes | bytearray | str, fingerprints: Mapping[str, str], budget: Budget
) -> Plan | Link | Draft:
    """Return the plan of a document, its draft, or what continues one, as `parse_document` does.

    Args:
        fingerprints: by corpus; the plan is bound to those of its corpora that it does not name itself.

    Raises:
        InvalidPlan: see `parse_document`.
        ReadFailed: the process did not end well.
    """
    asked = document if isinstance(document, str) else bytes(document)
    return run_apart(
        "the plan could not be parsed", budget, _parse, asked, dict(fingerprints), is_bounded=True
    )


def run_apart(
    failed: str, budget: Budget, work: Callable[..., T], *arguments: object, is_bounded: bool = False
) -> T:
    """Return what a function returns in another process, or raise the CorpusServerError that it raises.

    If this process ends meanwhile, or nobody waits any more, the other one is killed.

    Args:
        failed: what a ReadFailed says if the process does not end well.
        budget: of who waits.
        work: a function of a module.
        is_bounded: whether `MAX_SECONDS` and `MAX_MEMORY_BYTES` hold.
    """
    with (
        os.fdopen(os.memfd_create("arguments"), "w+b") as given,
        os.fdopen(os.memfd_create("result"), "w+b") as found,
    ):
        pickle.dump((os.getpid(), is_bounded, work, arguments), given)
        given.seek(0)
        command = [sys.executable, "-P", "-m", __name__]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        most = MAX_SECONDS if is_bounded else None
        try:
            with subprocess.Popen(command, stdin=given, stdout=found, env=environment) as process:
                budget.when_over(lambda _: process.kill())
                try:
                    process.wait(most)
                except subprocess.TimeoutExpired as error:
                    why = str(error)
                    process.kill()
                else:
                    why = f"exit code {process.returncode}" if process.returncode else ""
        except OSError as error:
            why = str(error)
        budget.spend()
        if why:
            raise ReadFailed(f"{failed}: {why}", remedy=_REMEDY)
        found.seek(0)
        result: T | CorpusServerError = pickle.load(found)
    if isinstance(result, CorpusServerError):
        raise result
    return result


def map_in_copies(work: Callable[..., T], *arguments: Iterable[object]) -> Sequence[T]:
    """Return what `map` does, with the calls shared between this process and copies of it.

    For a process of one thread, as `run_apart` starts one: a copy has the locks of other threads, but not the
    threads. Copies are killed when this process ends, whatever ends it.

    Raises:
        Exception: what a call raises.
        ReadFailed: a copy did not end well.
    """
    calls = list(zip(*arguments, strict=True))
    # Half of the cores: a server answers requests meanwhile.
    number = max(1, min(len(calls), max(2, len(os.sched_getaffinity(0)) // 2)))
    own, *others = (
        calls[low:high] for low, high in pairwise(len(calls) * n // number for n in range(number + 1))
    )
    with ExitStack() as stack:
        copies = [stack.enter_context(_copy(work, theirs)) for theirs in others]
        found = [work(*call) for call in own]
        return [*found, *chain.from_iterable(results() for results in copies)]


@contextmanager
def _copy(work: Callable[..., T], calls: Sequence[tuple[object, ...]]) -> Iterator[Callable[[], list[T]]]:
    """Start a copy of this process for some calls; yield what waits for their results."""
    parent = os.getpid()
    with os.fdopen(os.memfd_create("results"), "w+b") as file:
        if not (pid := os.fork()):
            _work_as_copy(parent, work, calls, file.fileno())

        def results() -> list[T]:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if ended is None or ended.si_status:
                raise ReadFailed("a process that shared the work did not end well", remedy=_REMEDY)
            file.seek(0)
            found: list[T] = []
            for _ in calls:
                result = pickle.load(file)
                if isinstance(result, Exception):
                    raise result
                found.append(result)
            return found

        try:
            yield results
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work_as_copy(
    parent: int, work: Callable[..., object], calls: Sequence[tuple[object, ...]], results: int
) -> NoReturn:
    """Write the results of calls to a descriptor, up to the first error, and end."""
    status = 1
    try:
        _end_with(parent)
        with open(results, "wb", closefd=False) as file:
            for call in calls:
                try:
                    found: object = work(*call)
                except Exception as error:  # noqa: BLE001 - raised in the parent
                    found = error
                pickle.dump(found, file, pickle.HIGHEST_PROTOCOL)
                if isinstance(found, Exception):
                    break
        status = 0
    finally:
        os._exit(status)  # not what the parent's functions would do at their end


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when the thread of its parent ends that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def main() -> None:
    """Do the work on standard input; write its result, or its error, to standard output."""
    parent, is_bounded, work, arguments = pickle.load(sys.stdin.buffer)
    _end_with(parent)
    if is_bounded:  # it cannot take the machine's memory
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        result = work(*arguments)
    except CorpusServerError as error:
        result = error
    pickle.dump(result, sys.stdout.buffer)


def _parse(document: bytes | str, fingerprints: Mapping[str, str]) -> Plan | Link | Draft:
    """Return the plan with its fingerprints and its id, if all its corpora are known."""
    plan = parse_document(document)
    if not isinstance(plan, Plan):
        return plan
    found = {name: plan.fingerprints.get(name, fingerprints.get(name)) for name in plan.sources}
    known = {name: each for name, each in found.items() if each is not None}
    if len(known) == len(found):
        plan = plan.bind(known)
        _ = plan.id  # kept by the plan, as is the canonical JSON
    return plan


if __name__ == "__main__":
    main()
