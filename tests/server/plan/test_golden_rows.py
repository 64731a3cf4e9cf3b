"""Version 1 is frozen: ids and rows of every order, mixture, stage, exclusion and skip."""

from __future__ import annotations

import json

import pytest

from corpus_server.plan import Sampler
from tests.server.plan import golden

TABLE = json.loads(golden.TABLE.read_text())


@pytest.mark.parametrize("name", TABLE)
def test_a_plan_of_version_1_has_these_rows(name: str) -> None:
    case = TABLE[name]
    sampler = Sampler(golden.bound(case["plan"]), case["shard_tokens"])
    assert sampler.plan.id == case["id"]
    assert [golden.rows(sampler, each["step"]) for each in case["rows"]] == case["rows"]


def test_the_table_is_what_its_generator_makes() -> None:
    assert golden.table() == TABLE


def test_the_generator_refuses_to_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "table", lambda: {**TABLE, "random, vast, seed 0": {}})
    before = golden.TABLE.read_bytes()
    with pytest.raises(SystemExit, match="random, vast, seed 0"):
        golden.main()
    assert golden.TABLE.read_bytes() == before
