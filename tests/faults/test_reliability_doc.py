"""docs/reliability.md names tests and phases that exist, and every row has a test."""

from __future__ import annotations

import re

from scripts.soak_lib.phases import PHASES
from tests.serving import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.*) \|$", PAGE, re.MULTILINE)


def test_every_row_of_the_catalogue_is_there_with_tests_that_exist() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 44))
    for number, _, tests, _ in ROWS:
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert len(named) == tests.count("`") // 2 >= 1, f"row {number}: {tests}"
        for path, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
                path,
                name,
            )


def test_every_phase_exists_and_is_named() -> None:
    named = {phase for *_, phases in ROWS for phase in re.findall(r"`(\w+)`", phases)}
    assert named == {phase.__name__ for _, phase in PHASES}


def test_files_that_the_page_names_exist() -> None:
    for path in re.findall(r"^\| `([\w/.]+)` \|", PAGE, re.MULTILINE):
        assert (ROOT / path).is_file(), path
