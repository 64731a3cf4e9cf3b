"""What a training step is made of meets the loader: graphs, compiled code, measurements."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from corpus_client import CorpusLoader, errors
from corpus_client.staging import ring
from tests.client.cuda.conftest import Accelerator
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step

MakeLoader = Callable[..., CorpusLoader]


def score(tokens: torch.Tensor) -> torch.Tensor:
    """`(rows,)`: depends on every token and its place."""
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return (tokens * places).sum(dim=1)


def expected_score(corpus: ReferenceCorpus, loader: CorpusLoader, step: int) -> list[int]:
    tokens = tokens_of_step(corpus, loader.plan, step).astype(np.int64)
    return (tokens * np.arange(1, tokens.shape[1] + 1)).sum(axis=1).tolist()


@pytest.mark.needs_cuda
def test_captured_step_reads_tensors_that_the_loader_fills(
    make_loader: MakeLoader, corpus: ReferenceCorpus
) -> None:
    """Captured in mid-run, with the fetcher busy: it must not touch the device, the mode is global."""
    loader = make_loader(device="cuda", order="shuffle", prefetch_bytes=1 << 13, num_steps=300)
    inputs, targets = (torch.zeros(12, 16, dtype=torch.int64, device="cuda") for _ in range(2))
    loader.next_into(inputs, targets)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            score(inputs) + score(targets)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = score(inputs) + score(targets)
        time.sleep(0.2)  # the fetcher goes on meanwhile
    results = []
    for _ in range(299):
        batch = loader.next_into(inputs, targets)
        graph.replay()
        results.append((batch.step, result.clone()))
    places = np.arange(1, 17)
    for step, found in results:
        tokens = tokens_of_step(corpus, loader.plan, step).astype(np.int64)
        assert found.tolist() == ((tokens[:, :-1] + tokens[:, 1:]) * places).sum(axis=1).tolist()


@pytest.mark.needs_cuda
def test_batch_asked_for_during_a_capture_is_refused_and_the_capture_goes_on(
    make_loader: MakeLoader, corpus: ReferenceCorpus
) -> None:
    loader = make_loader(device="cuda")
    static = torch.zeros_like(next(loader).tokens)
    score(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(errors.InvalidArgument, match="while a CUDA graph is being captured"):
            next(loader)
        result = score(static)
    batch = next(loader)
    assert batch.step == 1
    static.copy_(batch.tokens)
    graph.replay()
    assert result.tolist() == expected_score(corpus, loader, 1)


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_step_gets_the_same_tokens(
    make_loader: MakeLoader, corpus: ReferenceCorpus, mode: str
) -> None:
    """`reduce-overhead` captures graphs by itself, in the first steps, between two batches."""
    pytest.importorskip("triton")
    torch.compiler.reset()
    compiled = torch.compile(score, mode=mode, fullgraph=True)
    loader = make_loader(device="cuda", order="shuffle", num_steps=60, prefetch_bytes=1 << 14)
    for batch in loader:
        assert compiled(batch.tokens).tolist() == expected_score(corpus, loader, batch.step)


@pytest.mark.parametrize("stalls", [False, True], ids=["", "a machine that stalls"])
def test_copies_are_measured_on_the_device(
    make_loader: MakeLoader,
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stalls: bool,
) -> None:
    calls = count()

    def stalled_clock() -> float:
        if next(calls) == 1:
            time.sleep(0.3)
        return time.perf_counter()

    loader = make_loader(device=accelerator.name, trace_steps=50, num_steps=100)
    started = time.perf_counter()
    for _ in loader:
        accelerator.sleep(1e-4)
    accelerator.runtime.synchronize()
    ended = time.perf_counter()
    stats = loader.stats()
    assert 0 < stats.transfer_seconds < ended - started
    assert 0 <= stats.stall_seconds < ended - started
    with monkeypatch.context() as patch:
        if stalls:
            patch.setattr(ring, "time", SimpleNamespace(perf_counter=stalled_clock))
        loader.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    transfers = [event for event in events if event["name"] == "transfer"]
    assert transfers
    for event in transfers:
        assert started - 0.01 < event["ts"] / 1e6
        assert (event["ts"] + event["dur"]) / 1e6 < ended + 0.01


@pytest.mark.needs_cuda
def test_ranges_for_nsight_are_accepted(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    loader = make_loader(device="cuda", nvtx=True, num_steps=20)
    for batch in loader:
        expected = tokens_of_step(corpus, loader.plan, batch.step)
        assert np.array_equal(batch.tokens.cpu().numpy(), expected)
