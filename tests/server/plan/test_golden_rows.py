"""Every version is frozen: ids and rows of every order, mixture, stage, exclusion and skip."""

from __future__ import annotations

import json

import pytest

from tests.server.plan import golden

TABLES = {version: json.loads(path.read_text()) for version, path in golden.TABLES.items()}


@pytest.mark.parametrize("version", TABLES)
def test_the_plans_of_a_version_have_these_rows(version: int) -> None:
    """Plan, id and rows of each case, and no case more or less: the table is what its generator makes."""
    kept, made = TABLES[version], golden.table(version)
    assert {case["plan"]["version"] for case in made.values()} == {version}
    assert made.keys() == kept.keys()
    assert {name: made[name] for name in kept if made[name] != kept[name]} == {}


def test_the_generator_refuses_to_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "table", lambda version: {**TABLES[version], "random, vast, seed 0": {}})
    before = golden.TABLES[1].read_bytes()
    with pytest.raises(SystemExit, match="random, vast, seed 0"):
        golden.main()
    assert golden.TABLES[1].read_bytes() == before
