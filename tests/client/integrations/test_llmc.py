"""llm.c's loader replaced: the same batches, and the same losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from corpus_client import errors
from corpus_client.integrations.llmc import DistributedDataLoader
from tests.client.integrations.ranks import QUICK, SEQ_LEN
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

ROWS = 4


def by_llmc(tokens: np.ndarray, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what llm.c's loader gives of a shard: a block of each rank in turn, while all ranks' fit."""
    block = ROWS * SEQ_LEN
    for start in range(0, len(tokens) - block * world_size, block * world_size):
        mine = start + rank * block
        buffer = torch.from_numpy(tokens[mine : mine + block + 1].astype(np.int64))
        yield buffer[:-1].view(ROWS, SEQ_LEN), buffer[1:].view(ROWS, SEQ_LEN)


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


def test_it_resumes_as_every_loader(server: ReferenceServer) -> None:
    with DistributedDataLoader(f"{server.url}/web", ROWS, SEQ_LEN, 0, 1, **QUICK) as loader:
        *_, batch = itertools.islice(loader, 5)
        expected = loader.next_batch()
    with DistributedDataLoader(f"{server.url}/web", ROWS, SEQ_LEN, 0, 1, **QUICK) as resumed:
        resumed.load_state_dict(batch.state_after())
        assert torch.equal(resumed.next_batch().inputs, expected.inputs)


def test_a_file_pattern_is_refused_with_what_to_give() -> None:
    with pytest.raises(errors.InvalidArgument, match="must be http://host:port/corpus, got 'fineweb_train"):
        DistributedDataLoader("fineweb_train_*.bin", ROWS, SEQ_LEN, 0, 1)
