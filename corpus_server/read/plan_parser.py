"""Large plan documents are parsed in a process of their own: `python -m corpus_server.read.plan_parser`.

`json.loads` of 14 MB, and the checks of a million ranges, take 0.8 s, in which no other thread of a process
can run. What comes back has its ranges as arrays and its canonical JSON, and takes some milliseconds.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Mapping

from corpus_server.errors import CorpusServerError, ReadFailed
from corpus_server.plan import Plan

MAX_SECONDS = 60.0
"""A document of 32 MiB, the largest, takes 3 s on a free core; a loaded machine may have none."""

MAX_MEMORY_BYTES = 4 * 2**30
"""Address space. Parsed JSON takes up to 30 times the bytes of its text."""


def parse_apart(document: bytes | bytearray | str, fingerprints: Mapping[str, str]) -> Plan:
    """Return the plan of a document, as `Plan.parse` does.

    Args:
        fingerprints: by corpus; the plan is bound to those of its corpora that it does not name itself.

    Raises:
        InvalidPlan: see `Plan.parse`.
        ReadFailed: the process did not end well.
    """
    asked = document.encode() if isinstance(document, str) else bytes(document)
    with (
        os.fdopen(os.memfd_create("document"), "w+b") as given,
        os.fdopen(os.memfd_create("plan"), "w+b") as found,
    ):
        pickle.dump((asked, dict(fingerprints)), given)
        given.seek(0)
        command = [sys.executable, "-P", "-m", __name__]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        try:
            code = subprocess.run(
                command, stdin=given, stdout=found, env=environment, timeout=MAX_SECONDS, check=False
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(str(error)) from error
        if code:
            raise _failed(f"exit code {code}")
        found.seek(0)
        plan = pickle.load(found)
    if isinstance(plan, CorpusServerError):
        raise plan
    assert isinstance(plan, Plan)
    return plan


def main() -> None:
    """Parse the document on standard input; write the plan, or the error, to standard output."""
    # It cannot outlive its parent for long, nor take the machine's memory.
    resource.setrlimit(resource.RLIMIT_CPU, (int(MAX_SECONDS), int(MAX_SECONDS)))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    document, fingerprints = pickle.load(sys.stdin.buffer)
    answer: Plan | CorpusServerError
    try:
        answer = _bound(Plan.parse(document), fingerprints)
    except CorpusServerError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


def _bound(plan: Plan, fingerprints: Mapping[str, str]) -> Plan:
    """Return the plan with its fingerprints and its id, if all its corpora are known."""
    found = {name: plan.fingerprints.get(name, fingerprints.get(name)) for name in plan.sources}
    known = {name: each for name, each in found.items() if each is not None}
    if len(known) == len(found):
        plan = plan.bind(known)
        _ = plan.id  # kept by the plan, as is the canonical JSON
    return plan


def _failed(why: str) -> ReadFailed:
    return ReadFailed(
        f"the plan could not be parsed: {why}",
        remedy="see the server's log; the machine may have too little memory",
    )


if __name__ == "__main__":
    main()
