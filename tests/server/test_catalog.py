"""Open corpora, and plans bound to what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.verify import record
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import FingerprintMismatch, UnreadableCorpus
from corpus_server.plan import Plan
from corpus_server.work import Budget
from tests.conftest import ServedCorpus
from tests.corpora import open_files, some_tokens, write_raw
from tests.reference import one_source


@pytest.fixture
def catalog(corpora: dict[str, ServedCorpus]) -> Iterator[Catalog]:
    with Catalog.open(CorpusSpec(name=name, path=corpus.path) for name, corpus in corpora.items()) as opened:
        yield opened


def test_binding_fills_in_the_fingerprint_and_keeps_the_one_given(catalog: Catalog) -> None:
    plan = Plan.from_json(one_source("web", 8, 4))
    bound = catalog.bind(plan, Budget()).plan
    assert bound.fingerprints == {"web": catalog.corpus("web").fingerprint}
    assert catalog.bind(bound, Budget()).plan.id == bound.id


def test_a_kind_of_fingerprint_that_is_not_known_here_is_told_apart(catalog: Catalog) -> None:
    plan = Plan.from_json(one_source("web", 8, 4, fingerprints={"web": "full-" + "0" * 64}))
    with pytest.raises(FingerprintMismatch, match="knows no 'full' fingerprint") as caught:
        catalog.bind(plan, Budget())
    assert "--record" in str(caught.value.remedy)


def test_a_plan_made_before_hashes_were_recorded_still_binds(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", some_tokens(100))
    spec = CorpusSpec(name="a", path=tmp_path / "a.bin")
    plan = Plan.from_json(one_source("a", 8, 4))
    with Catalog.open([spec]) as catalog:
        before = catalog.bind(plan, Budget()).plan
    record(spec)
    with Catalog.open([spec]) as catalog:
        assert catalog.bind(before, Budget()).plan.id == before.id
        after = catalog.bind(plan, Budget()).plan
    assert before.fingerprints["a"].startswith("sampled-")
    assert after.fingerprints["a"].startswith("full-")


def test_opens_all_or_nothing(corpora: dict[str, ServedCorpus], tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(UnreadableCorpus, match="found nothing"):
        Catalog.open(
            [CorpusSpec(name="web", path=corpora["web"].path), CorpusSpec(name="b", path=tmp_path / "b")]
        )
    assert not open_files() - before
