"""States and positions: where a run goes on, and which states are refused by the field that differs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import CorpusLoader, errors, make_plan
from tests.client.conftest import make_corpus
from tests.client.reference_plan import ReferenceCorpus, receipt_of, tokens_of_step
from tests.client.reference_server import ReferenceServer

MakeLoader = Callable[..., CorpusLoader]


OF_PLAN = {"corpus": None, "seq_len": None, "global_batch_size": None, "order": "shuffle"}
"""What must not be given beside `plan`."""
STRIDED = make_plan(corpus="web", seq_len=16, global_batch_size=12, order="sequential", stride=17)


@pytest.mark.usefixtures("receipts_in_time")
def test_state_is_small_readable_json_and_counts_what_was_yielded(
    make_loader: MakeLoader, corpus: ReferenceCorpus
) -> None:
    loader = make_loader()
    assert loader.state_dict()["next_step"] == 0
    for _ in range(7):
        next(loader)
    time.sleep(0.05)  # far more is fetched by now
    state = json.loads(json.dumps(loader.state_dict()))
    plan = {**loader.plan, "decisions": ""}
    assert state == {"plan": plan, "plan_id": loader.plan_id, "next_step": 7}
    receipt = receipt_of(tokens_of_step(corpus, loader.plan, 7))
    assert loader.state_dict(receipt=True) == {**state, "next_batch": receipt}
    assert loader.step == 7
    assert "world_size" not in json.dumps(state)


def test_state_can_be_loaded_in_mid_run(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    num_threads = threading.active_count()  # of servers of other tests some linger
    loader = make_loader()
    state = loader.state_dict()
    first = [next(loader).tokens for _ in range(5)]
    loader.load_state_dict(state)
    again = [next(loader).tokens for _ in range(5)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    loader.load_state_dict(loader.state_at(1000))
    assert next(loader).step == 1000
    assert threading.active_count() < num_threads + 20


def test_the_plan_belongs_to_its_caller(make_loader: MakeLoader) -> None:
    loader = make_loader()
    loader.plan["stages"].clear()
    assert loader.plan["stages"]
    assert loader.state_dict()["plan"] == {**loader.plan, "decisions": ""}


def test_resumed_run_ends_where_the_first_would_have(make_loader: MakeLoader) -> None:
    loader = make_loader(num_steps=30)
    loader.load_state_dict(loader.state_at(25))
    assert [batch.step for batch in loader] == [25, 26, 27, 28, 29]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "seed: the state has 0, this loader 5"),
        ({"seq_len": 8}, r"seq_len: the state has 16, this loader 8; stages|stride: the state has 16"),
        ({"order": "shuffle"}, "order: the state has 'sequential', this loader 'shuffle'"),
        ({"global_batch_size": 6}, r"stages\[0\].global_batch_size: the state has 12, this loader 6"),
        ({"plan": STRIDED, **OF_PLAN}, "stride: the state has 16, this loader 17"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_state_of_another_plan_is_refused_by_field(
    make_loader: MakeLoader, change: dict[str, Any], message: str
) -> None:
    state = make_loader().state_dict()
    loader = make_loader(**change)
    with pytest.raises(errors.StateMismatch, match=message):
        loader.load_state_dict(state)
    assert loader.step == 0


def test_state_of_another_corpus_is_refused(make_loader: MakeLoader) -> None:
    state = make_loader().state_dict()
    with ReferenceServer([make_corpus(seed=9)]) as other:
        loader = make_loader(other.url)
        with pytest.raises(errors.StateMismatch, match=r"fingerprints.web: the state has 'full-"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_step": -1}, r"next_step must be an integer in \[0,"),
        ({"next_step": True}, "next_step must be an integer"),
        ({"next_step": "3"}, "next_step must be an integer"),
        ({"plan_id": "0" * 64}, "plan_id: the state has 000"),
        ({"extra": 1}, "must hold plan, plan_id and next_step"),
    ],
)
def test_damaged_state_is_refused(make_loader: MakeLoader, change: dict[str, Any], message: str) -> None:
    loader = make_loader()
    with pytest.raises(errors.StateMismatch, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_seek_goes_anywhere_and_drops_what_was_fetched_ahead(
    make_loader: MakeLoader, corpus: ReferenceCorpus
) -> None:
    loader = make_loader()
    for step in (500, 3, 3, 0, 2**40 - 1):
        loader.seek(step)
        assert loader.step == step
        assert np.array_equal(next(loader).tokens.numpy(), tokens_of_step(corpus, loader.plan, step))
    wrong: Any
    for wrong in (-1, 1.5, True, 2**40 + 1):
        with pytest.raises(errors.InvalidArgument, match="step must be an integer in"):
            loader.seek(wrong)


def test_a_second_pass_is_asked_for_and_never_silently_empty(make_loader: MakeLoader) -> None:
    loader = make_loader(num_steps=5)
    assert len(loader) == 5
    assert [batch.step for batch in loader] == [0, 1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(loader)
    with pytest.raises(errors.RunComplete, match=r"all steps before num_steps=5 .* call loader.seek\(0\)"):
        list(loader)
    loader.seek(3)
    assert [batch.step for batch in loader] == [3, 4]
    with pytest.raises(errors.RunComplete):
        iter(loader)


def test_a_complete_run_that_is_started_again_has_nothing_left_to_do(make_loader: MakeLoader) -> None:
    loader = make_loader(num_steps=5)
    loader.load_state_dict(loader.state_at(5))
    assert list(loader) == []
