"""The instruments on a device: that they run. And what docs/gpu.md says about waiting."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from corpus_client.staging.ring import find_device
from corpus_client.tools import checks
from corpus_client.tools.app import app
from corpus_client.tools.copies import KINDS, host_memory
from corpus_client.tools.timing import Clock
from scripts.gpu_lib import full_slots, overlap
from scripts.gpu_lib.overlap import LOCKED, WAYS, Feed
from tests.client.cuda.conftest import Accelerator
from tests.client.reference_server import ReferenceServer

SIZE = 16 << 20


def test_transfer_measures_every_kind_of_memory(accelerator: Accelerator) -> None:
    sizes = ["--device", accelerator.name, "--sizes", "64KiB,4MiB"]
    done = CliRunner().invoke(app, ["transfer", *sizes, "--repeats", "3", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert {f"{kind} to device" for kind in KINDS} <= {each["name"] for each in report["measurements"]}
    assert report["missing"] == []


def test_batches_as_the_loader_sends_them_are_measured(accelerator: Accelerator) -> None:
    found = full_slots.measure(Clock(find_device(accelerator.name)), [1 << 16, 1 << 22], 3)
    assert [each["bytes"] for each in found] == [1 << 16, 1 << 16, 1 << 22, 1 << 22]


def test_a_non_blocking_copy_to_the_host_is_not_there_at_once(accelerator: Accelerator) -> None:
    there = torch.full((SIZE,), 7, dtype=torch.uint8, device=accelerator.name)
    here = torch.zeros(SIZE, dtype=torch.uint8).pin_memory()
    accelerator.runtime.synchronize()
    with accelerator.held():
        here.copy_(there, non_blocking=True)
        assert not (here.numpy() == 7).any()
    assert (here.numpy() == 7).all()


def test_registered_memory_is_sent_without_waiting_and_is_right(accelerator: Accelerator) -> None:
    device = find_device(accelerator.name)
    memory = host_memory("registered", SIZE, device)
    assert torch.equal(memory.to(device, non_blocking=True).cpu(), memory)
    assert "registered" in checks.check_transfers(device).found
    assert "4 MiB were page-locked" in checks.check_pinning(4 << 20, device).found


@pytest.mark.parametrize(
    "name", ["pageable", *LOCKED, pytest.param("dataloader", marks=pytest.mark.needs_cuda)]
)
def test_every_way_brings_the_same_windows(accelerator: Accelerator, name: str) -> None:
    tokens = np.random.default_rng(5).integers(0, 2**16, 5000, np.uint16)
    feed = Feed(tokens, rows=6, window=17, device=find_device(accelerator.name), workers=1)
    with closing(WAYS[name][1](feed)) as batches:
        for step, (inputs, targets) in zip(range(20), batches, strict=False):
            accelerator.sleep(5e-4)
            assert inputs.device.type == accelerator.name
            assert inputs.tolist() == feed[step][:, :-1].tolist()
            assert targets.tolist() == feed[step][:, 1:].tolist()


@pytest.mark.needs_cuda
def test_overlap_feeds_all_eight_ways(server: ReferenceServer) -> None:
    options = ["--step-ms", "2", "--batch", "4kB", "--seq-len", "16", "--steps", "4", "--rounds", "1"]
    done = CliRunner().invoke(overlap.app, [server.url, "--corpus", "web", *options, "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["outcomes"]) == 8
