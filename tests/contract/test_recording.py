"""Losses of rows: means by source, and files from which every row of a run can be read."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet  # type: ignore[import-untyped]
import pytest
import torch

from corpus_client import Batch, CorpusLoader, SourceLoss, errors
from tests.loaders import open_loader
from tests.serving import RunningServer, environment

MIXTURE = {"web": 0.6, "mixed": 0.3, "text": 0.1}
PLAN: dict[str, Any] = {
    "seq_len": 8,
    "stages": [{"from_step": 0, "global_batch_size": 24, "mixture": MIXTURE}],
}


def open_recorded(url: str, **options: Any) -> CorpusLoader:
    return open_loader(
        url, **{"plan": PLAN, "sources": True, "device": "cpu", "rank": 0, "world_size": 1, **options}
    )


def losses_of(batch: Batch, *, rank: int = 0) -> list[float]:
    """Return a loss that names its row: the step, and thousandths of the row."""
    rows = len(batch.sources)
    return [batch.step + (rank * rows + n) / 1000 for n in range(rows)]


def read(folder: Path) -> list[dict[str, Any]]:
    return [row for each in sorted(folder.glob("[!.]*")) for row in parquet.read_table(each).to_pylist()]


@pytest.mark.parametrize("kind", ["list", "numpy", "float64", "bfloat16", "with a gradient"])
def test_means_are_of_the_last_rows_of_each_source(server: RunningServer, kind: str) -> None:
    """Of rows whose loss is finite; the other losses are drawn so that any type holds them.

    Steps are more than wait to be looked at, and the trainer uses the memory of its losses again.
    """
    draw, expected = np.random.default_rng(3), dict[str, list[float]]()
    with open_recorded(server.url) as loader:
        for _ in range(300):
            batch = next(loader)
            drawn = draw.integers(0, 64, 24) / 8
            drawn[draw.random(24) < 0.01] = draw.choice([math.nan, math.inf])
            losses: Any = {
                "list": lambda drawn=drawn: drawn.tolist(),
                "numpy": lambda drawn=drawn: drawn,
                "float64": lambda drawn=drawn: torch.tensor(drawn),
                "bfloat16": lambda drawn=drawn: torch.tensor(drawn).to(torch.bfloat16),
                "with a gradient": lambda drawn=drawn: torch.tensor(drawn, requires_grad=True),
            }[kind]()
            loader.record(batch.step, losses)
            if isinstance(losses, torch.Tensor):
                losses.detach().fill_(-1)
            for number, loss in zip(batch.sources.tolist(), drawn.tolist(), strict=True):
                if math.isfinite(loss):
                    expected.setdefault(loader.sources[number], []).append(loss)
        stats = loader.stats()
    assert len(expected["web"]) > 1024 > len(expected["text"])
    assert stats.losses == {
        name: SourceLoss(mean=pytest.approx(np.mean(each[-1024:])), count=len(each))
        for name, each in expected.items()
    }
    assert (stats.num_recorded_rows, stats.num_written_rows, stats.num_lost_rows) == (7200, 0, 0)


def test_files_hold_every_row_of_a_run_that_changes_its_ranks_and_its_plan(
    server: RunningServer, tmp_path: Path
) -> None:
    """Three ranks up to step 6, then two from step 4 on, which extend the plan before step 8."""
    expected = dict[tuple[int, int], list[tuple[float, str]]]()
    states = []
    for world_size, first, last in ((3, 0, 6), (2, 4, 10)):
        for rank in range(world_size):
            place = {"rank": rank, "world_size": world_size, "record_dir": tmp_path}
            with open_recorded(server.url, **place) as loader:
                if first:
                    loader.load_state_dict(states[first - 1])
                while loader.step < last:
                    if loader.step == 8:
                        loader.extend({"mixture": {"web": 1}, "global_batch_size": 12})
                    batch = next(loader)
                    if not rank:
                        states.append(batch.state_after())
                    losses = losses_of(batch, rank=rank)
                    loader.record(batch.step, losses)
                    for n, loss in enumerate(losses):
                        row = rank * len(losses) + n
                        name = loader.sources[int(batch.sources[n])]
                        expected.setdefault((batch.step, row), []).append((loss, name))
    found = dict[tuple[int, int], list[tuple[float, str]]]()
    for row in read(tmp_path):
        place = row["step"], row["row"]
        found.setdefault(place, []).append((pytest.approx(row["loss"], abs=1e-5), row["source"]))
    assert expected == found
    described = [parquet.read_schema(each).metadata for each in sorted(tmp_path.iterdir())]
    assert len({str(each) for each in described}) == 3 + 2  # a plan that goes on in another begins no file


def test_a_disk_that_is_full_for_a_while_costs_no_step(server: RunningServer, tmp_path: Path) -> None:
    """No file may grow in the middle of the run; each write fails then, as on a full disk."""
    program = f"""
import logging, resource, time
from unittest import mock
from corpus_client.recording import files
from tests.contract.test_recording import open_recorded, losses_of
logging.basicConfig(format="%(message)s")
with mock.patch.object(files.RowWriter.__init__, "__kwdefaults__",
                       {{"part_rows": 96, "flush_seconds": 0.01, "queued_rows": 10**6}}):
    loader = open_recorded({server.url!r}, record_dir={str(tmp_path)!r})
for step in range(60):
    if step in (20, 40):
        while (stats := loader.stats()).num_written_rows + stats.num_lost_rows < 24 * step:
            time.sleep(0.01)
        limit = 64 if step == 20 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    loader.record(step, losses_of(next(loader)))
loader.close()
stats = loader.stats()
print(stats.num_batches, stats.num_recorded_rows, stats.num_written_rows, stats.num_lost_rows)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "60 1440 960 480\n"
    said = [line for line in done.stderr.splitlines() if "tokenizers" not in line]
    assert len(said) == 2, said
    assert "File too large" in done.stderr
    assert sorted({row["step"] for row in read(tmp_path)}) == [*range(20), *range(40, 60)]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("step", "losses", "message"),
    [
        (0, [1.0] * 23, r"one floating-point number for each of the 24 rows of step 0, got .* \(23,\)"),
        (0, torch.ones(24, 1), r"got torch.float32 of shape \(24, 1\); torch.cat joins"),
        (0, torch.ones(24, dtype=torch.int64), "got torch.int64 of shape"),
        (0, ["much"] * 24, "losses must be numbers, got .'much'"),
        (2, [1.0] * 24, r"one of the last 64 that the loader yielded .* \(0 to 1\), got 2"),
        ([torch.ones(24)], [1.0] * 24, r"one of the last 64 .*, got list; pass batch.step"),  # a batch is one
    ],
)
def test_wrong_losses_are_refused(server: RunningServer, step: Any, losses: Any, message: str) -> None:
    with open_recorded(server.url) as loader:
        next(loader), next(loader)
        with pytest.raises(errors.InvalidArgument, match=message):
            loader.record(step, losses)
        loader.record(1, [0.5] * 24)
        loader.record(0, [0.5] * 24)
        with pytest.raises(errors.InvalidArgument, match=r"\(none\), got 1"):
            loader.record(1, [0.5] * 24)
    with pytest.raises(errors.LoaderClosed):
        loader.record(0, [0.5] * 24)


def test_losses_without_sources_are_refused(server: RunningServer, tmp_path: Path) -> None:
    with open_recorded(server.url, sources=False) as loader:
        next(loader)
        with pytest.raises(errors.InvalidArgument, match="pass sources=True to CorpusLoader"):
            loader.record(0, [1.0] * 24)
        assert loader.stats().losses == {}


def test_a_folder_for_losses_brings_the_sources_it_needs(server: RunningServer, tmp_path: Path) -> None:
    with open_recorded(server.url, sources=False, record_dir=tmp_path) as loader:
        next(loader)
        loader.record(0, [1.0] * 24)
    assert sum(len(parquet.read_table(path)) for path in tmp_path.glob("*.parquet")) == 24


def test_the_oldest_step_that_is_not_recorded_is_forgotten(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with open_recorded(server.url) as loader, caplog.at_level(logging.WARNING):
        for _ in range(70):
            next(loader)
        loader.record(6, [1.0] * 24)
        with pytest.raises(errors.InvalidArgument, match=r"\(7 to 69\), got 5"):
            loader.record(5, [1.0] * 24)
    assert caplog.records == []
