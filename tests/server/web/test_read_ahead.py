"""A server reads ahead of its requests: pages of steps that nobody has asked for yet are in memory."""

from __future__ import annotations

import mmap
import re
import time
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.work import Budget
from tests.corpora import some_tokens, write_raw
from tests.pages import drop, resident_of
from tests.serving import RunningServer, wait_until

ROWS, SEQ_LEN = 32, 1024
STEP_BYTES = ROWS * (2 * (SEQ_LEN + 1) + mmap.PAGESIZE)
HORIZON = 4
BUDGET_BYTES = 4 * HORIZON * STEP_BYTES  # a reader gets a quarter
PARTS = ((0, 1, 0, 1), (1, 4, 0, 1), (5, 8, 0, 1), (5, 8, 1, 4), (900, 2, 0, 2))
"""Steps, ranks and world sizes that a test asks for: (step, count, rank, world_size)."""
QUERY = {"corpus": "web", "seq_len": SEQ_LEN, "batch_size": ROWS}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = write_raw(tmp_path / "web.bin", some_tokens(8_000_000))
    drop(path)
    return path


def bind(catalog: Catalog) -> BoundPlan:
    """Return the plan that QUERY spells."""
    return catalog.bind(
        Plan(seq_len=SEQ_LEN, stages=(Stage(global_batch_size=ROWS, mixture={"web": 1.0}),)), Budget()
    )


def pages_of(corpus: Path, steps: range) -> np.ndarray:
    """Return for each page of the file whether a window of the steps touches it."""
    touched = np.zeros(len(resident_of(corpus)), bool)
    with Catalog.open([CorpusSpec(name="web", path=corpus)]) as catalog:
        located = bind(catalog).sampler.locate(steps.start, count=len(steps)).reshape(-1, 2)
    for start in located[:, 1].tolist():
        touched[2 * start // mmap.PAGESIZE : (2 * (start + SEQ_LEN + 1) - 1) // mmap.PAGESIZE + 1] = True
    return touched


def read_ahead_bytes(server: RunningServer) -> float:
    text = server.get("/metrics").body.decode()
    found = re.search(r"^corpus_read_ahead_bytes_total ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_next_steps_of_a_rank_are_read_before_they_are_asked_for(
    corpus: Path, tmp_path: Path, workers: int
) -> None:
    arguments = ["--read-ahead-bytes", str(BUDGET_BYTES)]
    with RunningServer({"web": corpus}, tmp_path, workers=workers, arguments=arguments) as server:
        expected = pages_of(corpus, range(10, 11 + HORIZON))
        before = resident_of(corpus)  # what opening has read
        assert before.mean() < 0.5
        assert server.get("/v1/indices", **QUERY, step=500).status == 200  # reads nothing
        assert server.get("/v1/batches", **QUERY, step=10).status == 200
        num_bytes = (1 + HORIZON) * ROWS * (SEQ_LEN + 1) * 2
        wait_until(lambda: read_ahead_bytes(server) >= num_bytes)
        assert read_ahead_bytes(server) == num_bytes
        # Only most of the pages: a kernel that is short of memory leaves out some of what it is asked for.
        asked_for = expected & ~before
        wait_until(lambda: resident_of(corpus)[asked_for].mean() > 0.5)
        assert not (resident_of(corpus) & ~(expected | before)).any()


def test_no_more_is_read_ahead_than_the_budget_where_batches_grow(corpus: Path, tmp_path: Path) -> None:
    """Of step 20, a thousand times as large as those before it, nothing: it does not fit the budget."""
    arguments = ["--read-ahead-bytes", str(BUDGET_BYTES)]
    with RunningServer({"web": corpus}, tmp_path, arguments=arguments) as server:
        stages = [{"from_step": 20 * k, "global_batch_size": 1000**k, "mixture": {"web": 1}} for k in (0, 1)]
        plan = server.post_plan({"seq_len": SEQ_LEN, "stages": stages}).json()["id"]
        for step in range(20):
            assert server.get("/v1/batches", plan=plan, step=step).status == 200
        wait_until(lambda: read_ahead_bytes(server) == 20 * (SEQ_LEN + 1) * 2)
        time.sleep(0.1)
        assert read_ahead_bytes(server) == 20 * (SEQ_LEN + 1) * 2


def test_turned_off_only_what_is_asked_for_is_read(corpus: Path, tmp_path: Path) -> None:
    config = "[server]\nread_ahead_bytes = 0\n"
    with RunningServer({"web": corpus}, tmp_path, config=config) as server:
        expected = pages_of(corpus, range(10, 11))
        before = resident_of(corpus)
        for _ in range(3):
            assert server.get("/v1/batches", **QUERY, step=10).status == 200
        assert not (resident_of(corpus) & ~(expected | before)).any()
        assert read_ahead_bytes(server) == 0


@pytest.mark.parametrize("budget", ["0", "1", str(BUDGET_BYTES), str(2**30)])
def test_the_responses_are_the_same_however_far_it_reads_ahead(
    corpus: Path, tmp_path: Path, budget: str
) -> None:
    tokens = np.fromfile(corpus, np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, SEQ_LEN + 1)
    with Catalog.open([CorpusSpec(name="web", path=corpus)]) as catalog:
        sampler = bind(catalog).sampler
    drop(corpus)
    with RunningServer({"web": corpus}, tmp_path, arguments=["--read-ahead-bytes", budget]) as server:
        for step, count, rank, world_size in PARTS:
            part = {"count": count, "rank": rank, "world_size": world_size}
            response = server.get("/v1/batches", **QUERY, step=step, **part)
            located = sampler.locate(step, **part)
            assert np.array_equal(response.array(), windows[located[:, :, 1]])
