"""Plans of several stages: batch sizes that change, stages added in mid-run, receipts of batches."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_client import CorpusLoader, errors
from corpus_client.network.control import StageDescription
from corpus_client.plan.schedule import rank_shapes
from tests.client.conftest import make_corpus
from tests.client.reference_plan import receipt_of, tokens_of_step, whole
from tests.client.reference_server import ReferenceServer

MakeLoader = Callable[..., CorpusLoader]
WEB, CODE = make_corpus("web", 1), make_corpus("code", 2)
CORPORA = [WEB, CODE]
PLAN: dict[str, Any] = {
    "seq_len": 16,
    "seed": 3,
    "order": "shuffle",
    "stages": [
        {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 1.0}},
        {"from_step": 20, "global_batch_size": 24, "mixture": {"web": 0.5, "code": 0.5}},
        {"from_step": 40, "global_batch_size": 24, "mixture": {"code": 1.0}},
        {"from_step": 50, "global_batch_size": 16, "mixture": {"code": 1.0}},
        {"from_step": 55, "global_batch_size": 8, "mixture": {"web": 1.0}},
    ],
    "skip_steps": [[3, 5], [18, 22], [49, 57]],
}
"""Training steps: 8 rows to step 16, 24 from there to 43 (the stage from 50 on is skipped whole), then 8."""


@pytest.fixture
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer(CORPORA) as server:
        yield server


@pytest.fixture
def make_staged(make_loader: MakeLoader) -> MakeLoader:
    """Loaders of `PLAN`, or of another."""

    def make(*args: Any, **changes: Any) -> CorpusLoader:
        unset = dict.fromkeys(("corpus", "seq_len", "global_batch_size"))
        return make_loader(*args, **{**unset, "order": "shuffle", "plan": PLAN, **changes})

    return make


def take(loader: CorpusLoader, count: int) -> list[tuple[int, np.ndarray]]:
    return [(batch.step, batch.tokens.numpy().copy()) for _, batch in zip(range(count), loader, strict=False)]


def expect(taken: list[tuple[int, np.ndarray]], plan: dict[str, Any], start: int) -> None:
    assert [step for step, _ in taken] == list(range(start, start + len(taken)))
    for step, tokens in taken:
        np.testing.assert_array_equal(tokens, tokens_of_step(CORPORA, plan, step))


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_plan_may_lie_in_a_file(
    make_staged: MakeLoader, tmp_path: Path, as_path: Callable[[str], Any]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    assert make_staged(plan=as_path(str(path))).plan_id == make_staged().plan_id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must be a plan document or the path of one, got .*No such file"),
        ("{", "must be JSON: "),
        ("[1]", "must be a plan document or the path of one, got a list"),
    ],
)
def test_a_file_that_holds_no_plan_is_refused(
    make_staged: MakeLoader, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(errors.InvalidArgument, match=message):
        make_staged(plan=path)


def test_a_plan_of_another_type_is_refused(make_staged: MakeLoader) -> None:
    with pytest.raises(errors.InvalidArgument, match="a plan document or the path of one, got a list"):
        make_staged(plan=[PLAN])


@pytest.mark.parametrize("source", ["batches", "indices"])
@pytest.mark.parametrize("prefetch_bytes", [1 << 13, 1 << 20])
def test_batches_follow_the_stages(
    make_staged: MakeLoader, server: ReferenceServer, source: str, prefetch_bytes: int, tmp_path: Path
) -> None:
    """The server refuses requests over a change of batch size; slots are large enough for every stage."""
    local: dict[str, Any] = {}
    if source == "indices":
        local = {"local_root": {c.name: tmp_path / c.name for c in CORPORA}}
        for corpus in CORPORA:
            (tmp_path / corpus.name).mkdir()
            corpus.write(tmp_path / corpus.name)
    loader = make_staged(num_steps=80, prefetch_bytes=prefetch_bytes, **local)
    taken = take(loader, 100)
    assert len(taken) == 80
    expect(taken, loader.plan, 0)
    assert [len(tokens) for _, tokens in taken] == 16 * [8] + 27 * [24] + 37 * [8]
    assert loader.stats().num_tokens == sum(len(tokens) * 16 for _, tokens in taken)


def test_a_stage_that_does_not_divide_is_named(make_staged: MakeLoader) -> None:
    stages = [PLAN["stages"][0], {**PLAN["stages"][1], "global_batch_size": 6}]
    message = (
        r"stages\[1\].global_batch_size must be divisible by world_size, got 6 over 4; "
        "it divides over 1, 2, 3, 6"
    )
    with pytest.raises(errors.InvalidArgument, match=message):
        make_staged(plan={**PLAN, "stages": stages}, rank=0, world_size=4)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([4, 8, 12]), st.sampled_from([2, 4])),
        max_size=6,
    ),
    st.sampled_from([1, 2, 4]),
)
def test_step_ranges_say_the_shape_of_every_step(stages: list[tuple[int, int, int]], world_size: int) -> None:
    """Stages of which training skips every step leave no trace."""
    described, shapes, step = [], [], 0
    for num_steps, size, seq_len in stages:
        first = step if num_steps else None
        described.append(StageDescription(first_step=first, global_batch_size=size, seq_len=seq_len))
        shapes += num_steps * [(size // world_size, seq_len + 1)]
        step += num_steps
    described.append(StageDescription(first_step=step, global_batch_size=16, seq_len=2))
    shapes += 3 * [(16 // world_size, 3)]
    found = rank_shapes(described, world_size)
    assert [
        next(s.shape for s in found if s.start_step <= at and (s.stop_step is None or at < s.stop_step))
        for at in range(len(shapes))
    ] == shapes
    assert found[-1].stop_step is None
    assert all(a.stop_step == b.start_step and a.shape != b.shape for a, b in pairwise(found))


@pytest.mark.parametrize("first_steps", [[1], [None], [0, 5, 3], [0, 5, 5], []])
def test_stages_out_of_order_are_not_believed(first_steps: list[int | None]) -> None:
    stages = [
        StageDescription(first_step=first, global_batch_size=4 + number, seq_len=2)
        for number, first in enumerate(first_steps)
    ]
    with pytest.raises(errors.ResponseCorrupt, match="must rise from 0"):
        rank_shapes(stages, 1)


def test_larger_batches_get_larger_slots(make_loader: MakeLoader) -> None:
    """Half as many: together they have the same bytes."""
    loader = make_loader(global_batch_size=240, prefetch_bytes=1 << 15)
    taken = take(loader, 2)
    before = loader.stats()
    loader.extend({"mixture": {"web": 1.0}, "global_batch_size": 480})
    taken += take(loader, 3)
    after = loader.stats()
    assert (before.num_slots, after.num_slots, after.slot_bytes) == (4, 2, before.slot_bytes)
    expect(taken, loader.plan, 0)


def test_a_run_may_be_extended_again_and_resumed(make_loader: MakeLoader, make_staged: MakeLoader) -> None:
    loader = make_loader(global_batch_size=8)
    taken = take(loader, 5)
    loader.extend({"mixture": {"code": 1.0}})
    taken += take(loader, 5)
    loader.extend({"mixture": {"code": 1.0}, "exclude": {"code": [[0, 4001]]}})
    taken += take(loader, 5)
    state = json.loads(json.dumps(loader.state_dict()))
    assert [stage["global_batch_size"] for stage in whole(state["plan"])["stages"]] == [8, 8, 8]
    resumed = make_staged(plan=state["plan"])
    resumed.load_state_dict(state)
    taken += take(resumed, 5)
    expect(taken, state["plan"], 0)
    excluded = {
        CODE.shard_arrays[0][start : start + 17].astype(np.int64).tobytes() for start in range(0, 3985, 16)
    }
    rows_of_stage = [
        {row.tobytes() for _, tokens in taken[start : start + 5] for row in tokens} for start in (5, 10)
    ]
    assert rows_of_stage[0] & excluded
    assert not rows_of_stage[1] & excluded
    with pytest.raises(errors.StateMismatch, match=r"number of decisions: the state has 2, this loader 0"):
        make_loader(global_batch_size=8).load_state_dict(state)


def test_extending_counts_plan_steps_where_steps_were_skipped(make_staged: MakeLoader) -> None:
    loader = make_staged(plan={**PLAN, "stages": PLAN["stages"][:1]})
    taken = take(loader, 4)
    loader.extend({"mixture": {"code": 1.0}, "global_batch_size": 16})
    assert whole(loader.plan)["stages"][1]["from_step"] == 6
    expect(taken + take(loader, 20), loader.plan, 0)


def test_all_ranks_come_to_the_same_plan(make_loader: MakeLoader) -> None:
    ranks = [make_loader(rank=rank, world_size=4, prefetch_bytes=1 << 14) for rank in range(4)]
    for loader in ranks:
        take(loader, 3)
    stage = {"mixture": {"code": 0.25, "web": 0.75}, "global_batch_size": 8}
    assert len({loader.extend(stage) for loader in ranks}) == 1
    rows = np.concatenate([take(loader, 1)[0][1] for loader in ranks])
    np.testing.assert_array_equal(rows, tokens_of_step(CORPORA, ranks[0].plan, 3))


@pytest.mark.parametrize(
    ("stage", "kind", "message"),
    [
        ({}, errors.InvalidArgument, "stage must hold some of mixture, .* got \\[\\]"),
        ({"mixture": {"web": 1}, "from_step": 9}, errors.InvalidArgument, "begins at the loader's next step"),
        ([], errors.InvalidArgument, "stage must hold some of mixture, .* got list"),
        ({"mixture": 5}, errors.InvalidArgument, "stage.mixture must be a mapping, got 5"),
        (
            {"exclude": [[0, 9]]},
            errors.InvalidArgument,
            "stage.exclude must be a mapping, got .*0, 9",
        ),
        ({"mixture": {"math": 1}}, errors.UnknownCorpus, "no corpus is named 'math'"),
        (
            {"mixture": {"web": 1}, "global_batch_size": 7},
            errors.InvalidArgument,
            r"stages\[1\].*got 7 over 2",
        ),
    ],
)
def test_after_a_refused_stage_the_old_plan_goes_on(
    make_loader: MakeLoader, stage: Any, kind: type[Exception], message: str
) -> None:
    loader = make_loader(rank=0, world_size=2)
    before = take(loader, 3)
    plan_id = loader.plan_id
    with pytest.raises(kind, match=message):
        loader.extend(stage)
    assert loader.plan_id == plan_id
    after = take(loader, 3)
    assert [step for step, _ in before + after] == list(range(6))


def test_a_stage_does_not_replace_another_in_silence(make_staged: MakeLoader) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"begin at plan step 0, where or before .*\(55\)"):
        make_staged().extend({"mixture": {"web": 1.0}})


@pytest.mark.parametrize("changed", [0, 6, 11])
def test_a_successor_with_another_history_is_refused(
    make_loader: MakeLoader, server: ReferenceServer, changed: int
) -> None:
    loader = make_loader()
    take(loader, 12)
    plan_id = loader.plan_id
    server.receipt_salt = lambda plan, step: b"x" if len(plan["stages"]) > 1 and step == changed else b""
    with pytest.raises(errors.HistoryChanged, match=f"step {changed} must stay as it was before the stage"):
        loader.extend({"mixture": {"web": 1.0}})
    assert loader.plan_id == plan_id
    expect(take(loader, 3), loader.plan, 12)


@pytest.mark.parametrize("moved", [None, 0, 6, 11])
def test_history_is_compared_by_places_where_a_wider_source_comes_in(
    make_loader: MakeLoader, server: ReferenceServer, moved: int | None
) -> None:
    """Every token becomes four bytes long, also of the steps before: their receipts say nothing."""
    server.corpora = [*CORPORA, make_corpus("wide", 3, "uint32")]
    loader = make_loader()
    taken = take(loader, 12)
    server.moved = lambda plan, step: len(plan["stages"]) > 1 and step == moved
    if moved is None:
        loader.extend({"mixture": {"web": 0.5, "wide": 0.5}})
        taken += take(loader, 5)
        for step, tokens in taken:
            np.testing.assert_array_equal(tokens, tokens_of_step(server.corpora, loader.plan, step))
        assert max(tokens.max() for _, tokens in taken) > 2**16
    else:
        with pytest.raises(errors.HistoryChanged, match=f"step {moved} must stay as it was"):
            loader.extend({"mixture": {"web": 0.5, "wide": 0.5}})


@pytest.mark.usefixtures("receipts_in_time")
def test_a_server_that_forgot_its_plans_is_told_them(
    make_loader: MakeLoader, server: ReferenceServer
) -> None:
    loader = make_loader()
    take(loader, 2)
    server.plans.clear()
    loader.extend({"mixture": {"code": 1.0}})
    server.plans.clear()
    expected = receipt_of(tokens_of_step(CORPORA, loader.plan, 2))
    assert loader.state_dict(receipt=True)["next_batch"] == expected


@pytest.mark.usefixtures("receipts_in_time")
def test_closed_loaders_are_not_extended(make_loader: MakeLoader) -> None:
    loader = make_loader()
    loader.close()
    with pytest.raises(errors.LoaderClosed):
        loader.extend({"mixture": {"web": 1.0}})
    assert loader.state_dict(receipt=True)["next_batch"] is not None


def test_a_state_is_local_unless_a_receipt_is_asked_for(
    make_loader: MakeLoader, server: ReferenceServer
) -> None:
    """Neither saving nor loading it needs a server."""
    loader = make_loader()
    batch = next(loader)
    server.stop()
    for state in (loader.state_dict(), loader.state_at(1), batch.state_after()):
        assert state == {"plan": {**loader.plan, "decisions": ""}, "plan_id": loader.plan_id, "next_step": 1}
        loader.load_state_dict(state)
    server.start()
    assert server.num_receipts == 0


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_checkpoint_neither_fails_nor_waits_for_its_receipt(
    make_loader: MakeLoader, server: ReferenceServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader()
    take(loader, 3)
    if how == "gone":
        server.stop()
    else:
        server.receipt_seconds = 60
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "corpus_client"):
        state = loader.state_dict(receipt=True)
    assert time.monotonic() - started < 40
    assert "next_batch" not in state
    assert "the state of step 3 has no receipt" in caplog.text
    if how == "gone":
        server.start()
    server.receipt_seconds = 0
    again = make_loader()
    again.load_state_dict(state)
    expect(take(again, 2), loader.plan, 3)


@pytest.mark.usefixtures("receipts_in_time")
def test_other_tokens_under_the_same_fingerprint_are_refused(
    make_loader: MakeLoader, server: ReferenceServer
) -> None:
    loader = make_loader(order="sequential")
    take(loader, 5)
    state = loader.state_dict(receipt=True)
    tokens = [shard.copy() for shard in WEB.shard_arrays]
    tokens[0][5 * 12 * 16 + 40] ^= 1  # a token of step 5
    changed = type(WEB)("web", tokens)
    changed.__dict__["fingerprint"] = WEB.fingerprint
    with ReferenceServer([changed]) as other:
        loader = make_loader(other.url, order="sequential")
        with pytest.raises(
            errors.StateMismatch, match=rf"next_batch: the state has {state['next_batch']}, .* step 5"
        ):
            loader.load_state_dict(state)
        assert loader.step == 0
        del state["next_batch"]
        loader.load_state_dict(state)
        assert loader.step == 5


@pytest.mark.parametrize("value", ["", "xxh3-64=12", "md5=0123456789abcdef", 5])
def test_a_receipt_of_another_form_is_refused(make_loader: MakeLoader, value: object) -> None:
    loader = make_loader()
    with pytest.raises(errors.StateMismatch, match=r"next_batch must be xxh3-64=<16 hex> or null, got"):
        loader.load_state_dict({**loader.state_dict(), "next_batch": value})
