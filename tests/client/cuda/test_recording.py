"""Losses on their way back from a device: exact, late, and never waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet  # type: ignore[import-untyped]
import pytest
import torch

from corpus_client import CorpusLoader
from corpus_client.recording.readback import NUM_SLOTS
from tests.client.cuda.conftest import Accelerator
from tests.corpora import some_tokens, write_raw
from tests.loaders import open_loader
from tests.serving import RunningServer

ROWS = 10


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("recording")
    paths = {name: write_raw(folder / f"{name}.bin", some_tokens(7000)) for name in ("chat", "web")}
    with RunningServer(paths, folder) as server:
        yield server.url


def open_on(accelerator: Accelerator, url: str, **options: Any) -> CorpusLoader:
    stages = [
        {"from_step": 0, "global_batch_size": ROWS, "mixture": {"chat": 0.5, "web": 0.5}},
        {"from_step": 40, "global_batch_size": 2 * ROWS, "mixture": {"chat": 0.5, "web": 0.5}},
    ]
    place = {"device": accelerator.name, "rank": 0, "world_size": 1}
    return open_loader(url, plan={"seq_len": 16, "stages": stages}, sources=True, **place, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_loss_comes_back(
    accelerator: Accelerator, url: str, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Also where batches grow, and where the trainer uses the memory of its losses again."""
    expected: list[tuple[int, int, torch.Tensor]] = []
    with closing(open_on(accelerator, url, record_dir=tmp_path)) as loader:
        for batch in loader:
            rows = len(batch.sources)
            losses = torch.full((rows,), float(batch.step), dtype=dtype).to(accelerator.name)
            accelerator.sleep(1e-4)
            loader.record(batch.step, losses)
            losses.fill_(-1)
            expected.append((batch.step, rows, batch.sources.clone()))
            if batch.step == 59:
                break
        assert loader.stats().num_recorded_rows == 40 * ROWS + 20 * 2 * ROWS
    (path,) = tmp_path.iterdir()
    table = parquet.read_table(path)
    assert table["step"].to_pylist() == [step for step, rows, _ in expected for _ in range(rows)]
    assert table["loss"].to_pylist() == table["step"].to_pylist()
    names = [loader.sources[n] for _, _, sources in expected for n in sources.tolist()]
    assert table["source"].to_pylist() == names
    assert loader.stats().num_lost_rows == 0


def test_nothing_waits_for_the_device(accelerator: Accelerator, url: str) -> None:
    """What the device has not reached is in no mean yet; beyond the ring it is counted and left out."""
    with closing(open_on(accelerator, url)) as loader:
        losses = torch.ones(2 * ROWS, device=accelerator.name)
        loader.record(next(loader).step, losses[:ROWS])  # makes the ring
        batches = [next(loader) for _ in range(3)]
        accelerator.runtime.synchronize()
        with accelerator.held():
            accelerator.refuse_waits(refuse=True)
            try:
                for batch in batches:
                    loader.record(batch.step, losses[:ROWS])
                late = loader.stats().losses
            finally:
                accelerator.refuse_waits(refuse=False)
        assert sum(each.count for each in late.values()) == ROWS
        loader.record(next(loader).step, losses[:ROWS])
        assert sum(each.count for each in loader.stats().losses.values()) >= 4 * ROWS
        with accelerator.held():
            for batch in loader:
                loader.record(batch.step, losses[: len(batch.sources)])
                if batch.step > NUM_SLOTS + 20:
                    break
            assert loader.stats().num_lost_rows > 0
        recorded = loader.stats()
    assert sum(each.count for each in loader.stats().losses.values()) == (
        recorded.num_recorded_rows - recorded.num_lost_rows
    )
