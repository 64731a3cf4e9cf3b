"""Order `olmo` holds the batches of OLMo-core's own loader, and of the first OLMo's, token for token."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from corpus_server.catalog import Catalog
from corpus_server.errors import InvalidParameter, InvalidPlan, ResponseTooLarge
from corpus_server.plan import Plan
from corpus_server.plan.orders import olmo
from corpus_server.plan.questions.diff import compare
from corpus_server.plan.questions.lookup import look_up
from corpus_server.plan.questions.usage import count_usage
from corpus_server.read import tables
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.reading import WindowReading, read_arrays
from corpus_server.read.tables import Tables
from corpus_server.work import Budget
from tests.megatron_rows import digest
from tests.olmo import CASES, GOLDEN, case_of, document, specs
from tests.olmo_rows import CORE, FIRST, Case, olmo_rows, some_case

THREE = case_of("three epochs over two ranks")


def all_rows(bound: BoundPlan) -> NDArray[np.integer]:
    """Return the rows of all steps: `(steps, rows, tokens)`."""
    count = bound.sampler.num_steps
    assert count is not None
    rows = bound.sampler.check_part(0, count=count)
    reading = WindowReading(bound, Budget(), step=0, count=count, rank=0, rows=rows)
    return np.concatenate([each.copy() for each in read_arrays(reading)]).reshape(count, rows, -1)


def of_ranks(rows: NDArray[np.integer], world_size: int) -> NDArray[np.integer]:
    """Return the rows of OLMo's ranks, `(ranks, steps, rows, tokens)`: rank k has every W-th, from k."""
    return np.stack([rows[:, rank::world_size] for rank in range(world_size)])


def served_rows(case: Case, folder: Path) -> NDArray[np.integer]:
    with Catalog.open(specs(case, folder)) as opened:
        return all_rows(opened.bind(Plan.from_json(document(case)), Budget()))


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_that_the_packages_made(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    rows = of_ranks(served_rows(case, tmp_path), case.world_size)
    assert rows[0, 0, :2].tolist() == CASES[name]["first"]
    assert (list(rows.shape), digest(rows)) == (CASES[name]["shape"], CASES[name]["sha256"])


@pytest.mark.parametrize("package", [CORE, FIRST])
@pytest.mark.filterwarnings("ignore")  # of the packages'
def test_the_rows_are_those_that_an_installed_package_makes(package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: only golden rows of {GOLDEN['writer']}")
    for seed in range(20):
        case, folder = some_case(seed, package), tmp_path / str(seed) / "own"
        folder.mkdir(parents=True)
        served = of_ranks(served_rows(case, folder.parent), case.world_size)
        own = olmo_rows(case, folder)
        np.testing.assert_array_equal(served, own, err_msg=f"some_case({seed}, {package!r})")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("olmo")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Catalog]:
    with Catalog.open(specs(THREE, folder)) as found:
        yield found


def bound_to(opened: Catalog, **changes: Any) -> BoundPlan:
    return opened.bind(Plan.from_json({**document(THREE), **changes}), Budget())


@pytest.fixture(scope="module")
def rows(opened: Catalog) -> NDArray[np.integer]:
    """All rows of the run."""
    return all_rows(bound_to(opened))


def test_an_epoch_holds_each_instance_at_most_once(opened: Catalog, rows: NDArray[np.integer]) -> None:
    bound = bound_to(opened)
    instances = sum(length // THREE.instance for length in THREE.lengths)
    steps = instances // THREE.batch_size
    assert bound.sampler.num_steps == 3 * steps == len(rows)
    assert bound.plan.to_json()["order"] == {
        "olmo": {"num_epochs": 3, "first_epoch": 1, "global_batch_size": 6}
    }
    for epoch in range(3):
        firsts = rows[epoch * steps : (epoch + 1) * steps, :, 0].reshape(-1).tolist()
        assert len(set(firsts)) == len(firsts) == steps * THREE.batch_size


def test_a_look_up_finds_every_row_that_holds_a_token(opened: Catalog, rows: NDArray[np.integer]) -> None:
    """Tokens of instances that an epoch leaves out, and of a file's end, are in fewer rows."""
    bound = bound_to(opened, skip_steps=[[4, 6]])
    numbers = np.arange(len(rows))
    seen = np.where((numbers >= 4) & (numbers < 6), -1, numbers - 2 * (numbers >= 6))
    for start, stop in [(0, 1), (17, 19), (195, 240), (198, 200), (0, sum(THREE.lengths))]:
        found = look_up(bound.sampler, "web", start, stop, Budget(), epochs=100)
        step, row = np.nonzero(((rows >= start) & (rows < stop)).any(axis=2))
        assert {(each.plan_step, each.row) for each in found.rows} == set(
            zip(step.tolist(), row.tolist(), strict=True)
        )
        assert [each.step for each in found.rows] == [
            None if seen[each.plan_step] < 0 else seen[each.plan_step] for each in found.rows
        ]
        for each in found.rows:
            assert start <= rows[each.plan_step, each.row, each.offset] < stop
    first = look_up(bound.sampler, "web", 0, 1, Budget(), epochs=1)
    assert [each.epoch for each in first.rows] == [0] * len(first.rows)


def test_a_path_that_comes_twice_is_found_twice(tmp_path: Path) -> None:
    case = case_of("files in another order, one twice")
    with Catalog.open(specs(case, tmp_path)) as catalog:
        bound = catalog.bind(Plan.from_json(document(case)), Budget())
        every = all_rows(bound)
        for token in (3, 99, 130, 200):
            found = look_up(bound.sampler, "web", token, token + 1, Budget(), epochs=9)
            step, row = np.nonzero((every == token).any(axis=2))
            wanted = sorted(zip(step.tolist(), row.tolist(), strict=True))
            assert sorted((each.plan_step, each.row) for each in found.rows) == wanted


def test_usage_counts_the_epochs_that_were_given(opened: Catalog) -> None:
    bound = bound_to(opened)
    used = count_usage(bound.sampler, 0, 26, Budget()).sources["web"]
    assert (used.rows, used.epochs) == (26 * 6, 2.0)


def test_two_plans_of_several_epochs_have_the_same_first_ones(opened: Catalog) -> None:
    one, more = bound_to(opened), bound_to(opened, order={"olmo": {"num_epochs": 2}})
    compared = compare(one.sampler, more.sampler, Budget())
    assert (compared.compared_until, compared.first_step) == (26, None)
    shifted = bound_to(opened, order={"olmo": {"first_epoch": 2}})
    assert all_rows(shifted).tolist() == all_rows(one)[13:26].tolist()


def test_steps_behind_the_last_epoch_are_refused(opened: Catalog) -> None:
    with pytest.raises(InvalidParameter, match="the plan's order ends after 39 steps, and step 39") as caught:
        bound_to(opened).sampler.check_part(39)
    assert caught.value.parameter == "step"


def test_a_corpus_needs_no_documents_and_a_table_is_kept(folder: Path, tmp_path: Path) -> None:
    built: list[object] = []
    for _ in range(2):
        with Catalog.open(specs(THREE, folder), tables=Tables(tmp_path)) as catalog:
            built.append(all_rows(catalog.bind(Plan.from_json(document(THREE)), Budget())).tolist())
        assert len(list(tmp_path.iterdir())) == 1
    assert built[0] == built[1]


STAGE = {"global_batch_size": 6, "mixture": {"web": 1}}


@pytest.mark.parametrize(
    ("changes", "parameter", "message"),
    [
        (
            {"stride": 3},
            "stride",
            "stride must be left out or seq_len + 1 (4) with order olmo, got 3",
        ),
        (
            {"order": {"olmo": {"max_target_sequence_length": 6}}},
            "order.olmo.max_target_sequence_length",
            "order.olmo.max_target_sequence_length must be a multiple of an instance's tokens, "
            "seq_len + 1 = 4, got 6",
        ),
        (
            {"stages": [STAGE, {**STAGE, "from_step": 5, "global_batch_size": 12}]},
            "stages[1].global_batch_size",
            "stages[1].global_batch_size must be 6 as in all of the plan, because an epoch of order olmo has "
            "whole batches, got 12",
        ),
        (
            {"stages": [{**STAGE, "mixture": {"web": 1, "code": 1}}]},
            "stages[].mixture",
            "stages[].mixture must be one corpus with order olmo, with the files of all paths, "
            "got ['code', 'web']",
        ),
        (
            {"stages": [{**STAGE, "exclude": {"web": [[0, 1]]}}]},
            "stages[0].exclude",
            "stages[0].exclude cannot be carried by order olmo: OLMo's instances have one length, and none "
            "has a substitute; leave it out, or use order shuffle",
        ),
        (
            {"order": {"olmo": {"shards": [0, 4]}}},
            "order.olmo.shards",
            "order.olmo.shards must be numbers of shards below 4, which corpus 'web' has, got 4",
        ),
        (
            {"order": {"olmo": {"shards": [0, -1]}}},
            "order.olmo.shards",
            "order.olmo.shards must be a list of 1 to 1048576 integers in [0, 1048576), got [0, -1]",
        ),
        (
            {"stages": [{**STAGE, "global_batch_size": 80}]},
            "stages[].global_batch_size",
            "corpus 'web' has 79 instances of 4 tokens, fewer than the 80 of a step",
        ),
    ],
)
def test_what_the_order_cannot_carry_is_refused(
    opened: Catalog, changes: dict[str, Any], parameter: str, message: str
) -> None:
    with pytest.raises(InvalidPlan) as caught:
        bound_to(opened, **changes)
    assert (caught.value.detail, caught.value.parameter) == (message, parameter)


def test_tables_that_are_too_large_are_refused(opened: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    assert olmo.MAX_BYTES == 16 * 2**30
    monkeypatch.setattr(olmo, "MAX_BYTES", 8 * 3 * 79 - 1)
    with pytest.raises(InvalidPlan, match="the tables of 3 epochs of 79 instances have 1896 bytes") as caught:
        bound_to(opened)
    assert caught.value.parameter == "order.olmo.num_epochs"


def test_a_plan_goes_on_with_the_same_batches(opened: Catalog) -> None:
    """A chain, whose later stages are checked, too."""
    plan = bound_to(opened).plan
    with pytest.raises(InvalidPlan, match="must be 6 as in all of the plan"):
        plan.order.settle(
            seq_len=plan.seq_len,
            stride=plan.stride,
            seed=plan.seed,
            stages=Plan.from_json({**document(replace(THREE, batch_size=3)), "order": "sequential"}).stages,
        )


def test_a_large_table_is_built_in_another_process(
    folder: Path, tmp_path: Path, rows: NDArray[np.integer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_MOST_IN_PROCESS", 0)
    with Catalog.open(specs(THREE, folder), tables=Tables(tmp_path)) as catalog:
        np.testing.assert_array_equal(all_rows(bound_to(catalog)), rows)


def test_a_table_that_does_not_fit_the_memory_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is built; a machine with the memory for it takes it."""
    needed = 24 * 3 * 79
    for memory in (needed - 1, needed):
        monkeypatch.setattr(tables, "memory_bytes", lambda memory=memory: memory)
        with Catalog.open(specs(THREE, folder), tables=Tables(tmp_path)) as catalog:
            if memory == needed:
                bound_to(catalog)
                return
            with pytest.raises(ResponseTooLarge, match=f"this one would take {needed}") as caught:
                bound_to(catalog)
        assert caught.value.remedy == "bind the plan on a machine with more memory"
        assert not list(tmp_path.iterdir())
