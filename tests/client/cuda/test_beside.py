"""What comes beside the tokens on a device: exact under random delays, and summed without a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import ArrayLoader, CorpusLoader
from tests.client.cuda.conftest import Accelerator
from tests.corpora import some_tokens, write_raw
from tests.loaders import open_loader
from tests.serving import RunningServer

SIZES = {"chat": 4000, "web": 7000}
NUM_STEPS = 120


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("beside")
    paths: dict[str, Path | str] = {}
    for seed, (name, size) in enumerate(SIZES.items()):
        paths[name] = path = write_raw(folder / f"{name}.bin", some_tokens(size, seed=seed))
        if name == "chat":
            np.save(path.with_name("chat.bin.mask.npy"), some_tokens(size, vocabulary=2).astype(bool))
    with RunningServer(paths, folder) as server:
        yield server.url


def plan(**fields: Any) -> dict[str, Any]:
    stage = {"from_step": 0, "global_batch_size": 11, "mixture": dict.fromkeys(SIZES, 0.5)}
    return {"seq_len": 16, "stages": [stage], **fields}


def open_on(accelerator: Accelerator, url: str, **options: Any) -> CorpusLoader:
    place = {"device": accelerator.name, "rank": 0, "world_size": 1, "num_steps": NUM_STEPS}
    return open_loader(url, plan=plan(), sources=True, **place, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch_bytes": 1 << 13},
        {"prefetch_bytes": 1 << 16, "dtype": None},
        {"trace_steps": 20},
        {"context_parallel": (1, 2), "context_order": "zigzag"},
    ],
    ids=str,
)
def test_every_batch_is_exact(accelerator: Accelerator, url: str, options: dict[str, Any]) -> None:
    """Nothing waits for the device until all copies of the batches are queued."""
    columns = [*range(4, 12)] if "context_order" in options else [*range(16)]
    with closing(open_on(accelerator, url, **options)) as loader:
        kept = []
        for batch in loader:
            accelerator.sleep(1e-4)
            kept.append([batch.targets.clone(), batch.sources.clone(), batch.loss_mask.clone()])
    with ArrayLoader(url, plan=plan(), sources=True, rank=0, world_size=1, num_steps=NUM_STEPS) as arrays:
        for found, expected in zip(kept, arrays, strict=True):
            targets, sources, mask = (each.cpu() for each in found)
            assert targets.tolist() == expected.targets[:, columns].tolist()
            assert sources.tolist() == expected.sources.tolist()  # type: ignore[union-attr]
            assert mask.tolist() == expected.loss_mask[:, columns].tolist()  # type: ignore[index]
            assert (sources.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_the_loss_by_source_waits_for_nothing(accelerator: Accelerator, url: str) -> None:
    """As in the README; a row's loss is its number of masked targets here.

    The simulated device waits in most operations of torch, so there only the loader must not wait.
    """
    with closing(open_on(accelerator, url)) as loader:
        losses, rows = torch.zeros(2, len(loader.sources), device=accelerator.name)
        next(loader)
        for _ in range(20):
            accelerator.refuse_waits(refuse=True)
            try:
                batch = next(loader)
                sources, mask = batch.sources, batch.corpus_mask
                accelerator.refuse_waits(refuse=accelerator.name == "cuda")
                by_row = (~mask).float().sum(1)  # type: ignore[operator]
                losses.index_add_(0, sources, by_row)
                rows.index_add_(0, sources, torch.ones_like(by_row))
            finally:
                accelerator.refuse_waits(refuse=False)
        found = dict(zip(loader.sources, zip(losses.tolist(), rows.tolist(), strict=True), strict=True))
    assert found["web"][0] == 0
    assert found["chat"][0] > 0
    assert found["chat"][1] + found["web"][1] == 20 * 11
