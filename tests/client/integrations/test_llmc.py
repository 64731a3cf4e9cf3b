"""llm.c's loader replaced: the same batches, and the same losses, also after a resume at any step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from examples.for_llmc import DistributedDataLoader
from tests.client.integrations.nanogpt_model import Model, copied
from tests.client.integrations.ranks import QUICK, SEQ_LEN
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

ROWS = 4
ACCUMULATE = 2
NUM_STEPS = 15


def by_llmc(tokens: np.ndarray, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what llm.c's loader gives of a shard: a block of each rank in turn.

    A rank looks for the end of the shard from its own block: it goes on while a batch of all ranks would fit
    there. So a rank other than 0 may leave the shard one batch before rank 0.
    """
    block = ROWS * SEQ_LEN
    for mine in range(rank * block, len(tokens) - world_size * block, world_size * block):
        buffer = torch.from_numpy(tokens[mine : mine + block + 1].astype(np.int64))
        yield buffer[:-1].view(ROWS, SEQ_LEN), buffer[1:].view(ROWS, SEQ_LEN)


class FromMemory:
    """llm.c's own loader of one rank, up to the end of the first shard."""

    def __init__(self, corpus: ReferenceCorpus) -> None:
        self._tokens = corpus.shard_arrays[0]
        self.reset()

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return next(self._batches)

    def reset(self) -> None:
        self._batches = by_llmc(self._tokens, 0, 1)


def llmc(
    train_loader: Any, val_loader: Any, *, save_at: int = -1, checkpoint: dict[str, Any] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Run a loop of the shape of `train_gpt2.py`: each micro batch is fetched where it is trained on.

    Returns:
        What it prints, the checkpoint of the step `save_at`.
    """
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_step, printed, saved = 0, [], {}
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_step = checkpoint["step"]
        train_loader.load_state_dict(checkpoint["data"], trained_steps=first_step * ACCUMULATE)
    for step in range(first_step, NUM_STEPS):
        if step == save_at:
            data = train_loader.state_dict()
            model_and_optimizer = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved = copied({**model_and_optimizer, "step": step, "data": data})
        if step % 5 == 0:
            val_loader.reset()
            with torch.no_grad():
                val_loss = sum(model(*val_loader.next_batch())[1].item() for _ in range(3)) / 3
            printed.append(f"{step} val loss {val_loss}")
        optimizer.zero_grad(set_to_none=True)
        lossf = 0.0
        for _micro_step in range(ACCUMULATE):
            x, y = train_loader.next_batch()
            loss = model(x, y)[1] / ACCUMULATE
            lossf += loss.item()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        printed.append(f"{step} train loss {lossf:.6f} norm {norm:.4f}")
    return printed, saved


@pytest.fixture
def make_loader(server: ReferenceServer) -> Iterator[Callable[[], DistributedDataLoader]]:
    made: list[DistributedDataLoader] = []

    def make() -> DistributedDataLoader:
        made.append(DistributedDataLoader(f"{server.url}/web", ROWS, SEQ_LEN, 0, 1, **QUICK))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_first_shards_batches_are_llmcs(
    server: ReferenceServer, corpus: ReferenceCorpus, world_size: int
) -> None:
    for rank in range(world_size):
        with DistributedDataLoader(f"{server.url}/web", ROWS, SEQ_LEN, rank, world_size, **QUICK) as loader:
            expected = list(by_llmc(corpus.shard_arrays[0], rank, world_size))
            for _ in range(2):  # as before and after an evaluation
                for x, y in expected:
                    found_x, found_y = loader.next_batch()
                    assert torch.equal(found_x, x)
                    assert torch.equal(found_y, y)
                loader.reset()


def test_the_losses_are_those_of_the_unpatched_loader(
    corpus: ReferenceCorpus, make_loader: Callable[[], DistributedDataLoader]
) -> None:
    expected, _ = llmc(FromMemory(corpus), FromMemory(corpus))
    assert len(set(expected)) == NUM_STEPS + 3
    assert llmc(make_loader(), make_loader())[0] == expected


def test_a_resume_at_any_step_goes_on_with_the_same_losses(
    make_loader: Callable[[], DistributedDataLoader],
) -> None:
    for save_at in random.Random(3).sample(range(1, NUM_STEPS), 4):
        expected, saved = llmc(make_loader(), make_loader(), save_at=save_at)
        assert saved["data"]["next_step"] == save_at * ACCUMULATE
        resumed, _ = llmc(make_loader(), make_loader(), checkpoint=saved)
        assert resumed == [line for line in expected if int(line.split()[0]) >= save_at]
