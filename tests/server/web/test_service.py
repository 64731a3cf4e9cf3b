"""What a process keeps of the plans it was asked about."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from corpus_server.catalog import BoundPlan, Catalog
from corpus_server.plan import Plan
from corpus_server.settings import CorpusSpec
from corpus_server.web import service
from tests.corpora import some_tokens, write_raw
from tests.reference import one_source


def test_large_plans_are_forgotten_first_come_first_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(1000))
    cache: OrderedDict[int, BoundPlan] = OrderedDict()
    with Catalog.open([CorpusSpec(name="web", path=path, dtype="uint16")]) as catalog:
        plans = [catalog.bind(Plan.from_json(one_source("web", 8, 4, seed=seed))) for seed in range(4)]
        size = len(plans[0].plan.canonical_json())
        monkeypatch.setattr(service, "_MAX_BOUND_BYTES", 2 * size)
        for number, bound in enumerate(plans):
            service._remember(cache, number, bound)
        assert list(cache) == [2, 3]
        monkeypatch.setattr(service, "_MAX_BOUND_BYTES", 1)
        service._remember(cache, 9, plans[0])
        assert list(cache) == [9]
