"""docs/reliability.md names tests, phases and drills that exist, and every row has a test."""

from __future__ import annotations

import re

from scripts.drills_lib.drill import all_drills
from scripts.soak_lib.phases import PHASES
from tests.serving import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.*) \|$", PAGE, re.MULTILINE)
DRILLS = all_drills()


def test_every_row_of_the_catalogue_is_there_with_tests_that_exist() -> None:
    numbers = [int(number) for number, *_ in ROWS]
    assert numbers[:43] == list(range(1, 44))
    assert numbers == sorted(set(numbers))
    for number, _, tests, _ in ROWS:
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert len(named) == tests.count("`") // 2 >= 1, f"row {number}: {tests}"
        for path, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
                path,
                name,
            )


def test_every_phase_and_drill_exists_and_is_named_where_it_says_so() -> None:
    named = {(name, int(number)) for number, *_, names in ROWS for name in re.findall(r"`(\w+)`", names)}
    assert {name for name, _ in named} - DRILLS.keys() == {phase.__name__ for _, phase in PHASES}
    drills = {(name, row) for name, row in named if name in DRILLS}
    assert drills == {(drill.name, row) for drill in DRILLS.values() for row in drill.rows}


def test_drills_say_what_they_are_in_a_line_each() -> None:
    for drill in DRILLS.values():
        for said in (drill.what, drill.count, drill.oracle, drill.rule):
            assert 0 < len(said) < 110, drill.name
        assert drill.what.endswith(".")
    assert sum(drill.seconds for drill in DRILLS.values()) < 3600
    assert any(drill.is_quick for drill in DRILLS.values())


def test_files_that_the_page_names_exist() -> None:
    for path in re.findall(r"^\| `([\w/.]+)` \|", PAGE, re.MULTILINE):
        assert (ROOT / path).is_file(), path
