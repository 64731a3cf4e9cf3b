"""What training saw, over HTTP: usage before a step and between two, skipped steps named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import ServedCorpus
from tests.reference import ReferencePlan, batch
from tests.serving import RunningServer, check_problem

Corpora = dict[str, ServedCorpus]
PLAN: dict[str, Any] = {
    "seq_len": 16,
    "seed": 7,
    "stages": [
        {"from_step": 0, "global_batch_size": 12, "mixture": {"web": 0.7, "text": 0.3}},
        {
            "from_step": 20,
            "global_batch_size": 24,
            "mixture": {"web": 0.4, "mixed": 0.6},
            "exclude": {"web": [[100, 3000]]},
        },
    ],
    "skip_steps": [[5, 8]],
}


@pytest.fixture(scope="module")
def plan_id(server: RunningServer) -> str:
    return str(server.post_plan(PLAN).json()["id"])


@pytest.fixture(scope="module")
def reference(corpora: Corpora) -> ReferencePlan:
    return ReferencePlan(PLAN, {name: [s.size for s in corpora[name].shards] for name in corpora})


def rows_seen(reference: ReferencePlan, since: int, step: int) -> dict[str, int]:
    counts = dict.fromkeys(reference.sources, 0)
    for each in range(since, step):
        for row in range(reference.global_batch_size(each)):
            counts[reference.window(each, row)[0]] += 1
    return counts


@pytest.mark.parametrize(("since", "step"), [(0, 0), (0, 5), (0, 6), (3, 17), (0, 40), (30, 31), (9, 9)])
def test_usage_counts_the_rows_that_training_saw(
    server: RunningServer, plan_id: str, reference: ReferencePlan, since: int, step: int
) -> None:
    response = server.get(f"/v1/plans/{plan_id}/usage", step=step, since=since).json()
    seen = rows_seen(reference, since, step)
    assert (response["plan"], response["step"], response["since"]) == (plan_id, step, since)
    assert response["plan_step"] == reference.plan_step(step)
    assert response["sources"] == {
        name: {"rows": rows, "tokens": 16 * rows, "epochs": rows / reference.sources[name].num_windows}
        for name, rows in seen.items()
    }
    skipped = 3 if (since <= 4 and step > 5) or (since <= 5 and step >= 5 and since < step) else 0
    assert response["skipped"]["steps"] == skipped
    assert sum(each["rows"] for each in response["skipped"]["sources"].values()) == 12 * skipped


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        ("/v1/plans/{}/usage?step=10", "&since=1"),
        ("/v1/plans/{}/receipt?step=10", "1"),
        ("/v1/lookup?plan={}&corpus=web&token=5", "&epochs=2"),
    ],
    ids=["usage", "receipt", "lookup"],
)
def test_what_a_plan_answers_is_an_immutable_resource(
    server: RunningServer, plan_id: str, asked: str, other: str
) -> None:
    path = asked.format(plan_id)
    response = server.get(path)
    assert "immutable" in response.headers["Cache-Control"]
    again = server.get(path, headers={"If-None-Match": response.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")
    head = server.get(path, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["ETag"] == response.headers["ETag"]
    assert head.headers["Content-Length"] == str(len(response.body))
    assert server.get(path + other).headers["ETag"] != response.headers["ETag"]


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ({}, "step"),
        ({"step": -1}, "step"),
        ({"step": 2**41}, "step"),
        ({"step": "true"}, "step"),
        ({"step": 3, "since": 4}, "since"),
        ({"step": 3, "since": -1}, "since"),
        ({"step": 3, "until": 4}, "until"),
        ({"step": 3, "num_steps": 2}, "num_steps"),
    ],
    ids=str,
)
def test_bad_questions_are_refused(
    server: RunningServer, plan_id: str, query: dict[str, Any], parameter: str
) -> None:
    check_problem(
        server.get(f"/v1/plans/{plan_id}/usage", **query), 422, "invalid-parameter", parameter=parameter
    )


def excluding(excluded: dict[str, list[list[int]]], **more: Any) -> dict[str, Any]:
    """A plan whose last stage excludes this instead."""
    first, last = PLAN["stages"]
    return {**PLAN, **more, "stages": [first, {**last, "exclude": excluded}]}


@pytest.mark.parametrize("more", [{}, {"num_steps": 30, "skip_steps": []}], ids=["plan", "draft"])
def test_a_list_of_no_ranges_excludes_nothing_and_names_a_source(
    server: RunningServer, more: dict[str, Any]
) -> None:
    """A mistyped name is one, too, where a script found nothing to exclude."""
    ids = {server.post_plan(excluding(each, **more)).json()["id"] for each in ({}, {"web": []})}
    assert len(ids) == 1
    for excluded in ({"stranger": []}, {"web": [[1, 2]], "stranger": []}):
        document = check_problem(
            server.post_plan(excluding(excluded, **more)), 422, "invalid-plan", parameter="stages[1].exclude"
        )
        assert "stages[1].exclude names ['stranger'], which no mixture of the plan uses" in document["detail"]


def test_a_decision_excludes_of_sources_of_the_plan_alone(server: RunningServer, plan_id: str) -> None:
    stage = {"from_step": 50, "global_batch_size": 12, "mixture": {"web": 1}}

    def decided(excluded: dict[str, list[list[int]]]) -> Any:
        return server.post_plan({"parent": plan_id, "stages": [{**stage, "exclude": excluded}]})

    assert decided({"web": []}).json()["id"] == decided({}).json()["id"]
    document = check_problem(decided({"stranger": []}), 422, "invalid-plan", parameter="stages[0].exclude")
    assert "stranger" in document["detail"]


def test_usage_of_an_unknown_plan(server: RunningServer) -> None:
    check_problem(server.get(f"/v1/plans/{'0' * 64}/usage", step=1), 404, "unknown-plan")


@pytest.mark.parametrize(("step", "count", "dtype"), [(0, 17, "uint32"), (4, 3, "uint32"), (17, 6, "uint32")])
def test_batches_of_a_mixture_are_the_reference_s_in_the_widest_type(
    server: RunningServer, corpora: Corpora, plan_id: str, step: int, count: int, dtype: str
) -> None:
    """uint8, uint16 and uint32 in one plan: one type for all its steps."""
    response = server.get("/v1/batches", plan=plan_id, step=step, count=count)
    shards = {name: corpora[name].shards for name in ("web", "text", "mixed")}
    assert response.headers["Corpus-Dtype"] == dtype
    assert (response.array() == batch(PLAN, shards, step, count=count)).all()


@pytest.mark.parametrize("route", ["batches", "indices"])
def test_a_count_over_a_change_of_batch_size_is_refused_with_the_step(
    server: RunningServer, plan_id: str, route: str
) -> None:
    """Plan step 20 is training step 17."""
    response = server.get(f"/v1/{route}", plan=plan_id, step=10, count=8)
    problem = check_problem(response, 422, "invalid-parameter", parameter="count")
    assert "step 17" in problem["detail"]
    assert problem["accepted"] == "at most 7"
    assert server.get(f"/v1/{route}", plan=plan_id, step=10, count=7).status == 200


def test_answers_name_the_plan_step_where_it_differs(server: RunningServer, plan_id: str) -> None:
    for step, plan_step in ((4, None), (5, 8), (30, 33)):
        raw = server.get("/v1/indices", plan=plan_id, step=step, format="raw")
        assert raw.headers["Corpus-Plan-Step"] == (None if plan_step is None else str(plan_step))
        assert server.get("/v1/indices", plan=plan_id, step=step).json().get("plan_step") == plan_step
        assert server.get("/v1/batches", plan=plan_id, step=step, format="json").json().get("plan_step") == (
            plan_step
        )


def test_a_plan_is_described_with_stages_and_positions(
    server: RunningServer, plan_id: str, reference: ReferencePlan
) -> None:
    described = server.get(f"/v1/plans/{plan_id}").json()
    for stage, units, base in zip(described["stages"], reference.units, reference.bases, strict=True):
        assert stage["weights_65536"] == units
        assert stage["positions"] == base
    denied = sum(map(len, reference.denied[1]["web"]))
    assert described["stages"][1]["excluded_windows"]["web"] == denied > 0
    assert described["dtype"] == "uint32"
