"""What `scripts/gpu` measures of feeding a device, run for real on the CPU, with a real server for (e)."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import pytest
import torch
from typer.testing import CliRunner

from corpus_client.tools.timing import Clock
from scripts.gpu_lib import full_slots, overlap
from scripts.gpu_lib.full_slots import Pair
from scripts.gpu_lib.overlap import LOCKED, WAYS, Feed, TrainStep
from tests.client.conftest import make_corpus
from tests.client.reference_server import ReferenceServer

run = partial(CliRunner().invoke, overlap.app, env={"COLUMNS": "500"})
pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--step-ms", "0.5", "--batch", "4kB", "--seq-len", "16",
        "--steps", "3", "--rounds", "1", "--workers", "1"]  # fmt: skip


@pytest.fixture
def tokens() -> npt.NDArray[np.uint16]:
    return np.random.default_rng(5).integers(0, 2**16, 5000, np.uint16)


@pytest.fixture
def feed(tokens: npt.NDArray[np.uint16]) -> Feed:
    return Feed(tokens, rows=6, window=17, device=CPU, workers=1)


@pytest.fixture
def sample(feed: Feed) -> Pair:
    return feed.send(feed[0], non_blocking=False)


@pytest.mark.parametrize("name", ["pageable", *LOCKED, "dataloader"])
def test_every_way_brings_the_same_windows(feed: Feed, tokens: npt.NDArray[np.uint16], name: str) -> None:
    with closing(WAYS[name][1](feed)) as batches:
        for step, (inputs, targets) in enumerate(islice(batches, 5)):
            starts = np.random.default_rng(step).integers(0, 5000 - 16, 6)
            assert inputs.dtype == torch.int64
            assert inputs.tolist() == [tokens[start : start + 16].tolist() for start in starts]
            assert targets.tolist() == [tokens[start + 1 : start + 17].tolist() for start in starts]


def test_a_step_reads_every_token(sample: Pair) -> None:
    step = TrainStep(Clock(CPU), sample, 0.002)
    for _ in range(60):
        step(sample)
    assert step.token_sum.item() == 60 * sum(int(each.sum()) for each in sample)


def test_json_for_machines_with_a_server() -> None:
    with ReferenceServer([make_corpus()]) as server:
        done = run([*TINY, server.url, "--corpus", "web", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    names = ["pageable", "dataloader", "corpus-loader", "full-slots", "constant"]
    assert [each["name"] for each in report["outcomes"]] == names
    assert (report["rows"], report["seq_len"], report["batch_bytes"]) == (117, 16, 117 * 17 * 2)
    for each in report["outcomes"]:
        assert each["seconds"]["repeats"] == 3
        assert 0 < each["seconds"]["median"] <= each["seconds"]["p90"]
    assert report["outcomes"][-1]["stall"]["median"] == 0
    [missing] = report["missing"]
    assert missing.startswith("(b) and (c): on the CPU nothing is page-locked")


@pytest.mark.parametrize("dtype", [None, torch.int64])
def test_full_slots_bring_what_lies_in_them(dtype: torch.dtype | None) -> None:
    stored = torch.from_numpy(np.random.default_rng(1).integers(0, 2**16, (6, 17), np.uint16))
    with full_slots.full_slots(CPU, stored, dtype) as take:
        for _ in range(1500):  # more than all slots hold
            inputs, targets = take()
        assert inputs.dtype == (dtype or torch.uint16)  # as stored it is slot memory: read within the block
        assert inputs.tolist() == stored[:, :-1].tolist()
        assert targets.tolist() == stored[:, 1:].tolist()
