"""Ctrl-C anywhere in a loader's own code, as in a notebook, whose user goes on afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from corpus_client import ArrayLoader, CorpusLoader
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer

INTERRUPTED = ("arrays.py", "loader.py", "pipeline.py", "stager.py")
PLAN: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12, "order": "sequential"}


@contextmanager
def interrupt_at(line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the so-many-th line of the loader's code that this thread runs."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in INTERRUPTED:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def open_array_loader(url: str) -> ArrayLoader:
    return ArrayLoader(url, rank=0, world_size=1, **PLAN)


def open_corpus_loader(url: str) -> CorpusLoader:
    return CorpusLoader(url, device="cpu", **PLAN)


@pytest.mark.parametrize("open_loader", [open_array_loader, open_corpus_loader])
def test_an_interrupt_anywhere_gives_no_batch_the_step_of_another(
    server: ReferenceServer, corpus: ReferenceCorpus, open_loader: Callable[[str], Any]
) -> None:
    with open_loader(server.url) as loader:
        num_interrupted = num_skipped = 0
        for line in range(1, 64):
            if line % 2:
                loader.seek(line)  # the code that starts fetching is interrupted too
            expected = loader.step
            try:
                with interrupt_at(line):
                    next(loader)
                    expected += 1
                    next(loader)
                    expected += 1
            except KeyboardInterrupt:
                num_interrupted += 1
            step = loader.step
            num_skipped += step - expected
            batch = next(loader)
            assert batch.step == step
            (plan,) = server.plans.values()
            assert np.array_equal(np.asarray(batch.tokens), tokens_of_step([corpus], plan, step))
    assert num_interrupted > 20
    assert num_skipped <= num_interrupted  # at most the batch that was being returned
