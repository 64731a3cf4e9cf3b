"""Work in other processes: what it returns and raises, and that none outlives the one that waits for it.

What is left of a table whose builder is killed is tested in `test_packed_tables`.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from corpus_server.errors import InvalidPlan, ReadFailed
from corpus_server.read.apart import map_in_copies, run_apart
from corpus_server.work import Budget

NUM_CALLS = 9


def square(number: int, base: int) -> tuple[int, int]:
    return os.getpid(), base + number * number


def squares() -> list[tuple[int, int]]:
    return [*map_in_copies(square, range(NUM_CALLS), [100] * NUM_CALLS)]


def fail(number: int, *, at: int, pids: Path, killed: bool) -> None:
    """Fail in one call; the first one of another process never ends."""
    if number == at:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise InvalidPlan(f"call {number}")
    if number > at:
        (pids / str(os.getpid())).touch()
        time.sleep(1000)


def failing(at: int, pids: Path, killed: bool) -> None:
    map_in_copies(partial(fail, at=at, pids=pids, killed=killed), range(NUM_CALLS))


def test_copies_share_the_calls_and_the_results_are_in_order() -> None:
    pids, found = zip(*run_apart("no squares", Budget(), squares), strict=True)
    assert found == tuple(100 + number * number for number in range(NUM_CALLS))
    assert len(set(pids)) >= 2
    assert os.getpid() not in pids
    assert not any(map(psutil.pid_exists, pids))


def nothing() -> list[None]:
    return [*map_in_copies(square, [], [])]


def test_without_a_call_nothing_is_returned() -> None:
    assert run_apart("nothing", Budget(), nothing) == []


@pytest.mark.parametrize(
    ("at", "killed", "error", "message"),
    [
        pytest.param(0, False, InvalidPlan, "call 0", id="its own call"),
        pytest.param(NUM_CALLS - 1, False, InvalidPlan, f"call {NUM_CALLS - 1}", id="a copy's call"),
        pytest.param(
            NUM_CALLS - 1, True, ReadFailed, "shared the work did not end well", id="a copy is killed"
        ),
    ],
)
def test_an_error_ends_all_copies(
    tmp_path: Path, at: int, killed: bool, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_apart("it failed", Budget(), failing, at, tmp_path, killed)
    assert not any(psutil.pid_exists(int(each.name)) for each in tmp_path.iterdir())
