"""The instruments with a real GPU: that they run, and what they say about waiting and reading too early."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from corpus_client.cli import app
from corpus_client.tools import device_copies, memcpy2d
from corpus_client.tools.feeds import Feed, TokenFile, opened
from corpus_client.tools.recording import Recorder
from corpus_client.tools.timing import open_meter
from tests.client.reference_server import ReferenceServer

pytestmark = pytest.mark.needs_cuda
SIZE = 16 << 20


def test_transfer_measures_every_section() -> None:
    done = CliRunner().invoke(app, ["transfer", "--sizes", "64KiB,4MiB", "--repeats", "3", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    sections = {each["section"] for each in report["measurements"]}
    assert sections == {"copies", "calls", "pieces", "strided", "widening", "waits", "concurrent", "loader"}
    assert report["read_too_early"]["right_after_waiting"]
    assert "a GPU" not in " ".join(report["missing"])


def test_what_waits_for_the_device_and_what_does_not() -> None:
    found = {
        each.name: each.waited for each in device_copies.waits(open_meter(torch.device("cuda")), SIZE, 5)
    }
    for name in (
        "tensor.item()",
        "tensor.cpu()",
        "tensor.tolist()",
        "if tensor:",
        "page-locked to device, blocking",
    ):
        assert found[name] is True, name
    for name in ("queueing a kernel", "page-locked to device, non_blocking=True"):
        assert found[name] is False, name


def test_a_non_blocking_copy_to_the_host_is_not_there_at_once() -> None:
    seen = device_copies.read_too_early(open_meter(torch.device("cuda")), SIZE)
    assert seen == {"right_at_once": False, "right_after_waiting": True}


def test_rows_apart_arrive_by_cudas_own_strided_copy() -> None:
    copy = memcpy2d.find(torch.device("cuda"))
    if copy is None:
        pytest.skip("torch has no CUDA runtime of its own in this process")
    source = torch.randint(0, 256, (9, 64), dtype=torch.uint8).pin_memory()
    target = torch.zeros(9, 40, dtype=torch.uint8, device="cuda")
    copy(target[:, :20], source[:, 3:23])
    torch.cuda.synchronize()
    assert torch.equal(target[:, :20].cpu(), source[:, 3:23])
    assert not target[:, 20:].any()


@pytest.mark.parametrize("name", ["pageable", "pinned", "pinned-async", "dataloader"])
def test_every_way_brings_the_same_windows(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokens.bin"
    np.random.default_rng(5).integers(0, 2**16, 5000, np.uint16).tofile(path)
    tokens = TokenFile(path=path, dtype="uint16", rows=6, window=17)
    device = torch.device("cuda")
    feed = Feed(tokens=tokens, device=device, record=Recorder(device, active=True), workers=1)
    with opened(name, feed) as batches:
        for step, batch in zip(range(20), batches, strict=False):
            torch.cuda._sleep(1_000_000)
            assert batch.is_cuda
            assert batch.tolist() == tokens.batch(step).to(torch.int64).tolist()
    assert {"bus"} <= {span.lane for span in feed.record.spans()}


def test_overlap_feeds_all_seven_ways(server: ReferenceServer, tmp_path: Path) -> None:
    options = ["--step-ms", "2", "--batch", "4kB", "--seq-len", "16", "--steps", "4", "--rounds", "1"]
    plots = ["--plots", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, ["overlap", server.url, "--corpus", "web", *options, *plots])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["outcomes"]) == 7
