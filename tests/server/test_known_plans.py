"""Plans in memory and on disk: found by id and by spelling, bounded, each bound once."""

from __future__ import annotations

import json
import random
import sqlite3
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.admission.request import ANYONE, Caller
from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import Forbidden, InvalidParameter, InvalidPlan, UnknownCorpus, UnknownPlan
from corpus_server.known_plans import LARGE_BYTES, KnownPlans
from corpus_server.plan import BoundedShuffle, Plan
from corpus_server.plan.chain import Link
from corpus_server.plan_store import PlanStore
from corpus_server.read import reading
from corpus_server.read.apart import parse_apart
from corpus_server.work import Budget, ClientLeft, Jobs
from tests.corpora import some_tokens, write_raw
from tests.reference import one_source

ONE = {"corpus": "web", "seq_len": 8, "batch_size": 4}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    write_raw(tmp_path / "web.bin", some_tokens(5000))
    with Catalog.open([CorpusSpec(name="web", path=tmp_path / "web.bin")]) as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PlanStore]:
    with PlanStore(tmp_path / "state") as opened:
        yield opened


@pytest.fixture
def known(catalog: Catalog, store: PlanStore) -> KnownPlans:
    return KnownPlans(catalog, store)


def test_the_files_of_a_posted_plan_are_looked_at_by_its_request(known: KnownPlans) -> None:
    """A corpus may have 100,000: nobody waits for those of a client that left."""
    with pytest.raises(ClientLeft):
        known.keep_document(document(0), ANYONE, Budget(has_left=lambda: True))


def document(seed: int, num_ranges: int = 0) -> bytes:
    skip_steps = [[2 * k, 2 * k + 1] for k in range(num_ranges)]
    return json.dumps(one_source("web", 8, 4, seed=seed, skip_steps=skip_steps)).encode()


def test_a_posted_plan_is_in_memory_and_on_disk(
    known: KnownPlans, catalog: Catalog, store: PlanStore
) -> None:
    bound = known.keep_document(document(3), ANYONE, Budget())[0]
    assert known.in_memory(bound.plan.id) is known.by_id(bound.plan.id, ANYONE, Budget()) is bound
    assert known.keep_document(document(3), ANYONE, Budget())[0] is bound
    later = KnownPlans(catalog, store)
    assert later.in_memory(bound.plan.id) is None
    assert later.by_id(bound.plan.id, ANYONE, Budget()).plan == bound.plan
    assert later.in_memory(bound.plan.id) is not None


@pytest.mark.parametrize(
    "damage", ["replace(document, '\"seed\":3', '\"seed\":4')", "'{}'", "CAST(x'ff' AS TEXT)"]
)
def test_a_damaged_document_is_not_believed_and_posted_again(
    catalog: Catalog, store: PlanStore, tmp_path: Path, damage: str
) -> None:
    """Else a digit that changed on the disk would give the rows of another plan."""
    plan_id = KnownPlans(catalog, store).keep_document(document(3), ANYONE, Budget())[0].plan.id
    with sqlite3.connect(tmp_path / "state" / "plans.sqlite") as database:
        database.execute(f"UPDATE plans SET document = {damage}")
    database.close()
    assert store.listed(9) == []
    with pytest.raises(UnknownPlan):
        store.find(plan_id)
    later = KnownPlans(catalog, store)
    with pytest.raises(UnknownPlan):
        later.by_id(plan_id, ANYONE, Budget())
    assert later.keep_document(document(3), ANYONE, Budget())[0].plan.id == plan_id
    assert KnownPlans(catalog, store).by_id(plan_id, ANYONE, Budget()).plan.seed == 3


def test_what_is_no_plan_is_refused_and_not_kept(known: KnownPlans, store: PlanStore) -> None:
    for body, error in (
        (b"{}", InvalidPlan),
        (json.dumps(one_source("other", 8, 4)).encode(), UnknownCorpus),
        (json.dumps(one_source("web", 10_000, 4)).encode(), InvalidPlan),
    ):
        with pytest.raises(error):
            known.keep_document(body, ANYONE, Budget())[0]
    assert store.count() == 0


def test_a_spelled_plan_has_an_id_that_memory_knows_and_the_disk_does_not(
    known: KnownPlans, store: PlanStore
) -> None:
    bound = known.spelled({**ONE, "seed": 7}, ANYONE, Budget())
    assert known.spelled({**ONE, "seed": 7}, ANYONE, Budget()) is bound
    assert known.spelled({**ONE, "seed": 7, "order": "shuffle", "stride": 8}, ANYONE, Budget()) is bound
    assert known.by_id(bound.plan.id, ANYONE, Budget()) is bound
    assert bound.plan == known.keep_document(document(7), ANYONE, Budget())[0].plan
    assert known.spelled(ONE, ANYONE, Budget()).plan.seed == 0
    assert store.count() == 1


def test_a_bounded_shuffle_is_spelled_with_both_its_numbers(known: KnownPlans) -> None:
    bounded = {**ONE, "block_windows": 4, "group_blocks": 2}
    assert known.spelled(bounded, ANYONE, Budget()).plan.order == BoundedShuffle(
        block_windows=4, group_blocks=2
    )
    assert known.spelled({**bounded, "order": "shuffle"}, ANYONE, Budget()) is not known.spelled(
        ONE, ANYONE, Budget()
    )
    wrong = [{**ONE, "block_windows": 4}, {**ONE, "group_blocks": 2}, {**bounded, "order": "sequential"}]
    for spelling in wrong:
        with pytest.raises(InvalidParameter, match="must be given together, with order shuffle"):
            known.spelled(spelling, ANYONE, Budget())


def test_memory_holds_the_plans_used_last(catalog: Catalog, store: PlanStore) -> None:
    known = KnownPlans(catalog, store, max_plans=3)
    ids = [known.keep_document(document(seed), ANYONE, Budget())[0].plan.id for seed in range(3)]
    known.by_id(ids[0], ANYONE, Budget())
    ids += [known.spelled({**ONE, "seed": seed}, ANYONE, Budget()).plan.id for seed in range(3, 5)]
    assert [known.in_memory(each) is not None for each in ids] == [True, False, False, True, True]
    assert known.by_id(ids[1], ANYONE, Budget()).plan.seed == 1  # from the store
    known.keep_document(document(9), ANYONE, Budget())[0]
    known.keep_document(document(10), ANYONE, Budget())[0]
    known.keep_document(document(11), ANYONE, Budget())[0]
    with pytest.raises(UnknownPlan):  # spelled only
        known.by_id(ids[3], ANYONE, Budget())
    assert known.spelled({**ONE, "seed": 3}, ANYONE, Budget()).plan.id == ids[3]


def test_plans_that_push_each_other_out_of_memory_give_their_own_rows(
    catalog: Catalog, store: PlanStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that change all the time ask for more plans, and blocks of rows, than are kept."""
    monkeypatch.setattr(reading, "MAX_BLOCKS", 4)
    known = KnownPlans(catalog, store, max_plans=3)
    spelled: list[dict[str, Any]] = [{**ONE, "seed": seed, "order": "shuffle"} for seed in range(8)]
    plans = [catalog.bind(Plan.spelled(each), Budget()) for each in spelled]
    right = [
        [plan.gatherer.select(plan.pieces(step, range(4)), plan.dtype).read(slice(4)) for step in range(60)]
        for plan in plans
    ]

    def ask(thread: int) -> None:
        draw = random.Random(thread)
        for _ in range(400):
            number, step = draw.randrange(8), draw.randrange(60)
            plan = known.spelled(spelled[number], ANYONE, Budget())
            rows = reading.WindowReading(plan, Budget(), step=step, count=1, rank=0, rows=4).read(0, 4)
            assert np.array_equal(rows, right[number][step]), (number, step)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(4))) == [None] * 4
    finally:
        sys.setswitchinterval(interval)


def test_memory_is_bounded_in_bytes_too(catalog: Catalog, store: PlanStore) -> None:
    """Arrays and text count; the plan used last stays however large it is."""
    size = KnownPlans(catalog, store).keep_document(document(1, 1000), ANYONE, Budget())[0].num_bytes
    assert 1000 * 32 < size < 1000 * 60
    known = KnownPlans(catalog, store, max_bytes=3 * size + 1000)
    ids = [known.keep_document(document(seed, 1000), ANYONE, Budget())[0].plan.id for seed in range(5)]
    assert [known.in_memory(each) is not None for each in ids] == [False, False, True, True, True]
    large = known.keep_document(document(1, 10_000), ANYONE, Budget())[0].plan.id
    assert known.in_memory(large) is not None
    assert all(known.in_memory(each) is None for each in ids)
    known.keep_document(document(0, 1000), ANYONE, Budget())[0]
    assert known.in_memory(large) is None


def test_the_shards_of_plans_count_once_and_are_shared(tmp_path: Path, store: PlanStore) -> None:
    """Plans over one corpus of many shards differ by their seeds alone: each takes a few kB more."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(400):
        write_raw(folder / f"{number}.bin", some_tokens(20))
    with Catalog.open([CorpusSpec(name="web", path=folder)]) as catalog:
        known = KnownPlans(catalog, store)
        first = known.spelled(ONE, ANYONE, Budget())
        tracemalloc.start()
        try:
            others = [known.spelled({**ONE, "seed": seed}, ANYONE, Budget()) for seed in range(1, 51)]
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken < sum(each.num_bytes for each in others) < 50 * 20_000
        shared = sum(each.num_bytes for each in first.shared)
        assert shared > 400 * 128
        longer = {**ONE, "seq_len": 9}
        small = KnownPlans(catalog, store, max_bytes=shared + 3 * first.num_bytes)
        ids = [small.spelled(each, ANYONE, Budget()).plan.id for each in (ONE, {**ONE, "seed": 1}, longer)]
        assert [small.in_memory(each) is not None for each in ids] == [False, True, True]


@pytest.mark.parametrize("way", ["id", "spelled", "posted"])
def test_who_may_not_read_a_corpus_learns_nothing_of_it(
    catalog: Catalog, store: PlanStore, tmp_path: Path, way: str
) -> None:
    """Not its fingerprint either, which the refusal of a plan that does not fit would tell."""
    stranger = Caller(name="stranger", scopes=("read:other",))
    known = KnownPlans(catalog, store)
    if way == "spelled":
        ask = partial(known.spelled, {**ONE, "seq_len": 10_000}, stranger)
    elif way == "posted":
        fingerprinted = {**one_source("web", 8, 4), "fingerprints": {"web": "sampled-0"}}
        ask = partial(known.keep_document, json.dumps(fingerprinted).encode(), stranger)
    else:
        kept = known.keep_document(document(3), ANYONE, Budget())[0].plan
        write_raw(tmp_path / "changed.bin", some_tokens(4000))
        changed = Catalog.open([CorpusSpec(name="web", path=tmp_path / "changed.bin")])
        ask = partial(KnownPlans(changed, store).by_id, kept.id, stranger)
    with pytest.raises(Forbidden) as caught:
        ask(Budget())
    assert "fingerprint" not in caught.value.detail


def test_a_large_plan_is_bound_once_and_one_at_a_time(
    catalog: Catalog, store: PlanStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small plans do not wait for large ones."""
    bodies = [document(seed, 120_000) for seed in range(2)]
    assert min(map(len, bodies)) > LARGE_BYTES
    ids = [KnownPlans(catalog, store).keep_document(body, ANYONE, Budget())[0].plan.id for body in bodies]
    parsing, most, num_parsed, entered, go_on = 0, 0, 0, threading.Event(), threading.Event()
    count = threading.Lock()

    def parse(document: str, fingerprints: Mapping[str, str], budget: Budget) -> Plan | Link:
        nonlocal parsing, most, num_parsed
        with count:
            parsing, num_parsed = parsing + 1, num_parsed + 1
            most = max(most, parsing)
        entered.set()
        assert go_on.wait(30)
        found = parse_apart(document, fingerprints, budget)
        with count:
            parsing -= 1
        return found

    monkeypatch.setattr("corpus_server.known_plans.parse_apart", parse)
    with closing(Jobs()) as jobs, ThreadPoolExecutor(6) as pool:
        known = KnownPlans(catalog, store, jobs)
        asked = [pool.submit(known.by_id, each, ANYONE, Budget()) for each in ids + ids + ids[:1]]
        assert entered.wait(30)
        assert known.keep_document(document(5), ANYONE, Budget())[0].plan.seed == 5
        go_on.set()
        responses = [each.result(30) for each in asked]
    assert (most, num_parsed) == (1, 2)
    assert responses[0] is responses[2] is responses[4]
