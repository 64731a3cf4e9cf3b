"""Which shards the next steps read, as a client asks for it."""

from __future__ import annotations

from tests.serving import RunningServer


def test_each_shard_comes_with_the_first_step_asked_for_that_reads_it(server: RunningServer) -> None:
    stage = {"global_batch_size": 4, "mixture": {"web": 1}}
    plan = server.post_plan({"seq_len": 16, "seed": 5, "stages": [stage]}).json()["id"]
    listed = server.get(f"/v1/plans/{plan}/shards", step=7, count=2).json()["shards"]
    assert sum(each["num_rows"] for each in listed) == 2 * 4
    assert {each["first_step"] for each in listed} <= {7, 8}
    assert listed[0]["first_step"] == 7
