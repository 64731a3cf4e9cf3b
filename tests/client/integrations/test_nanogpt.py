"""nanoGPT's loop with `get_batch` replaced: the same losses, also after a resume at any iteration."""

# ruff: noqa: N806 - X and Y are nanoGPT's names

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import errors
from examples.for_nanogpt import GetBatch
from tests.client.integrations.nanogpt_model import Model, copied
from tests.client.integrations.ranks import PLAN, QUICK, ROWS, SEQ_LEN, on_ranks, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

OPTIONS: dict[str, Any] = {"seed": PLAN["seed"], "device": "cpu", **QUICK}
ACCUMULATE = 2
LAST_ITERATION = 14

Pair = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def estimate_loss(model: torch.nn.Module, get_batch: Callable[[str], Pair]) -> dict[str, float]:
    """Do as the function of this name in nanoGPT, which takes these from its module."""
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(3)
        for k in range(3):
            X, Y = get_batch(split)
            _logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def nanogpt(
    get_batch: Any, *, save_at: int = -1, checkpoint: dict[str, Any] | None = None
) -> tuple[dict[int, float], list[dict[str, float]], dict[str, Any]]:
    """Run a loop of the shape of nanoGPT's `train.py`: it evaluates and saves while it holds a batch.

    Returns:
        The loss of each iteration, each evaluation, the checkpoint of the iteration `save_at`.
    """
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    iter_num, losses, evaluations, saved = 0, {}, [], {}
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num = checkpoint["iter_num"]
        get_batch.load_state_dict(checkpoint["data"], trained_steps=iter_num * ACCUMULATE)
    X, Y = get_batch("train")
    while True:
        if iter_num % 4 == 0 or iter_num == save_at:
            evaluations.append(estimate_loss(model, get_batch))
        if iter_num == save_at:
            saved = copied(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "data": get_batch.state_dict(),
                }
            )
        for _micro_step in range(ACCUMULATE):
            _logits, loss = model(X, Y)
            loss = loss / ACCUMULATE
            X, Y = get_batch("train")
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[iter_num] = loss.item() * ACCUMULATE
        iter_num += 1
        if iter_num > LAST_ITERATION:
            return losses, evaluations, saved


@pytest.fixture
def make_get_batch(server: ReferenceServer) -> Iterator[Callable[[], GetBatch]]:
    made: list[GetBatch] = []

    def make(url: str = server.url, **options: Any) -> GetBatch:
        splits = {"train": "web", "val": "web"}
        made.append(GetBatch(url, splits, ROWS, SEQ_LEN, **{**OPTIONS, **options}))
        return made[-1]

    yield make
    for get_batch in made:
        get_batch.close()


def from_memory(corpus: ReferenceCorpus, server: ReferenceServer, ours: GetBatch) -> Callable[[str], Pair]:
    """Return nanoGPT's own `get_batch`, with the plan's starts where it draws its own."""
    plans = [
        ours.state_dict()["plan"],
        next(p for p in server.plans.values() if p["seed"] == PLAN["seed"] + 1),
    ]
    steps = {True: 0, False: 0}

    def get_batch(split: str) -> Pair:
        training = torch.is_grad_enabled()
        windows = rows_of(corpus, plans[not training], steps[training] % 3 if not training else steps[True])
        steps[training] += 1
        data = [np.asarray(window, np.uint16) for window in windows]
        x = torch.stack([torch.from_numpy(row[:-1].astype(np.int64)) for row in data])
        y = torch.stack([torch.from_numpy(row[1:].astype(np.int64)) for row in data])
        return x, y

    return get_batch


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_the_losses_are_those_of_the_unpatched_function(
    corpus: ReferenceCorpus, server: ReferenceServer, make_get_batch: Callable[..., GetBatch], order: str
) -> None:
    server.plans.clear()
    ours = make_get_batch(order=order)
    theirs = from_memory(corpus, server, ours)
    assert nanogpt(ours)[0] == nanogpt(theirs)[0]


def test_a_resume_at_any_iteration_goes_on_with_the_same_losses(
    make_get_batch: Callable[..., GetBatch],
) -> None:
    for save_at in random.Random(7).sample(range(1, LAST_ITERATION), 4):
        expected, evaluations, saved = nanogpt(make_get_batch(), save_at=save_at)
        assert saved["data"]["next_step"] == save_at * ACCUMULATE
        resumed, later, _ = nanogpt(make_get_batch(), save_at=save_at, checkpoint=saved)
        assert resumed == {step: expected[step] for step in range(save_at, LAST_ITERATION + 1)}
        assert later == evaluations[-len(later) :]


def test_evaluating_takes_no_step_from_training(make_get_batch: Callable[..., GetBatch]) -> None:
    get_batch = make_get_batch()
    first = get_batch("train")[0]
    with torch.no_grad():
        evaluated = [get_batch(split)[0] for split in ("train", "val", "train")]
    assert get_batch.state_dict()["next_step"] == 0  # `first` is held
    second = get_batch("train")[0]
    with torch.no_grad():
        again = [get_batch(split)[0] for split in ("train", "val", "train")]
    assert all(map(torch.equal, evaluated, again))
    other = make_get_batch()
    assert torch.equal(first, other("train")[0])
    assert torch.equal(second, other("train")[0])


def job(url: str, state: dict[str, Any] | None, batch_size: int, steps: int) -> list[Any]:
    """Train `steps` micro steps and return the rows; the last one is held and not trained on."""
    torch.distributed.init_process_group("gloo")
    with GetBatch(url, {"train": "web"}, batch_size, SEQ_LEN, **OPTIONS) as get_batch:
        if state is not None:
            get_batch.load_state_dict(state)
        pairs = [get_batch("train") for _ in range(steps + 1)]
        seen = [torch.cat((x, y[:, -1:]), dim=1).tolist() for x, y in pairs[:-1]]
        return [seen, get_batch.state_dict()]


def test_ranks_get_their_rows_and_fewer_ranks_go_on(
    server: ReferenceServer, corpus: ReferenceCorpus, tmp_path: Path
) -> None:
    found = on_ranks(2, tmp_path, job, server.url, None, ROWS // 2, 5)
    state = found[0][1]
    assert [each[1] for each in found] == [state, state]
    rows = partial(rows_of, corpus, state["plan"])
    for rank, (seen, _) in enumerate(found):
        assert seen == [rows(step, rank, 2) for step in range(5)]
    with closing(GetBatch(server.url, {"train": "web"}, ROWS, SEQ_LEN, **OPTIONS)) as resumed:
        resumed.load_state_dict(state)
        x, _ = resumed("train")
        assert x.tolist() == [row[:-1] for row in rows(5)]
    with (
        closing(GetBatch(server.url, {"train": "web"}, ROWS // 2, SEQ_LEN, **OPTIONS)) as other,
        pytest.raises(errors.StateMismatch, match="global_batch_size: the state has 12, this loader 6"),
    ):
        other.load_state_dict(state)
