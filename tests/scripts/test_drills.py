"""What a drill finds becomes its result; the drills themselves are the program's to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.drills_lib.drill import Drill, Ended, Found, Skipped, outcome


@pytest.mark.parametrize(
    ("value", "fails"), [(1.0, True), (2.0, False), (3.0, False), (3.1, True), (float("nan"), True)]
)
def test_a_figure_beyond_its_limits_is_a_failure(value: float, fails: bool) -> None:
    found = Found()
    found.figure("wait, s", value, least=2, most=3)
    assert len(found.figures) == 1
    assert bool(found.failures) is fails


def fail(folder: Path, found: Found) -> None:
    found.figure("files", len(list(folder.iterdir())), most=0)
    found.expect(False, "it must hold")


def succeed(folder: Path, found: Found) -> None:
    found.expect(True, "it must hold")


def break_down(folder: Path, found: Found) -> None:
    raise ValueError("not foreseen")


def take_too_long(folder: Path, found: Found) -> None:
    raise Ended("it did not end in time")


def be_left_out(folder: Path, found: Found) -> None:
    raise Skipped("no such program here")


@pytest.mark.parametrize(
    ("run", "result", "failures"),
    [
        (fail, ("failed", ""), ["it must hold"]),
        (succeed, ("passed", ""), []),
        (break_down, ("failed", ""), ["ValueError: not foreseen"]),
        (take_too_long, ("failed", ""), ["it did not end in time"]),
        (be_left_out, ("left out", "no such program here"), []),
    ],
)
def test_whatever_a_drill_does_is_told(
    tmp_path: Path, run: object, result: tuple[str, str], failures: list[str]
) -> None:
    said = dict.fromkeys(("name", "what", "count", "oracle", "rule"), "said")
    Drill(**said, rows=(1,), seconds=1, run=run).perform(tmp_path)
    told, why, found = outcome(tmp_path)
    assert (told, why, found.failures) == (*result, failures)
