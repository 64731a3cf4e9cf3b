"""Chains of plans in memory and on disk: every worker follows them, and what is lost is posted again."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.admission.request import ANYONE, Caller
from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import Forbidden, StateUnavailable, UnknownPlan
from corpus_server.known_plans import LARGE_BYTES, KnownPlans
from corpus_server.plan_store import PlanStore
from corpus_server.plan_store.links import chain, has_link, newest_link
from corpus_server.responses.forms import plan_description
from corpus_server.work import Budget
from tests.corpora import some_tokens, write_megatron, write_raw
from tests.reference import one_source
from tests.server.http.making import body
from tests.serving import RunningServer, check_problem

ALL = frozenset({"read:*", "plans"})
ROOT = json.dumps(one_source("web", 8, 4)).encode()
STAGES: list[dict[str, Any]] = [
    {"from_step": 5 * k + 1, "global_batch_size": 4, "mixture": {"web": k + 1, "code": 40 - k}}
    for k in range(40)
]
STAGES[20] |= {"exclude": {"code": [[100, 300]]}}
STAGES[30] |= {"seq_len": 4, "global_batch_size": 8}
END = 5 * len(STAGES)


def link(parent: str, *stages: dict[str, Any]) -> bytes:
    return json.dumps({"parent": parent, "stages": stages}).encode()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    for seed, name in enumerate(("web", "code")):
        write_raw(tmp_path / f"{name}.bin", some_tokens(5000, seed=seed))
    specs = [CorpusSpec(name=name, path=tmp_path / f"{name}.bin") for name in ("web", "code")]
    with Catalog.open(specs) as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PlanStore]:
    with PlanStore(tmp_path / "state") as opened:
        yield opened


@pytest.fixture
def rows(catalog: Catalog, tmp_path: Path) -> list[Any]:
    """Of each step, by one document with all stages."""
    document = one_source("web", 8, 4)
    whole = {**document, "version": 1, "stages": [*document["stages"], *STAGES]}
    with PlanStore(tmp_path / "other") as store:
        sampler = (
            KnownPlans(catalog, store).keep_document(json.dumps(whole).encode(), ANYONE, Budget())[0].sampler
        )
    return [sampler.locate(step).tolist() for step in range(END)]


def follow(known: KnownPlans, stages: list[dict[str, Any]] = STAGES) -> list[str]:
    """Post a root and then decision after decision; return all ids."""
    ids = [known.keep_document(ROOT, ANYONE, Budget())[0].plan.id]
    for stage in stages:
        ids.append(known.keep_document(link(ids[-1], stage), ANYONE, Budget())[0].plan.id)
    return ids


def positions_damaged(database: sqlite3.Connection) -> None:
    database.execute("UPDATE links SET placed = zeroblob(length(placed)) WHERE number % 3 = 0")


@pytest.mark.parametrize(
    "harm", [lambda database: None, positions_damaged], ids=["whole", "positions-damaged"]
)
def test_a_worker_that_begins_in_mid_run_has_the_same_rows(
    catalog: Catalog,
    store: PlanStore,
    tmp_path: Path,
    rows: list[Any],
    harm: Callable[[sqlite3.Connection], None],
) -> None:
    """It reads where the sources stand; what it cannot read, it computes."""
    ids = follow(KnownPlans(catalog, store))
    with sqlite3.connect(tmp_path / "state" / "plans.sqlite") as database:
        harm(database)
    database.close()
    later = KnownPlans(catalog, store)
    for plan_id, end in ((ids[-1], END), (ids[3], 11), (ids[-2], END - 5)):
        sampler = later.by_id(plan_id, ANYONE, Budget()).sampler
        assert [sampler.locate(step).tolist() for step in range(end)] == rows[:end]
    assert (
        later.by_id(ids[-1], ANYONE, Budget()).plan.log is later.by_id(ids[3], ANYONE, Budget()).plan.log
    )  # the two share their arrays


def test_decisions_posted_together_are_the_same_chain(catalog: Catalog, store: PlanStore) -> None:
    ids = follow(KnownPlans(catalog, store))
    other = KnownPlans(catalog, store)
    assert other.keep_document(link(ids[0], *STAGES), ANYONE, Budget())[0].plan.id == ids[-1]
    assert other.keep_document(link(ids[7], *STAGES[7:30]), ANYONE, Budget())[0].plan.id == ids[30]


def test_a_large_document_is_parsed_in_a_process_of_its_own(catalog: Catalog, store: PlanStore) -> None:
    known = KnownPlans(catalog, store)
    ids = follow(known, STAGES[:2])
    padded = link(ids[1], STAGES[1]) + b" " * LARGE_BYTES
    assert known.keep_document(padded, ANYONE, Budget())[0].plan.id == ids[2]


def describe(known: KnownPlans, posted: bytes, **options: bool) -> dict[str, Any]:
    """What a POST of a document answers."""
    bound, parent, _ = known.keep_document(posted, ANYONE, Budget(), **options)
    described: dict[str, Any] = json.loads(body(plan_description(bound, Budget(), parent)))
    return described


def test_only_what_is_added_is_described(catalog: Catalog, store: PlanStore) -> None:
    known = KnownPlans(catalog, store)
    root = known.keep_document(ROOT, ANYONE, Budget())[0]
    first, second = (describe(known, link(root.plan.id, *STAGES[:n])) for n in (2, 4))
    assert [stage["from_step"] for stage in first["stages"]] == [1, 6]
    assert (first["num_stages"], [shard["corpus"] for shard in first["shards"]]) == (3, ["code"])
    assert list(first["sources"]) == ["web", "code"]
    third = describe(known, link(first["id"], *STAGES[2:4]))
    assert third["stages"] == second["stages"][2:]
    assert third["shards"] == []
    described = json.loads(body(plan_description(known.by_id(third["id"], ANYONE, Budget()), Budget())))
    assert [stage["from_step"] for stage in described["stages"]] == [0, 1, 6, 11, 16]
    assert [shard["corpus"] for shard in described["shards"]] == ["web", "code"]
    assert newest_link(store, root.plan.id) == (third["id"], 5)


def test_what_is_described_and_not_kept_grows_nothing(catalog: Catalog, store: PlanStore) -> None:
    known = KnownPlans(catalog, store)
    root = known.keep_document(ROOT, ANYONE, Budget())[0]
    before = sum(each.num_bytes for each in root.shared)
    described = describe(known, link(root.plan.id, *STAGES), keep=False)
    assert sum(each.num_bytes for each in root.shared) == before
    last = known.keep_document(link(root.plan.id, *STAGES), ANYONE, Budget())[0]
    assert last.plan.id == described["id"]


def test_continuations_with_exclusions_are_made_at_the_same_time(catalog: Catalog, store: PlanStore) -> None:
    """Each checks the ranges of its parent while another one adds its own."""
    known = KnownPlans(catalog, store)
    root = known.keep_document(ROOT, ANYONE, Budget())[0].plan.id
    interval = sys.getswitchinterval()

    def go_on(number: int) -> int:
        plan_id = root
        for step in range(1, 60):
            stage = {"from_step": step, "global_batch_size": 4, "mixture": {"web": 1}}
            stage["exclude"] = {"web": [[10 * step + number, 10 * step + number + 1]]}
            plan_id = known.keep_document(link(plan_id, stage), ANYONE, Budget())[0].plan.id
        return len(known.by_id(plan_id, ANYONE, Budget()).plan.stages)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert set(pool.map(go_on, range(6))) == {60}
    finally:
        sys.setswitchinterval(interval)


def test_an_unknown_parent_is_named(catalog: Catalog, store: PlanStore) -> None:
    with pytest.raises(UnknownPlan, match=f"has not seen plan {'ab' * 32}") as raised:
        KnownPlans(catalog, store).keep_document(link("ab" * 32, STAGES[0]), ANYONE, Budget())[0]
    assert (raised.value.parameter, raised.value.received) == ("parent", "ab" * 32)


OTHER_SIZES = "document = replace(document, '\"global_batch_size\":', '\"global_batch_size\":1')"
CUT = "document = substr(document, 9)"
CIRCLE = "parent = (SELECT id FROM links WHERE number = 12)"


@pytest.mark.parametrize(
    ("number", "change"),
    [(1, OTHER_SIZES), (8, OTHER_SIZES), (40, OTHER_SIZES), (8, CUT), (8, "parent = id"), (8, CIRCLE)],
)
def test_a_damaged_link_is_not_believed_and_posted_again(
    catalog: Catalog, store: PlanStore, tmp_path: Path, number: int, change: str
) -> None:
    ids = follow(KnownPlans(catalog, store))
    with sqlite3.connect(tmp_path / "state" / "plans.sqlite") as database:
        database.execute(f"UPDATE links SET {change} WHERE number = ?", (number,))
    database.close()
    later = KnownPlans(catalog, store)
    with pytest.raises(UnknownPlan):
        later.by_id(ids[-1], ANYONE, Budget())
    assert follow(later) == ids
    assert KnownPlans(catalog, store).by_id(ids[-1], ANYONE, Budget()).plan.id == ids[-1]


def test_a_chain_that_the_disk_has_lost_goes_on_only_once_it_was_posted_again(
    catalog: Catalog, store: PlanStore, tmp_path: Path
) -> None:
    """Else a worker that has the chain in memory would go on with it, and no other worker could follow."""
    known = KnownPlans(catalog, store)
    ids = follow(known, STAGES[:5])
    for path in (tmp_path / "state").glob("plans.sqlite*"):
        path.unlink()
    with pytest.raises(UnknownPlan) as raised:
        known.keep_document(link(ids[-1], STAGES[5]), ANYONE, Budget())[0]
    assert raised.value.received == ids[-1]
    assert follow(known, STAGES[:6])[:-1] == ids
    KnownPlans(catalog, store).by_id(ids[-1], ANYONE, Budget())


def test_links_go_with_their_root_and_count_as_bytes_but_not_as_plans(
    catalog: Catalog, tmp_path: Path
) -> None:
    with PlanStore(tmp_path / "state", max_bytes=30_000) as store:
        known = KnownPlans(catalog, store)
        ids = follow(known)
        assert store.count() == 1
        roots = [
            known.keep_document(json.dumps(one_source("web", 8, 4, seed=seed)).encode(), ANYONE, Budget())[0]
            for seed in range(1, 9)
        ]
        ids_of_others = [follow_from(known, root.plan.id) for root in roots]
        assert store.document(ids[0]) is None
        assert not any(has_link(store, each) for each in ids[1:])
        assert all(has_link(store, each) for each in ids_of_others[-1])
        assert store.count() < 9


def follow_from(known: KnownPlans, plan_id: str) -> list[str]:
    return [known.keep_document(link(plan_id, *STAGES[:20]), ANYONE, Budget())[0].plan.id]


@pytest.mark.parametrize(
    ("fields", "mixtures"),
    [
        (
            {"rows": {"documents": {"block_documents": 16}}},
            [{"a": 1}, {"a": 1, "b": 2}, {"b": 1}, {"a": 3, "b": 1}],
        ),
        (
            {"order": {"megatron": {"num_samples": 300, "blend": ["b", "a"], "weights": [0.3, 0.7]}}},
            [{"a": 0.7, "b": 0.3}] * 4,
        ),
    ],
    ids=["rows of documents", "megatron"],
)
def test_rows_that_follow_from_tables_go_on_too(
    tmp_path: Path, fields: dict[str, Any], mixtures: list[dict[str, float]]
) -> None:
    """The digests of documents of a source that a link adds are part of the link."""
    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        lengths = draw.integers(1, 40, 100).tolist()
        write_megatron(tmp_path / name, [[*draw.integers(1, 99, n - 1).tolist(), 0] for n in lengths])
    stages = [
        {"from_step": 4 * k, "global_batch_size": 8 + 4 * (k % 2), "mixture": each}
        for k, each in enumerate(mixtures)
    ]
    plan = {"seq_len": 16, **fields}
    specs = [CorpusSpec(name=name, path=tmp_path / f"{name}.bin", eot=0) for name in ("a", "b")]
    with Catalog.open(specs) as catalog, PlanStore(tmp_path / "state") as store:
        known = KnownPlans(catalog, store)
        document = json.dumps({**plan, "version": 1, "stages": stages}).encode()
        whole = known.keep_document(document, ANYONE, Budget())[0]
        root = known.keep_document(json.dumps({**plan, "stages": stages[:1]}).encode(), ANYONE, Budget())[0]
        last = known.keep_document(link(root.plan.id, *stages[1:]), ANYONE, Budget())[0]
        lost = KnownPlans(catalog, store).by_id(last.plan.id, ANYONE, Budget())
        assert lost.plan.id == last.plan.id
        for step in range(20):
            (pieces, borders), *others = (
                each.pieces(step, range(each.sampler.check_part(step))) for each in (whole, last, lost)
            )
            for its, its_borders in others:
                assert (its == pieces).all()
                assert (its_borders == borders).all()
        if "rows" in fields:
            first = chain(store, last.plan.id, lambda _: False)[0].kept.document
            assert list(json.loads(first)["lengths"]) == ["b"]


def test_who_may_not_read_an_added_corpus_learns_nothing_of_it(catalog: Catalog, store: PlanStore) -> None:
    known = KnownPlans(catalog, store)
    ids = follow(known, STAGES[:2])
    reader = Caller(name="a", scopes=frozenset({"read:web", "plans"}))
    with pytest.raises(Forbidden):
        known.keep_document(link(ids[0], STAGES[0]), reader, Budget())[0]
    with pytest.raises(Forbidden):
        known.by_id(ids[-1], reader, Budget())


def test_a_plan_is_found_by_the_beginning_of_a_link_s_id(catalog: Catalog, store: PlanStore) -> None:
    ids = follow(KnownPlans(catalog, store))
    found = store.find(ids[-1][:20])
    assert (found.id, len(found.stages), found.sources) == (ids[-1], 41, ("web", "code"))


def test_a_server_answers_every_decision_of_a_chain(tmp_path: Path) -> None:
    """Over HTTP and two workers, over a restart, and after its state was deleted."""
    for seed, name in enumerate(("web", "code")):
        write_raw(tmp_path / f"{name}.bin", some_tokens(5000, seed=seed))
    corpora = {name: tmp_path / f"{name}.bin" for name in ("web", "code")}
    document = one_source("web", 8, 4)
    whole = {**document, "version": 1, "stages": [*document["stages"], *STAGES]}
    with RunningServer(corpora, tmp_path, workers=2) as server:
        ids = [server.post_plan(document).json()["id"]]
        for stage in STAGES:
            ids.append(server.post_plan({"parent": ids[-1], "stages": [stage]}).json()["id"])
        reference = server.post_plan(whole).json()["id"]

        def check(plan_id: str, step: int) -> None:
            responses = [server.get("/v1/batches", plan=each, step=step) for each in (plan_id, reference)]
            assert responses[0].body == responses[1].body
            assert (responses[0].status, responses[0].headers["Corpus-Plan"]) == (200, plan_id)

        for number in (1, 2, 21, 31, 40):
            for step in (0, 5 * number - 4, 5 * number):
                check(ids[number], step)
        server.restart()
        check(ids[-1], END)
        listed = {each["id"]: each for each in server.get("/v1/plans").json()["plans"]}
        assert (listed[ids[0]]["head"], listed[ids[0]]["num_stages"]) == (ids[-1], 41)
        assert "head" not in listed[reference]
        differ = server.get(f"/v1/plans/{ids[-1]}/diff", other=ids[30]).json()
        assert differ["rows"]["first_step"] == STAGES[30]["from_step"]
        problem = check_problem(
            server.post_plan({"parent": "00" * 32, "stages": STAGES[:1]}),
            404,
            "unknown-plan",
            parameter="parent",
        )
        assert problem["received"] == "00" * 32


def fork(number: int) -> dict[str, Any]:
    return {"from_step": 1 + number, "global_batch_size": 4, "mixture": {"web": 1 + number, "code": 40}}


def test_what_continues_a_plan_counts_for_the_token_that_posted_it(
    catalog: Catalog, store: PlanStore
) -> None:
    """The failure was: a token with `max_plans = 1` filled the folder by forks of one plan."""
    known = KnownPlans(catalog, store)
    caller = Caller("few", frozenset({"read:*", "plans"}), max_plans=3)
    root = known.keep_document(ROOT, caller, Budget())[0].plan.id
    forks = [
        known.keep_document(link(root, fork(number)), caller, Budget())[0].plan.id for number in range(12)
    ]
    kept = [each for each in forks if has_link(store, each)]
    assert (len(kept), kept[-1], store.count()) == (2, forks[-1], 1)
    known.keep_document(link(kept[-1], fork(20)), caller, Budget())[0]
    with pytest.raises(Forbidden, match="token 'few' may keep 3 plans, and each that continues another one"):
        known.keep_document(link(kept[-1], fork(20), fork(30)), caller, Budget())[0]


def test_forks_of_one_token_push_out_no_plan_of_another(catalog: Catalog, tmp_path: Path) -> None:
    with PlanStore(tmp_path / "bounded", max_bytes=40_000) as store:
        known = KnownPlans(catalog, store)
        own = [
            known.keep_document(
                json.dumps(one_source("web", 8, 4, seed=seed)).encode(), Caller("own", ALL), Budget()
            )[0]
            for seed in range(20)
        ]
        other = Caller("forks", ALL)
        root = known.keep_document(ROOT, other, Budget())[0].plan.id
        for number in range(300):
            known.keep_document(link(root, fork(number)), other, Budget())[0]
            assert store.rows("SELECT num_bytes FROM totals")[0][0] <= 40_000
        assert [store.document(each.plan.id) is not None for each in own] == [True] * 20
        assert newest_link(store, root) is not None


def test_a_chain_ends_where_there_is_no_more_room(catalog: Catalog, tmp_path: Path) -> None:
    """What it continues cannot make room for it; the failure was: a folder beyond its bound."""
    with PlanStore(tmp_path / "bounded", max_bytes=5_000) as store:
        known = KnownPlans(catalog, store)
        ids = [known.keep_document(ROOT, ANYONE, Budget())[0].plan.id]
        with pytest.raises(StateUnavailable, match=r"room for .* 5,000 bytes"):  # noqa: PT012 - which one is open
            for number in range(100):
                ids.append(known.keep_document(link(ids[-1], fork(number)), ANYONE, Budget())[0].plan.id)
        assert 3 < len(ids) < 50
        assert all(has_link(store, each) for each in ids[1:])
        assert store.rows("SELECT num_bytes FROM totals")[0][0] <= 5_000


def test_the_plan_of_a_state_can_be_posted_and_decisions_only_by_the_loader(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(1000))
    plan = one_source("web", 8, 4)
    with RunningServer({"web": path}, tmp_path) as server:
        assert server.post_plan({**plan, "decisions": ""}).json()["id"] == server.post_plan(plan).json()["id"]
        problem = check_problem(server.post_plan({**plan, "decisions": "[5,1]"}), 422, "invalid-plan")
    assert problem["parameter"] == "decisions"
    assert "CorpusLoader(url, plan=state['plan'])" in problem["remedy"]
