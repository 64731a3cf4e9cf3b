"""Bytes that must never change: a plan's id and the tokens of its steps outlive every version."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from corpus_client import CorpusLoader
from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Stage
from corpus_server.work import Budget
from tests.corpora import write_raw
from tests.serving import RunningServer

PLAN_ID = "07dfc42264bca300fee2415da359656b1d81d55436e357828709f026a1f6d419"
LOCATIONS = "8f16c756432bd7625177ba653b384684b9f1d753f4be49b00f985021f0552f39"
FIRST_BATCH = (
    "080c0f0c160c1d0c240c2b0c320c390c400c"
    "98099f09a609ad09b409bb09c209c909d009"
    "a80caf0cb60cbd0cc40ccb0cd20cd90ce00c"
    "100317031e0325032c0333033a0341034803"
)


def _write(folder: Path) -> Path:
    (folder / "golden").mkdir()
    for number, count in enumerate((1000, 700)):
        tokens = (np.arange(count) * 7 + number * 1000) % 65521
        write_raw(folder / "golden" / f"{number}.bin", tokens)
    return folder / "golden"


def test_a_plan_means_the_same_windows_for_ever(tmp_path: Path) -> None:
    plan = Plan(seq_len=8, seed=1337, stages=(Stage(global_batch_size=4, mixture={"golden": 1.0}),))
    with Catalog.open([CorpusSpec(name="golden", path=_write(tmp_path))]) as catalog:
        bound = catalog.bind(plan, Budget())
        assert bound.plan.id == PLAN_ID
        locations = bound.sampler.locate(0, count=100)
        assert hashlib.sha256(locations.astype("<i8").tobytes()).hexdigest() == LOCATIONS


def test_both_halves_agree_on_the_first_batch(tmp_path: Path) -> None:
    path = _write(tmp_path)
    with RunningServer({"golden": path}, tmp_path) as server:
        response = server.get("/v1/batches", corpus="golden", seq_len=8, batch_size=4, seed=1337, step=0)
        with CorpusLoader(
            server.url, corpus="golden", seq_len=8, global_batch_size=4, seed=1337, device="cpu"
        ) as loader:
            assert loader.plan_id == response.headers["Corpus-Plan"] == PLAN_ID
            tokens = next(loader).tokens.numpy()
    assert response.body.hex() == FIRST_BATCH
    assert tokens.astype("<u2").tobytes() == response.body
