"""The instruments with a real GPU: that they run. And what docs/gpu.md says about waiting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from corpus_client.__main__ import make_app
from corpus_client.doctor import host
from corpus_client.tools.timing import Clock
from corpus_client.tools.transfer import KINDS, host_memory
from scripts.gpu_lib import full_slots, overlap
from scripts.gpu_lib.feeds import LOCKED, WAYS, Feed
from tests.client.reference_server import ReferenceServer

pytestmark = pytest.mark.needs_cuda
SIZE = 16 << 20


def test_transfer_measures_every_kind_of_memory() -> None:
    done = CliRunner().invoke(make_app(), ["transfer", "--sizes", "64KiB,4MiB", "--repeats", "3", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert {f"{kind} to device" for kind in KINDS} <= {each["name"] for each in report["measurements"]}
    assert report["missing"] == []


def test_batches_as_the_loader_sends_them_are_measured() -> None:
    found = full_slots.measure(Clock(torch.device("cuda")), [1 << 16, 1 << 22], 3)
    assert [each["bytes"] for each in found] == [1 << 16, 1 << 16, 1 << 22, 1 << 22]


def queue_work() -> None:
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # cycles: some 50 ms


def test_what_waits_for_the_device_and_what_does_not() -> None:
    """docs/gpu.md names these operations; a queue of work shows which of them hold the CPU."""
    locked = host_memory("registered", SIZE, torch.device("cuda"))
    small = torch.ones(9, device="cuda")
    waiting: dict[str, Callable[[], object]] = {
        "item": lambda: small[0].item(),
        "tolist": small.tolist,
        "cpu": small.cpu,
        "if": lambda: bool(small[0]),
        "mask": lambda: small[small > 0],
        "nonzero": small.nonzero,
        "list": lambda: torch.tensor([1.0], device="cuda"),
        "blocking": lambda: locked.to("cuda"),
    }
    free: dict[str, Callable[[], object]] = {
        "kernel": lambda: small.add_(0),
        "locked": lambda: locked.to("cuda", non_blocking=True),
    }
    for operations, waits in ((waiting, True), (free, False)):
        for name, operation in operations.items():
            operation()
            queue_work()
            began = time.perf_counter()
            operation()
            assert (time.perf_counter() - began > 0.02) == waits, name


def test_a_non_blocking_copy_to_the_host_is_not_there_at_once() -> None:
    there, here = (
        torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda"),
        torch.zeros(SIZE, dtype=torch.uint8),
    )
    here = here.pin_memory()
    queue_work()
    here.copy_(there, non_blocking=True)
    assert not (here.numpy() == 7).any()
    torch.cuda.synchronize()
    assert (here.numpy() == 7).all()


@pytest.mark.parametrize(("kind", "pinned"), [("pageable", False), ("torch-pinned", True)])
def test_memory_is_of_the_kind_that_it_says(kind: Any, pinned: bool) -> None:
    assert host_memory(kind, 4096, torch.device("cuda")).is_pinned() == pinned


def test_registered_memory_is_sent_without_waiting_and_is_right() -> None:
    memory = host_memory("registered", SIZE, torch.device("cuda"))
    assert torch.equal(memory.to("cuda", non_blocking=True).cpu(), memory)
    assert "registered" in host.check_transfers(torch.device("cuda")).found
    assert "4 MiB were page-locked" in host.check_pinning(4 << 20, torch.device("cuda")).found


@pytest.mark.parametrize("name", ["pageable", *LOCKED, "dataloader"])
def test_every_way_brings_the_same_windows(name: str) -> None:
    tokens = np.random.default_rng(5).integers(0, 2**16, 5000, np.uint16)
    feed = Feed(tokens, rows=6, window=17, device=torch.device("cuda"), workers=1)
    with closing(WAYS[name].run(feed)) as batches:
        for step, (inputs, targets) in zip(range(20), batches, strict=False):
            torch.cuda._sleep(1_000_000)
            assert inputs.is_cuda
            assert inputs.tolist() == feed[step][:, :-1].tolist()
            assert targets.tolist() == feed[step][:, 1:].tolist()


def test_overlap_feeds_all_eight_ways(server: ReferenceServer) -> None:
    options = ["--step-ms", "2", "--batch", "4kB", "--seq-len", "16", "--steps", "4", "--rounds", "1"]
    done = CliRunner().invoke(overlap.app, [server.url, "--corpus", "web", *options, "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["outcomes"]) == 8
