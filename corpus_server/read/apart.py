"""Work in a process of its own: what would let no other thread run for seconds, or take memory for ever.

`json.loads` of a plan of 14 MB, and the checks of a million ranges, take 0.8 s, in which no other thread of a
process can run. What comes back has its ranges as arrays and its canonical JSON, and takes some milliseconds.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from corpus_server.errors import CorpusServerError, ReadFailed
from corpus_server.plan import Plan
from corpus_server.plan.chain import Link, parse_document

T = TypeVar("T")

MAX_SECONDS = 60
"""A document of 32 MiB, the largest, takes 3 s on a free core; a loaded machine may have none."""

MAX_MEMORY_BYTES = 4 * 2**30
"""Address space. Parsed JSON takes up to 30 times the bytes of its text."""


def parse_apart(document: bytes | bytearray | str, fingerprints: Mapping[str, str]) -> Plan | Link:
    """Return the plan of a document or what continues one, as `parse_document` does.

    Args:
        fingerprints: by corpus; the plan is bound to those of its corpora that it does not name itself.

    Raises:
        InvalidPlan: see `parse_document`.
        ReadFailed: the process did not end well.
    """
    asked = document if isinstance(document, str) else bytes(document)
    return run_apart("the plan could not be parsed", _parse, asked, dict(fingerprints), is_bounded=True)


def run_apart(failed: str, work: Callable[..., T], *arguments: object, is_bounded: bool = False) -> T:
    """Return what a function returns in another process, or raise the CorpusServerError that it raises.

    Args:
        failed: what a ReadFailed says if the process does not end well.
        work: a function of a module.
        is_bounded: whether `MAX_SECONDS` and `MAX_MEMORY_BYTES` hold.
    """
    with (
        os.fdopen(os.memfd_create("arguments"), "w+b") as given,
        os.fdopen(os.memfd_create("result"), "w+b") as found,
    ):
        pickle.dump((is_bounded, work, arguments), given)
        given.seek(0)
        command = [sys.executable, "-P", "-m", __name__]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        most = MAX_SECONDS if is_bounded else None
        try:
            ended = subprocess.run(
                command, stdin=given, stdout=found, env=environment, timeout=most, check=False
            )
            why = f"exit code {ended.returncode}" if ended.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            remedy = "see the server's log; -9 means that the machine has too little memory"
            raise ReadFailed(f"{failed}: {why}", remedy=remedy)
        found.seek(0)
        result: T | CorpusServerError = pickle.load(found)
    if isinstance(result, CorpusServerError):
        raise result
    return result


def main() -> None:
    """Do the work on standard input; write its result, or its error, to standard output."""
    is_bounded, work, arguments = pickle.load(sys.stdin.buffer)
    if is_bounded:  # it cannot outlive its parent for long, nor take the machine's memory
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        result = work(*arguments)
    except CorpusServerError as error:
        result = error
    pickle.dump(result, sys.stdout.buffer)


def _parse(document: bytes | str, fingerprints: Mapping[str, str]) -> Plan | Link:
    """Return the plan with its fingerprints and its id, if all its corpora are known."""
    plan = parse_document(document)
    if isinstance(plan, Link):
        return plan
    found = {name: plan.fingerprints.get(name, fingerprints.get(name)) for name in plan.sources}
    known = {name: each for name, each in found.items() if each is not None}
    if len(known) == len(found):
        plan = plan.bind(known)
        _ = plan.id  # kept by the plan, as is the canonical JSON
    return plan


if __name__ == "__main__":
    main()
