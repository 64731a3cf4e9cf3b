"""Plans over the wire: content-addressed, shared by the workers, kept over a restart."""

from __future__ import annotations

from tests.conftest import ServedCorpus
from tests.reference import one_source
from tests.serving import RunningServer

Corpora = dict[str, ServedCorpus]
PLAN = one_source("web", 16, 12, seed=7)


def test_posting_a_plan_again_changes_nothing(server: RunningServer) -> None:
    """Whichever worker answers, in whichever spelling: one id, one document."""
    document = one_source("web", 16, 12, seed=123)
    spelled = {**document, "order": "shuffle", "stride": 16, "skip_steps": []}
    responses = [server.post_plan(plan) for plan in [document, spelled] * 6]
    assert {response.status for response in responses} == {200}
    first = responses[0].json()
    assert all(response.json() == first for response in responses)
    assert first["plan"] == {
        "version": 1,
        "seq_len": 16,
        "stride": 16,
        "seed": 123,
        "order": "shuffle",
        "stages": [{"from_step": 0, "global_batch_size": 12, "mixture": {"web": 1.0}}],
        "skip_steps": [],
        "fingerprints": {"web": server.get("/v1/corpora/web").json()["fingerprint"]},
    }
    assert server.post_plan(first["plan"]).json() == first
    assert [shard["name"] for shard in first["shards"]] == ["1.bin", "2.bin", "10.bin"]
    num_windows = 250 + 156 + 208
    assert first["sources"]["web"]["num_windows"] == num_windows
    assert first["sources"]["web"]["steps_per_epoch"] == num_windows / 12
    listed = [plan["id"] for plan in server.get("/v1/plans").json()["plans"]]
    assert listed.count(first["id"]) == 1


def test_a_plan_posted_to_one_worker_is_known_to_the_other(server: RunningServer) -> None:
    """Both workers answer in turn; fifty asks of a plan that is new each time reach the one that did not."""
    for seed in range(1000, 1010):
        plan = server.post_plan(one_source("web", 16, 12, seed=seed)).json()
        for _ in range(5):
            assert server.get(f"/v1/plans/{plan['id']}").json() == plan
            assert server.get("/v1/indices", plan=plan["id"], step=0).status == 200


def test_the_list_of_plans_is_as_long_as_asked(server: RunningServer) -> None:
    for seed in range(3):
        server.post_plan(one_source("web", 8, 4, seed=seed))
    plans = server.get("/v1/plans", limit=2).json()["plans"]
    assert len(plans) == 2
    assert set(plans[0]) == {"id", "plan", "seen_unix_seconds", "runs"}
