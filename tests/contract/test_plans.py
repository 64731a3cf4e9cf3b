"""Both halves over plans of several stages: extended in mid-run, resumed anywhere, receipts that refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_client import CorpusLoader, errors
from tests.conftest import ServedCorpus
from tests.contract.conftest import Replicas, make_loader, take
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

SEQ_LEN = 16
Rows = set[tuple[int, ...]]
STAGES: list[dict[str, Any]] = [
    {"from_step": 0, "global_batch_size": 24, "mixture": {"web": 1.0}},
    {"from_step": 25, "global_batch_size": 40, "mixture": {"web": 0.6, "mixed": 0.4}},
]
PLAN = {"seq_len": SEQ_LEN, "seed": 7, "order": "shuffle", "stages": STAGES, "skip_steps": [[10, 13]]}
BORDER, NUM_STEPS = 22, 60  # plan step 25 is training step 22


def _of_plan(urls: list[str], plan: Any, **changes: Any) -> CorpusLoader:
    unset = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0}
    return make_loader(urls, **{**unset, "plan": plan, "prefetch_bytes": 1 << 18, **changes})


def _windows(corpus: ServedCorpus) -> Rows:
    return {
        tuple(shard[start : start + SEQ_LEN + 1].tolist())
        for shard in corpus.shards
        for start in range(0, len(shard) - SEQ_LEN, SEQ_LEN)
    }


def test_extending_in_mid_run_leaves_the_past_and_mixes_the_future(
    corpora: dict[str, ServedCorpus], replicas: Replicas, server: RunningServer
) -> None:
    """The new source is of a wider type: what was yielded stays as it is, what comes is widened."""
    urls = [*replicas["4 workers"], server.url]
    with make_loader(urls, num_steps=100) as undisturbed:
        expected = [tokens for _, tokens in take(undisturbed, 100)]
    with make_loader(urls, dtype=None) as loader:
        before = take(loader, 30)
        old_id = loader.plan_id
        new_id = loader.extend({"mixture": {"web": 0.25, "mixed": 0.75}, "global_batch_size": 32})
        assert new_id == loader.plan_id != old_id
        assert loader.sources == ("web", "mixed")
        after = take(loader, 20)
        plan = loader.plan
    assert {tokens.dtype.name for _, tokens in before} == {"uint16"}
    assert {tokens.dtype.name for _, tokens in after} == {"uint32"}
    assert {tokens.shape for _, tokens in after} == {(32, SEQ_LEN + 1)}
    with _of_plan(urls, plan) as successor:
        assert successor.plan_id == new_id
        again = take(successor, 50)
    for (step, tokens), (yielded_step, yielded) in zip(again, before + after, strict=True):
        assert step == yielded_step
        np.testing.assert_array_equal(tokens, yielded)
        if step < 30:
            np.testing.assert_array_equal(tokens, expected[step])
    used = server.get(f"/v1/plans/{new_id}/usage", step=50, since=30).json()["sources"]
    rows = [tuple(row) for _, tokens in after for row in tokens.tolist()]
    for name in ("web", "mixed"):
        assert sum(row in _windows(corpora[name]) for row in rows) == used[name]["rows"] > 0
    assert sum(each["rows"] for each in used.values()) == 20 * 32


def test_a_mixture_is_given_by_its_weights_and_kept_by_what_only_excludes(server: RunningServer) -> None:
    """As a plan with one stage has it; the last stage's weights go on where an extension names none."""
    weights = {"web": 0.75, "mixed": 0.25}
    stage = {"from_step": 0, "global_batch_size": 32, "mixture": weights}
    document = {"seq_len": SEQ_LEN, "seed": 5, "stages": [stage]}
    with CorpusLoader(
        server.url, corpus=weights, seq_len=SEQ_LEN, global_batch_size=32, seed=5, device="cpu"
    ) as loader:
        assert loader.plan_id == server.post_plan(document).json()["id"]
        take(loader, 3)
        loader.extend(exclude={"web": [[0, 2000]]})
        take(loader, 2)
        described = server.get(f"/v1/plans/{loader.plan_id}").json()["stages"]
        loader.extend(mixture={"mixed": 1})
        take(loader, 2)
        loader.extend(exclude={"web": [[3000, 3100]]})
        last = server.get(f"/v1/plans/{loader.plan_id}").json()["stages"]
    assert described[1]["weights_65536"] == described[0]["weights_65536"] == {"mixed": 16384, "web": 49152}
    assert described[1]["excluded_windows"]["web"] > 0
    assert last[-1]["weights_65536"] == {"mixed": 65536}
    assert (last[-2]["first_step"], last[-1]["first_step"]) == (5, 7)


def test_what_is_excluded_from_now_on_does_not_come_any_more(
    corpora: dict[str, ServedCorpus], replicas: Replicas
) -> None:
    """Half a shard is denied; every other row is the one of the run that went on as it was."""
    denied = {
        tuple(corpora["web"].shards[0][start : start + SEQ_LEN + 1].tolist())
        for start in range(0, 2000, SEQ_LEN)
    }
    runs: list[list[tuple[int, ...]]] = []
    for exclude in ({}, {"exclude": {"web": [[0, 2000]]}}):
        with make_loader(replicas["3 replicas"]) as loader:
            take(loader, 10)
            loader.extend({"mixture": {"web": 1.0}, **exclude})
            runs.append([tuple(row) for _, tokens in take(loader, 50) for row in tokens.tolist()])
    plain, without = runs
    assert set(plain) & denied
    assert not set(without) & denied
    assert all(a == b for a, b in zip(plain, without, strict=True) if a not in denied)


def test_world_sizes_in_any_sequence_over_two_stages(replicas: Replicas) -> None:
    """A run is cut at any step, on any number of ranks: its rows are those of the run of one rank."""
    with _of_plan(replicas["1 worker"], PLAN, num_steps=NUM_STEPS) as whole:
        expected = take(whole, NUM_STEPS)
        plan_id = whole.plan_id
    assert [len(tokens) for _, tokens in expected] == BORDER * [24] + (NUM_STEPS - BORDER) * [40]
    parts = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 25))

    @settings(max_examples=6, deadline=None)
    @given(st.lists(parts, min_size=2, max_size=4), st.sampled_from(["1 worker", "4 workers", "3 replicas"]))
    def run(cuts: list[tuple[int, int]], deployment: str) -> None:
        state: dict[str, Any] | None = None
        step = 0
        for world_size, num_steps in cuts:
            num_steps = min(num_steps, NUM_STEPS - step)
            taken, states = [], []
            for rank in range(world_size):
                plan = PLAN if state is None else state["plan"]
                with _of_plan(replicas[deployment], plan, rank=rank, world_size=world_size) as loader:
                    if state is not None:
                        loader.load_state_dict(state)
                    taken.append(take(loader, num_steps))
                    states.append(json.loads(json.dumps(loader.state_dict())))
            assert all(each == states[0] for each in states)
            state = states[0]
            for at, ranks in enumerate(zip(*taken, strict=True)):
                assert {got for got, _ in ranks} == {step + at}
                rows = np.concatenate([tokens for _, tokens in ranks])
                np.testing.assert_array_equal(rows, expected[step + at][1])
            step += num_steps
            assert (state["next_step"], state["plan_id"]) == (step, plan_id)

    run()


@pytest.mark.usefixtures("receipts_in_time")
def test_another_corpus_under_the_same_name_is_refused(tmp_path: Path) -> None:
    """Where the sampled fingerprint sees the change, by it; where it does not, by the batch's receipt."""
    tokens = some_tokens(1 << 18)
    seen, unseen = tokens.copy(), tokens.copy()
    seen[5] ^= 1
    unseen[3000] ^= 1  # between the sampled blocks; in order, a token of step 7
    corpora = {"first": tokens, "seen": seen, "unseen": unseen}
    states = {}
    for name, content in corpora.items():
        folder = tmp_path / name
        folder.mkdir()
        path = write_raw(folder / "web.bin", content)
        with (
            RunningServer({"web": path}, folder) as server,
            make_loader(server.url, order="sequential") as loader,
        ):
            if name == "first":
                states = {step: loader.state_at(step, receipt=True) for step in (6, 7)}
            elif name == "seen":
                with pytest.raises(errors.StateMismatch, match=r"fingerprints\.web: the state has 'sampl"):
                    loader.load_state_dict(states[7])
                with pytest.raises(
                    errors.ServerError, match="corpus 'web' has other content than the plan was made for"
                ):
                    _of_plan([server.url], states[7]["plan"])
            else:
                loader.load_state_dict(states[6])
                with pytest.raises(errors.StateMismatch, match=r"next_batch: the state has .* step 7"):
                    loader.load_state_dict(states[7])
                assert loader.step == 6


def test_the_only_corpus_of_a_server_need_not_be_named(
    corpora: dict[str, ServedCorpus], server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningServer({"web": corpora["web"].path}, tmp_path) as alone,
        make_loader(alone.url, corpus=None) as loader,
    ):
        assert loader.sources == ("web",)
    with pytest.raises(errors.InvalidArgument, match=r"corpus must be one of .*web.*, or give weights"):
        make_loader(server.url, corpus=None)
