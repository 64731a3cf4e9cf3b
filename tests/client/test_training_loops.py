"""Training loops that hold one batch ahead: a resume skips and repeats nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from corpus_client import Batch, CorpusLoader

MakeLoader = Callable[..., CorpusLoader]


def one_ahead(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Do as Lightning's data fetcher, which must know which batch is the last."""
    held = next(batches)
    for batch in batches:
        yield held, False
        held = batch
    yield held, True


@pytest.mark.parametrize("stop_after", [1, 5, 11])
def test_a_loop_that_fetches_ahead_saves_the_state_after_its_batch(
    make_loader: MakeLoader, stop_after: int
) -> None:
    trained: list[int] = []
    state: dict[str, Any] | None = None
    for _ in range(100):
        loader = make_loader(num_steps=30)
        if state is not None:
            loader.load_state_dict(state)
        for count, (batch, _is_last) in enumerate(one_ahead(iter(loader)), 1):
            trained.append(batch.step)
            state = json.loads(json.dumps(batch.state_after()))
            if count == stop_after:
                break
        loader.close()
        if trained[-1] == 29:
            break
    assert trained == list(range(30))
