"""Every version is frozen: ids and rows of every order, mixture, stage, exclusion and skip."""

from __future__ import annotations

import json

import pytest

from tests.server.plan import golden

TABLES = {version: json.loads(path.read_text()) for version, path in golden.TABLES.items()}


@pytest.mark.parametrize(
    ("version", "name"), [(version, name) for version, table in TABLES.items() for name in table]
)
def test_a_plan_of_a_version_has_these_rows(version: int, name: str) -> None:
    case = TABLES[version][name]
    assert case["plan"]["version"] == version
    sampler = golden.sampler_of(case)
    assert sampler.plan.id == case["id"]
    assert [golden.rows(sampler, each["step"]) for each in case["rows"]] == case["rows"]


@pytest.mark.parametrize("version", TABLES)
def test_the_table_is_what_its_generator_makes(version: int) -> None:
    assert golden.table(version) == TABLES[version]


def test_the_generator_refuses_to_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "table", lambda version: {**TABLES[version], "random, vast, seed 0": {}})
    before = golden.TABLES[1].read_bytes()
    with pytest.raises(SystemExit, match="random, vast, seed 0"):
        golden.main()
    assert golden.TABLES[1].read_bytes() == before
