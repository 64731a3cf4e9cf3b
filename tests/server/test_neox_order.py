"""Order `neox` holds the rows of GPT-NeoX's own datasets, token for token."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from corpus_server.catalog import Catalog
from corpus_server.plan import Plan
from corpus_server.plan.questions.lookup import look_up
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.reading import WindowReading, read_arrays
from corpus_server.work import Budget
from tests.megatron import names, specs
from tests.megatron_rows import Case, digest
from tests.neox import CASES, GOLDEN, document
from tests.neox_rows import neox_rows, some_case


def all_rows(bound: BoundPlan) -> NDArray[np.integer]:
    """Return the rows of all steps: `(steps * rows, seq_len + 1)`."""
    count = bound.sampler.num_steps
    assert count is not None
    rows = bound.sampler.check_part(0, count=count)
    reading = WindowReading(bound, Budget(), step=0, count=count, rank=0, rows=rows)
    return np.concatenate([each.copy() for each in read_arrays(reading)]).reshape(-1, reading.unit_tokens)


def served_rows(case: Case, folder: Path) -> NDArray[np.integer]:
    with Catalog.open(specs(case, folder)) as opened:
        return all_rows(opened.bind(Plan.from_json(document(case)), Budget()))


def case_of(name: str) -> Case:
    return Case(**CASES[name]["case"])


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_that_gpt_neox_made(name: str, tmp_path: Path) -> None:
    rows = served_rows(case_of(name), tmp_path)
    assert rows[:2].tolist() == CASES[name]["first"]
    assert (len(rows), digest(rows)) == (CASES[name]["num_rows"], CASES[name]["sha256"])


@pytest.mark.skipif(
    "CORPUS_GPT_NEOX" not in os.environ,
    reason=f"CORPUS_GPT_NEOX names no folder of its source: only golden rows of {GOLDEN['writer']}",
)
@pytest.mark.filterwarnings("ignore")  # of GPT-NeoX's
def test_the_rows_are_those_that_gpt_neox_makes(tmp_path: Path) -> None:
    for seed in range(20):
        case, folder = some_case(seed), tmp_path / str(seed) / "own"
        folder.mkdir(parents=True)
        served = served_rows(case, folder.parent)
        own = neox_rows(case, Path(os.environ["CORPUS_GPT_NEOX"]), folder)
        np.testing.assert_array_equal(served, own, err_msg=f"some_case({seed})")


def test_a_dataset_ends_a_sample_early_as_gpt_neoxs_does(tmp_path: Path) -> None:
    """Of four samples that are asked for and drawn, three are given; GPT-NeoX would begin anew."""
    case = case_of("the last sample is not given")
    assert (case.num_samples, len(served_rows(case, tmp_path))) == (4, 3)


def test_a_look_up_finds_every_row_that_holds_a_token(tmp_path: Path) -> None:
    case = case_of("three paths")
    with Catalog.open(specs(case, tmp_path)) as opened:
        bound = opened.bind(Plan.from_json(document(case, 5)), Budget())
        rows = all_rows(bound)
        for source, name in enumerate(names(case)):
            first = int(case.tokens(source)[0])
            for start, stop in [(0, 1), (17, 19), (0, len(case.tokens(source)))]:
                found = look_up(bound.sampler, name, start, stop, Budget(), epochs=100)
                held = ((rows >= first + start) & (rows < first + stop)).any(axis=1)
                assert [5 * each.step + each.row for each in found.rows if each.step is not None] == (
                    np.flatnonzero(held).tolist()
                )
