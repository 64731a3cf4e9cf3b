"""Open corpora, and plans bound to what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.verify import record
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import FingerprintMismatch, UnknownCorpus, UnreadableCorpus
from corpus_server.plan import Plan
from tests.conftest import ServedCorpus
from tests.corpora import open_descriptors, some_tokens, write_raw
from tests.reference import batch, one_source


@pytest.fixture
def catalog(corpora: dict[str, ServedCorpus]) -> Iterator[Catalog]:
    with Catalog.open(CorpusSpec(name=name, path=corpus.path) for name, corpus in corpora.items()) as opened:
        yield opened


def test_a_bound_plan_gathers_what_the_reference_slices(
    catalog: Catalog, corpora: dict[str, ServedCorpus]
) -> None:
    document = one_source("mixed", 32, 8, seed=3)
    bound = catalog.bind(Plan.from_json(document))
    assert [(name, shard.name) for name, shard in bound.shards] == [
        ("mixed", name) for name in ("0.bin", "1.npy", "2.npy", "3.bin")
    ]
    locations = bound.sampler.locate(17, count=2)
    out = bound.gatherer.gather(locations.reshape(-1, 2), 33, bound.dtype)
    expected = batch(document, corpora["mixed"].shards, 17, count=2)
    assert bound.dtype.name == "uint32"
    assert (out.reshape(2, 8, 33) == expected).all()


def test_binding_fills_in_the_fingerprint_and_keeps_the_one_given(catalog: Catalog) -> None:
    plan = Plan.from_json(one_source("web", 8, 4))
    bound = catalog.bind(plan).plan
    assert bound.fingerprints == {"web": catalog.corpus("web").fingerprint}
    assert catalog.bind(bound).plan.id == bound.id


def test_other_content_is_refused_by_name(catalog: Catalog) -> None:
    other = "sampled-" + "0" * 64
    plan = Plan.from_json(one_source("web", 8, 4, fingerprints={"web": other}))
    with pytest.raises(FingerprintMismatch, match=f"'web' has other content .* says {other}") as caught:
        catalog.bind(plan)
    assert (caught.value.parameter, caught.value.received) == ("fingerprints.web", other)


def test_a_kind_of_fingerprint_that_is_not_known_here_is_told_apart(catalog: Catalog) -> None:
    plan = Plan.from_json(one_source("web", 8, 4, fingerprints={"web": "full-" + "0" * 64}))
    with pytest.raises(FingerprintMismatch, match="knows no 'full' fingerprint") as caught:
        catalog.bind(plan)
    assert "--record" in str(caught.value.remedy)


def test_a_plan_made_before_hashes_were_recorded_still_binds(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", some_tokens(100))
    spec = CorpusSpec(name="a", path=tmp_path / "a.bin")
    plan = Plan.from_json(one_source("a", 8, 4))
    with Catalog.open([spec]) as catalog:
        before = catalog.bind(plan).plan
    record(spec)
    with Catalog.open([spec]) as catalog:
        assert catalog.bind(before).plan.id == before.id
        after = catalog.bind(plan).plan
    assert before.fingerprints["a"].startswith("sampled-")
    assert after.fingerprints["a"].startswith("full-")


def test_an_unknown_corpus_names_those_that_there_are(catalog: Catalog) -> None:
    with pytest.raises(UnknownCorpus, match=r"no corpus 'wbe' .* web, mixed, docs, text, words"):
        catalog.bind(Plan.from_json(one_source("wbe", 8, 4)))


def test_opens_all_or_nothing(corpora: dict[str, ServedCorpus], tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(UnreadableCorpus, match="found nothing"):
        Catalog.open(
            [CorpusSpec(name="web", path=corpora["web"].path), CorpusSpec(name="b", path=tmp_path / "b")]
        )
    assert open_descriptors() == before
