"""Under a StatefulDataLoader: a step is the state, so any number of workers and ranks goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from corpus_client import CorpusIterableDataset, errors
from corpus_client.batch import Batch
from tests.client.integrations.ranks import PLAN, QUICK, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

pytestmark = [
    # Python 3.12 warns of every fork beside threads; whether a worker comes up is what is tested here.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # fewer cores than workers
]

NUM_STEPS = 7


def make(url: str, num_workers: int, **options: Any) -> Any:
    from corpus_client.integrations.torchdata import StatefulCorpusLoader

    dataset = CorpusIterableDataset(url, **PLAN, **{"num_steps": NUM_STEPS, **options}, **QUICK)
    return StatefulCorpusLoader(dataset, num_workers=num_workers)


@pytest.mark.parametrize(
    ("before", "after", "taken"), [(0, 2, 3), (2, 3, 4), (3, 0, 1), (1, 2, 0), (2, 1, 7)]
)
def test_another_number_of_workers_goes_on(
    server: ReferenceServer, corpus: ReferenceCorpus, before: int, after: int, taken: int
) -> None:
    """In the middle of a pass, before its first batch, and behind its last, where the next pass begins."""
    batches = make(server.url, before)
    running = iter(batches)
    seen = [next(running) for _ in range(taken)]
    saved = json.loads(json.dumps(batches.state_dict()))
    del running
    resumed = make(server.url, after)
    resumed.load_state_dict(saved, trained_steps=taken)
    found = [batch.tokens.tolist() for batch in (*seen, *resumed)]
    stop = NUM_STEPS if taken < NUM_STEPS else 2 * NUM_STEPS
    assert found == [rows_of(corpus, saved["plan"], step) for step in range(stop)]
    assert resumed.state_dict()["next_step"] == stop


def test_a_step_that_is_left_out_or_comes_twice_is_an_error(
    server: ReferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data import DataLoader

    for order, message in ([0, 2], "of step 1, got one of 2"), ([0, 0], "of step 1, got one of 0"):

        def disordered(self: Any, order: list[int] = order) -> Iterator[Batch]:
            return (Batch([torch.empty(0)] * 2, step) for step in order)

        monkeypatch.setattr(DataLoader, "__iter__", disordered)
        with pytest.raises(errors.StepOutOfOrder, match=message):
            list(make(server.url, 0))
