"""A feed's state counts what was trained on; what was only held comes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from corpus_client import CorpusLoader, Placement, errors
from corpus_client.integrations.causal_lm import causal_lm
from corpus_client.integrations.feed import Feed, check_place, open_at
from tests.client.reference_server import ReferenceServer

MakeLoader = Callable[..., CorpusLoader]


def test_the_state_counts_trained_batches(make_loader: MakeLoader) -> None:
    feed = Feed(make_loader())
    held = [next(feed) for _ in range(4)]
    feed.trained()
    feed.trained(2)
    assert feed.state_dict() == held[2].state_after()
    assert feed.step == 3
    assert next(iter(feed)).step == 3  # held, not trained on


def test_batches_may_become_anything(make_loader: MakeLoader) -> None:
    """An array is equal to nothing and to everything; None is a batch like others."""
    arrays = Feed(make_loader(num_steps=3), lambda batch: batch.inputs.numpy())
    assert [array.shape for array in arrays] == [(12, 16)] * 3
    assert list(Feed(make_loader(num_steps=3), lambda batch: None)) == [None] * 3


def test_more_trained_than_yielded_is_an_error(make_loader: MakeLoader) -> None:
    feed = Feed(make_loader())
    next(feed)
    feed.trained()
    with pytest.raises(errors.StepOutOfOrder, match=r"steps before 2 .* only those before 1 were yielded"):
        feed.trained()
    assert feed.step == 1


def test_a_second_pass_is_refused_and_an_unfinished_one_finished(make_loader: MakeLoader) -> None:
    feed = Feed(make_loader(num_steps=3))
    assert len(feed) == 3
    assert [batch.step for batch in feed] == [0, 1, 2]
    feed.trained(2)
    assert [batch.step for batch in feed] == [2]
    feed.trained()
    with pytest.raises(errors.RunComplete):
        iter(feed)
    with pytest.raises(TypeError, match="num_steps="):
        len(Feed(make_loader()))


@pytest.mark.parametrize(("trained", "kind"), [(4, "skip 1"), (7, "repeat 2")])
def test_a_state_of_another_step_than_the_trainers_is_refused(
    make_loader: MakeLoader, trained: int, kind: str
) -> None:
    feed = Feed(make_loader())
    state = feed.loader.state_at(5)
    with pytest.raises(
        errors.StateMismatch, match=f"step 5, but the trainer has trained {trained} .* {kind};"
    ):
        feed.load_state_dict(state, trained_steps=trained)
    feed.load_state_dict(state, trained_steps=5)
    assert next(feed).step == feed.step == 5


def test_a_place_that_is_not_the_frameworks_is_refused() -> None:
    check_place((1, 2), (1, 2), "it")
    with pytest.raises(
        errors.WrongRows, match=r"rank 0 of 1, it trains as rank 1 of 2.*Placement\(rank=1, world_size=2\)"
    ):
        check_place((0, 1), (1, 2), "it")


@pytest.mark.parametrize("ignore_index", [None, -100])
def test_shifted_once_the_labels_are_the_targets(make_loader: MakeLoader, ignore_index: int | None) -> None:
    """As transformers shifts: position i of the logits with label i + 1, the last one with nothing."""
    options: dict[str, Any] = {"eot_id": int(next(make_loader()).inputs[0, -1]), "ignore_index": ignore_index}
    batch = next(make_loader(**options))
    found = causal_lm(batch)
    assert torch.equal(found["input_ids"][:, :-1], batch.inputs)
    assert torch.equal(found["labels"][:, 1:], batch.targets)
    assert (found["labels"][:, 0] == -100).all()
    assert (found["input_ids"] >= 0).all()
    assert (found["labels"] == -100).sum() == 12 + (batch.targets == -100).sum()


def test_a_loader_opens_at_its_frameworks_place_unless_an_option_says_otherwise(
    server: ReferenceServer,
) -> None:
    plan = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
    with open_at(server.url, (1, 2), "cpu", plan) as loader:
        assert (loader.place, next(loader).inputs.shape) == ((1, 2), (6, 16))
    alone = {**plan, "placement": Placement(rank=0, world_size=1), "device": "cpu"}
    with open_at(server.url, (1, 2), "no device", alone) as loader:
        assert loader.place == (0, 1)
