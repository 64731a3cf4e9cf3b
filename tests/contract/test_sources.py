"""The source of each row, from the server to the batch, by every way that a batch comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import ArrayLoader, Batch, CorpusIterableDataset, CorpusLoader, errors
from tests.conftest import ServedCorpus
from tests.loaders import grouped, open_loader
from tests.reference import ReferencePlan
from tests.serving import RunningServer

PLAN: dict[str, Any] = {
    "seq_len": 16,
    "seed": 7,
    "stages": [
        {"from_step": 0, "global_batch_size": 15, "mixture": {"web": 0.6, "mixed": 0.4}},
        {"from_step": 9, "global_batch_size": 18, "mixture": {"text": 0.5, "web": 0.5}, "seq_len": 8},
    ],
    "skip_steps": [[4, 6]],
}
SOURCES = ("mixed", "web", "text")  # in order of first use; a mixture is in order of names
NUM_STEPS = 20

Corpora = dict[str, ServedCorpus]


Expected = Callable[..., list[int]]


@pytest.fixture(scope="module")
def expected(corpora: Corpora) -> Expected:
    """Return the sources of a step's rows by the slow reference."""
    plan = ReferencePlan(PLAN, {name: [len(each) for each in corpora[name].shards] for name in SOURCES})

    def sources(step: int, rank: int = 0, world_size: int = 1) -> list[int]:
        rows = plan.global_batch_size(step) // world_size
        return [SOURCES.index(plan.window(step, row)[0]) for row in range(rank * rows, (rank + 1) * rows)]

    return sources


def of_plan(url: str, **options: Any) -> CorpusLoader:
    return open_loader(url, plan=PLAN, device="cpu", **{"rank": 0, "world_size": 1, **options})


@pytest.mark.parametrize("way", ["batches", "local", "few slots", "as stored", "traced", "unverified"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_row_says_its_source(
    corpora: Corpora, server: RunningServer, expected: Expected, way: str, world_size: int
) -> None:
    """The tokens are those of a loader that does not ask."""
    options: dict[str, Any] = {
        "batches": {},
        "local": {"local_root": {name: corpora[name].path for name in SOURCES}},
        "few slots": {"prefetch_bytes": 3 << 12},
        "as stored": {"dtype": None},
        "traced": {"trace_steps": 5},
        "unverified": {"verify": False},
    }[way]
    for rank in range(world_size):
        part = {"rank": rank, "world_size": world_size, "num_steps": NUM_STEPS}
        with (
            of_plan(server.url, sources=True, **part, **options) as loader,
            of_plan(server.url, **part) as plain,
        ):
            assert loader.sources == SOURCES
            for batch, other in zip(loader, plain, strict=True):
                wanted = expected(batch.step, rank, world_size)
                assert batch.sources.dtype == torch.int64
                assert batch.sources.tolist() == wanted
                assert batch.tokens.tolist() == other.tokens.tolist()
                assert batch.state_after() == other.state_after()
            assert loader.peek(11).sources.tolist() == expected(11, rank, world_size)


def test_arrays_say_their_sources(expected: Expected, server: RunningServer) -> None:
    part = {"rank": 1, "world_size": 3}
    with ArrayLoader(server.url, plan=PLAN, sources=True, num_steps=NUM_STEPS, **part) as loader:
        for batch in loader:
            assert batch.sources is not None
            assert (batch.sources.dtype, batch.sources.tolist()) == (
                np.uint16,
                expected(batch.step, **part),
            )
        found = loader.peek(12).sources
        assert found is not None
        assert found.tolist() == expected(12, **part)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_sources_pass_through_a_dataloader(
    expected: Expected, server: RunningServer, num_workers: int
) -> None:
    dataset = CorpusIterableDataset(
        server.url, sources=True, num_steps=12, **grouped({"plan": PLAN, "rank": 0, "world_size": 1})
    )
    batches: list[Batch] = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert [batch.sources.tolist() for batch in batches] == [expected(step) for step in range(12)]


def test_parts_and_copies_of_a_batch_keep_the_sources(expected: Expected, server: RunningServer) -> None:
    """Those of a row are the same in every slice of it."""
    options = {"sources": True, "context_parallel": (1, 2), "context_order": "zigzag"}
    with of_plan(server.url, **options) as loader:
        inputs, targets = torch.empty(2, 15, 8, dtype=torch.int64)
        batch = loader.next_into(inputs, targets)
        assert batch.sources.tolist() == expected(0)
        batch = next(loader)
    wanted = expected(1)
    parts = [source for part in batch.split(5) for source in part.sources.tolist()]
    moved = batch.detached(copy=True).to("cpu", dtype=torch.int32)
    assert parts == batch.sources.tolist() == moved.sources.tolist() == wanted
    assert (moved.sources.dtype, moved.inputs.dtype) == (torch.int64, torch.int32)


def test_a_batch_without_sources_says_how_to_get_them(server: RunningServer) -> None:
    with of_plan(server.url) as loader, pytest.raises(errors.InvalidArgument, match="pass sources=True"):
        _ = next(loader).sources


def test_sources_count_in_the_memory_budget(server: RunningServer) -> None:
    """Rows of one input: their sources are half as large as their tokens."""
    plan = {"seq_len": 1, "stages": [{"from_step": 0, "global_batch_size": 1024, "mixture": {"web": 1}}]}
    sizes = []
    for sources in (False, True):
        with open_loader(
            server.url, plan=plan, device="cpu", rank=0, world_size=1, sources=sources, prefetch_bytes=1 << 16
        ) as loader:
            next(loader)
            sizes.append(loader.prepared.sizes.batch_bytes)
            assert loader.stats().slot_bytes <= 1 << 16
    assert sizes == [4096, 6144]


def test_one_pass_over_several_validation_sets(corpora: Corpora, server: RunningServer) -> None:
    """Each source gives its rows in file order, the same in every pass."""
    mixture = {"web": 1, "text": 1, "mixed": 2}
    plan = {
        "seq_len": 8,
        "order": "sequential",
        "stages": [{"from_step": 0, "global_batch_size": 12, "mixture": mixture}],
    }
    passes: list[dict[str, list[Any]]] = []
    with open_loader(
        server.url, plan=plan, device="cpu", rank=0, world_size=1, sources=True, num_steps=10
    ) as loader:
        for _ in range(2):
            loader.seek(0)
            found: dict[str, list[Any]] = {name: [] for name in loader.sources}
            for batch in loader:
                for number, row in zip(batch.sources.tolist(), batch.tokens.tolist(), strict=True):
                    found[loader.sources[number]].append(row)
            passes.append(found)
    assert passes[0] == passes[1]
    assert {name: len(rows) > 20 for name, rows in passes[0].items()} == dict.fromkeys(mixture, True)
    for name, rows in passes[0].items():
        shards = corpora[name].shards
        windows = [each[at : at + 9] for each in shards for at in range(0, len(each) - 8, 8)]
        assert rows == [window.tolist() for window in windows[: len(rows)]]
