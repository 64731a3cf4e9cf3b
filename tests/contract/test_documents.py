"""Both halves over rows of documents: structure, resuming, other world sizes, a local copy of the shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_client import ArrayLoader, CorpusLoader
from corpus_server.corpus.index import index
from tests.contract.conftest import make_loader, take
from tests.corpora import spec, write_raw
from tests.second import SecondPlan
from tests.serving import RunningServer

SEQ_LEN = 16
EOT = 60_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One corpus of two shards; the tokens of a document count from 0."""
    folder = tmp_path_factory.mktemp("corpora") / "web"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(2):
        lengths = draw.integers(1, 40, 200).tolist()
        write_raw(folder / f"{number}.bin", [each for n in lengths for each in (*range(n - 1), EOT)])
    index(spec(folder, eot=EOT))
    return folder


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer({"web": folder}, tmp_path_factory.mktemp("server")) as server:
        yield server


def loader(server: RunningServer, **changes: Any) -> CorpusLoader:
    rows = {"documents": {"block_documents": 64}}
    asked = {"corpus": "web", "seq_len": SEQ_LEN, "global_batch_size": 8, "seed": 3, "rows": rows}
    return make_loader(server.url, **{**asked, **changes})


def test_positions_borders_and_the_mask_are_those_of_the_documents(running: RunningServer) -> None:
    """A position is the token's own value, where a piece begins its document."""
    with loader(running) as batches:
        for _ in range(20):
            batch = next(batches)
            inputs, targets = batch.inputs.numpy(), batch.targets.numpy()
            begins = batch.cu_seqlens.numpy()
            flat, mask = inputs.ravel(), batch.loss_mask.numpy().ravel()
            for start, stop in itertools.pairwise(begins):
                its = flat[start:stop]
                if (its == EOT).all():  # the unused end, or an end of text that was the row's last place
                    assert not mask[start:stop].any()
                    continue
                first = int(its[0])
                assert first % SEQ_LEN == 0
                ends = int(its[-1] == EOT)
                assert its[: stop - start - ends].tolist() == list(range(first, first + stop - start - ends))
                assert mask[start:stop].tolist() == [*[True] * (stop - start - ends), *[False] * ends]
                assert batch.position_ids.numpy().ravel()[start:stop].tolist() == list(range(stop - start))
            following = targets.ravel()[mask]
            assert ((following == flat[mask] + 1) | (following == EOT)).all()


def row_numbers(server: RunningServer, plan: dict[str, Any], step: int, rank: int) -> list[int]:
    response = server.get(
        "/v1/indices", plan=server.post_plan(plan).json()["id"], step=step, rank=rank, world_size=2
    )
    numbers: list[int] = response.json()["rows"][0]
    return numbers


def test_balanced_ranks_share_the_same_rows(running: RunningServer, folder: Path) -> None:
    """As the indices say which; also from a local copy. The dealt rows differ from halves in most steps."""
    balanced = {"documents": {"block_documents": 64, "balance_ranks": True}}
    with loader(running, dtype=None) as batches:
        whole = [tokens for _, tokens in take(batches, 6)]
    dealt = []
    for rank in range(2):
        with (
            loader(running, dtype=None, rows=balanced, rank=rank, world_size=2) as served,
            loader(running, dtype=None, rows=balanced, rank=rank, world_size=2, local_root=folder) as copied,
        ):
            plan = served.state_dict()["plan"]
            for (step, rows), (_, local) in zip(take(served, 6), take(copied, 6), strict=True):
                numbers = row_numbers(running, plan, step, rank)
                assert np.array_equal(rows, whole[step][numbers])
                assert np.array_equal(local, rows)
                dealt.append(numbers)
    assert [sorted(one + other) for one, other in zip(dealt[:6], dealt[6:], strict=True)] == [
        list(range(8))
    ] * 6
    assert dealt.count([0, 1, 2, 3]) < 3


def test_a_state_resumes_with_another_world_size(running: RunningServer) -> None:
    with loader(running, dtype=None) as batches:
        whole = [tokens for _, tokens in take(batches, 3)]
        state = batches.state_dict()
        whole += [tokens for _, tokens in take(batches, 3)]
    parts = []
    for rank in range(2):
        with loader(running, dtype=None, rank=rank, world_size=2) as batches:
            batches.load_state_dict(state)
            parts.append(take(batches, 3))
    for one, other in zip(*parts, strict=True):
        assert np.array_equal(np.concatenate((one[1], other[1])), whole[one[0]])


def test_rows_whose_documents_are_all_excluded_come_from_a_local_copy_too(
    running: RunningServer, folder: Path
) -> None:
    """A row without a token of its own is end of text alone."""
    stages = [
        {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 1.0}, "exclude": {"web": [[0, 5000]]}}
    ]
    plan = {"seq_len": SEQ_LEN, "rows": {"documents": {"block_documents": 64}}, "stages": stages}
    of_plan = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0, "rows": "windows"}
    with (
        make_loader(running.url, **of_plan, plan=plan, dtype=None) as served,
        make_loader(running.url, **of_plan, plan=plan, dtype=None, local_root=folder) as copied,
    ):
        expected = take(served, 60)
        assert any((rows == EOT).all(axis=1).any() for _, rows in expected)
        for (step, rows), (_, local) in zip(expected, take(copied, 60), strict=True):
            assert np.array_equal(local, rows), step


def test_a_local_copy_and_arrays_give_the_same_rows(running: RunningServer, folder: Path) -> None:
    with (
        loader(running, dtype=None) as served,
        loader(running, dtype=None, local_root=folder) as copied,
        ArrayLoader(running.url, plan=served.state_dict()["plan"], rank=0, world_size=1) as arrays,
    ):
        for _ in range(12):
            rows = next(served).tokens.numpy().copy()
            assert np.array_equal(next(copied).tokens.numpy(), rows)
            assert np.array_equal(next(arrays).tokens, rows)


STAGES: list[dict[str, Any]] = [
    {"from_step": 0, "global_batch_size": 24, "mixture": {"web": 1}, "seq_len": 4},
    {"from_step": 9, "global_batch_size": 12, "mixture": {"web": 1}, "seq_len": 8},
    {"from_step": 17, "global_batch_size": 6, "mixture": {"web": 1}, "exclude": {"web": [[500, 900]]}},
    {"from_step": 30, "global_batch_size": 24, "mixture": {"web": 1}, "seq_len": 4},
]
NUM_STEPS = 60
LENGTHS_PLAN: dict[str, Any] = {
    "seq_len": SEQ_LEN,
    "seed": 3,
    "rows": {"documents": {"block_documents": 64}},
    "stages": STAGES,
    "skip_steps": [[4, 6]],
}


def rows_by_the_page(folder: Path) -> list[np.ndarray]:
    """The tokens of each step, by the second implementation."""
    shards = [np.fromfile(folder / f"{number}.bin", dtype="<u2") for number in range(2)]
    ends = np.flatnonzero(np.concatenate(shards) == EOT) + 1
    documents = list(zip([0, *ends[:-1].tolist()], np.diff(ends, prepend=0).tolist(), strict=True))
    plan = SecondPlan(LENGTHS_PLAN, {"web": [each.size for each in shards]}, {"web": documents})
    steps = []
    for step in range(NUM_STEPS):
        rows = np.full((plan.global_batch_size(step), plan.seq_len(step) + 1), EOT, dtype=np.uint16)
        for number, row in enumerate(rows):
            its = [shards[shard][start : start + count] for shard, start, count in plan.pieces(step, number)]
            row[: sum(map(len, its))] = np.concatenate(its)
        steps.append(rows)
    return steps


def of_lengths(server: RunningServer, **changes: Any) -> CorpusLoader:
    unset = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0}
    return make_loader(server.url, **{**unset, "plan": LENGTHS_PLAN, "num_steps": NUM_STEPS, **changes})


@pytest.mark.parametrize("local", [False, True], ids=["served", "local"])
def test_stages_of_several_lengths_have_rows_packed_for_each(
    running: RunningServer, folder: Path, local: bool
) -> None:
    """On two ranks, and resumed on other ones across a border."""
    expected = rows_by_the_page(folder)
    options: dict[str, Any] = {"dtype": None, "prefetch_bytes": 1 << 16}
    options |= {"local_root": folder} if local else {}
    for rank in range(2):
        with of_lengths(running, rank=rank, world_size=2, **options) as batches:
            taken = take(batches, NUM_STEPS + 1)
            state = batches.state_dict()
        assert [step for step, _ in taken] == list(range(NUM_STEPS))
        for step, tokens in taken:
            half = len(expected[step]) // 2
            np.testing.assert_array_equal(tokens, expected[step][rank * half : (rank + 1) * half])
    state["next_step"] = 6
    with of_lengths(running, rank=1, world_size=3, **options) as resumed:
        resumed.load_state_dict(state)
        for step, tokens in take(resumed, 12):
            third = len(expected[step]) // 3
            np.testing.assert_array_equal(tokens, expected[step][third : 2 * third])


def test_batches_of_several_lengths_have_the_structure_of_their_documents(running: RunningServer) -> None:
    with of_lengths(running) as batches:
        for batch in itertools.islice(batches, NUM_STEPS):
            inputs = batch.inputs.numpy()
            mask, flat = batch.loss_mask.numpy(), inputs.ravel()
            assert mask.shape == inputs.shape
            assert batch.cu_seqlens.numpy()[-1] == flat.size
            following = batch.targets.numpy().ravel()[mask.ravel()]
            assert ((following == flat[mask.ravel()] + 1) | (following == EOT)).all()


def test_questions_about_stages_of_several_lengths(running: RunningServer, folder: Path) -> None:
    expected = rows_by_the_page(folder)
    posted = running.post_plan(LENGTHS_PLAN).json()
    its = posted["sources"]["web"]["lengths"]
    assert [each["seq_len"] for each in its] == [8, 4]
    assert its[1]["num_windows"] > its[0]["num_windows"] > posted["sources"]["web"]["num_windows"]
    usage = running.get(f"/v1/plans/{posted['id']}/usage", step=20).json()["sources"]["web"]
    assert usage["rows"] == sum(len(rows) for rows in expected[:20])
    assert usage["tokens"] == sum(rows[:, 1:].size for rows in expected[:20])
    lengths = set()
    for number in range(0, 60, 3):
        whole = running.get(f"/v1/corpora/web/documents/{number}", format="json").json()["tokens"]
        asked = {"corpus": "web", "document": number, "epochs": 9}
        found = running.get("/v1/lookup", plan=posted["id"], **asked).json()["rows"]
        assert found == sorted(found, key=lambda row: (row["plan_step"], row["row"]))
        for row in found:
            if row["step"] is not None and row["step"] < NUM_STEPS:
                tokens = expected[row["step"]][row["row"]]
                piece = tokens[row["offset"] : row["offset"] + row["held"]].tolist()
                assert whole[row["held_at"] : row["held_at"] + row["held"]] == piece
                lengths.add(len(tokens))
    assert lengths == {5, 9, 17}


def test_a_row_with_several_pieces_of_a_range_says_where_the_longest_stands(
    running: RunningServer, folder: Path
) -> None:
    shard = np.fromfile(folder / "0.bin", dtype="<u2")
    stage = {"from_step": 0, "global_batch_size": 16, "mixture": {"web": 1}}
    rows = {"documents": {"block_documents": 64}}
    plan = running.post_plan({"seq_len": 60, "seed": 3, "rows": rows, "stages": [stage]}).json()["id"]
    several = 0
    for start in range(0, 1000, 100):
        found = running.get("/v1/lookup", plan=plan, corpus="web", start=start, stop=start + 100).json()[
            "rows"
        ]
        for each in found:
            row = running.get("/v1/batches", plan=plan, step=each["step"]).array()[0, each["row"]]
            held, at = each["held"], start + each["held_at"]
            assert np.array_equal(row[each["offset"] : each["offset"] + held], shard[at : at + held])
            several += held < len(set(row.tolist()) & set(shard[start : start + 100].tolist()))
    assert several > 5


def test_a_stage_of_another_length_is_added_to_a_run(running: RunningServer) -> None:
    plan = {**LENGTHS_PLAN, "stages": STAGES[:1]}
    with of_lengths(running, plan=plan, dtype=None, prefetch_bytes=1 << 13) as batches:
        taken = take(batches, 5)
        batches.extend({k: v for k, v in STAGES[1].items() if k != "from_step"})
        taken += take(batches, 30)
    shapes = {step: tokens.shape for step, tokens in taken}
    assert shapes == {step: (24, 5) if step < 5 else (12, 9) for step in range(35)}
