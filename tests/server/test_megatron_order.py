"""Order `megatron` holds the rows of Megatron-Core's own datasets, token for token."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from corpus_server.catalog import Catalog
from corpus_server.errors import (
    FingerprintMismatch,
    InvalidParameter,
    InvalidPlan,
    ReadFailed,
    UnknownDocument,
)
from corpus_server.plan import Plan
from corpus_server.plan.questions.lookup import look_up
from corpus_server.plan.questions.usage import count_usage
from corpus_server.read import tables
from corpus_server.read.beside import RowSources
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.reading import WindowReading, read_arrays
from corpus_server.read.tables import Tables
from corpus_server.work import Budget
from tests.corpora import spec, write_megatron, write_raw
from tests.megatron import CASES, THREE, document, names, specs
from tests.megatron_rows import Case, digest, megatron_rows, some_case


def catalog(case: Case, folder: Path, **options: Any) -> Catalog:
    return Catalog.open(specs(case, folder), **options)


def all_rows(bound: BoundPlan) -> NDArray[np.integer]:
    """Return the rows of all steps: `(steps * rows, seq_len + 1)`."""
    count = bound.sampler.num_steps
    rows = bound.sampler.check_part(0, count=count)
    reading = WindowReading(bound, Budget(), step=0, count=count, rank=0, rows=rows)
    return np.concatenate([each.copy() for each in read_arrays(reading)]).reshape(-1, reading.unit_tokens)


def served_rows(case: Case, folder: Path) -> NDArray[np.integer]:
    with catalog(case, folder) as opened:
        return all_rows(opened.bind(Plan.from_json(document(case)), Budget()))


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_that_megatron_core_made(name: str, tmp_path: Path) -> None:
    case = Case(**CASES[name]["case"])
    rows = served_rows(case, tmp_path)
    assert rows[:2].tolist() == CASES[name]["first"]
    assert digest(rows) == CASES[name]["sha256"]


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: only golden rows"
)
@pytest.mark.filterwarnings("ignore")  # of Megatron's
def test_the_rows_are_those_that_megatron_core_makes(tmp_path: Path) -> None:
    for seed in range(20):
        case, folder = some_case(seed), tmp_path / str(seed) / "own"
        folder.mkdir(parents=True)
        served, own = served_rows(case, folder.parent), megatron_rows(case, folder)
        np.testing.assert_array_equal(served, own, err_msg=f"some_case({seed})")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Catalog]:
    with catalog(THREE, folder) as found:
        yield found


@pytest.fixture(scope="module")
def rows(opened: Catalog) -> NDArray[np.integer]:
    """All rows of the run."""
    return all_rows(opened.bind(Plan.from_json(document(THREE)), Budget()))


def bound_to(opened: Catalog, changes: Mapping[str, Any] = MappingProxyType({}), size: int = 5) -> BoundPlan:
    return opened.bind(Plan.from_json({**document(THREE, size), **changes}), Budget())


def test_the_source_of_a_row_is_that_of_its_pieces(opened: Catalog) -> None:
    bound = bound_to(opened)
    count = bound.sampler.num_steps
    assert count is not None
    reading = WindowReading(bound, Budget(), step=0, count=count, rank=0, rows=5)
    sources = np.concatenate(list(read_arrays(RowSources(reading))))
    first = 0
    for pieces, borders in reading.pieces():
        own = sources[first : first + len(borders) - 1]
        names = [bound.plan.sources[number] for number in own.repeat(np.diff(borders)).tolist()]
        assert names == [bound.shards[shard][0] for shard in pieces[:, 0].tolist()]
        first += len(own)
    assert set(sources.tolist()) == set(range(len(bound.plan.sources)))


def step_rows(bound: BoundPlan, step: int, **part: int) -> NDArray[np.integer]:
    own = bound.sampler.check_part(step, **part)
    reading = WindowReading(bound, Budget(), step=step, count=1, rank=part.get("rank", 0), rows=own)
    return np.concatenate([each.copy() for each in read_arrays(reading)]).reshape(-1, reading.unit_tokens)


def test_two_tokens_are_enough_for_a_row(tmp_path: Path) -> None:
    """The next epoch's first token is the last target of this one."""
    case = Case(lengths=((2,),), weights=None, seq_len=1, num_samples=3, seed=1)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    assert sorted(served_rows(case, tmp_path / "two").tolist()) == [[0, 1], [0, 1], [1, 0]]
    with pytest.raises(InvalidPlan, match="has no documents in its part train"):
        served_rows(dataclasses.replace(case, lengths=((1,),)), tmp_path / "one")


def test_stages_skips_and_ranks_take_the_rows_in_turn(opened: Catalog, rows: NDArray[np.integer]) -> None:
    """A batch of another size goes on with the next row; a skipped step leaves its rows out."""
    mixture = document(THREE)["stages"][0]["mixture"]
    sizes = [(0, 6), (7, 15), (20, 30)]
    stages = [{"from_step": step, "global_batch_size": size, "mixture": mixture} for step, size in sizes]
    bound = bound_to(opened, {"stages": stages, "skip_steps": [[5, 9]]})
    size = [6] * 7 + [15] * 13 + [30] * 5
    first = np.cumsum([0, *size]).tolist()
    seen = [number for number in range(25) if not 5 <= number < 9]
    assert bound.sampler.num_steps == len(seen)
    for step, number in enumerate(seen):
        wanted = rows[first[number] : first[number] + size[number]]
        np.testing.assert_array_equal(step_rows(bound, step), wanted)
        thirds = [step_rows(bound, step, rank=rank, world_size=3) for rank in range(3)]
        np.testing.assert_array_equal(np.concatenate(thirds), wanted)
    with pytest.raises(InvalidParameter, match="ends after 21 steps, and step 20 with count 2 ends beyond"):
        bound.sampler.check_part(20, count=2)


def test_a_look_up_finds_every_row_that_holds_a_token(opened: Catalog, rows: NDArray[np.integer]) -> None:
    bound = bound_to(opened, {"skip_steps": [[30, 32]]}, size=5)
    for source, name in enumerate(names(THREE)):
        first = int(THREE.tokens(source)[0])
        for start, stop in [(0, 1), (17, 19), (300, 420), (0, len(THREE.tokens(source)))]:
            found = look_up(bound.sampler, name, start, stop, Budget(), epochs=100)
            held = ((rows >= first + start) & (rows < first + stop)).any(axis=1)
            assert [5 * each.plan_step + each.row for each in found.rows] == np.flatnonzero(held).tolist()
            assert found.num_found == held.sum()
            for each in found.rows:
                own = rows[5 * each.plan_step + each.row]
                corpus, shard = bound.shards[each.shard]
                assert (corpus, int(shard.tokens[each.start])) == (name, own[0])
                assert (each.step is None) == (each.plan_step in (30, 31))
    limited = look_up(bound.sampler, name, 0, 500, Budget(), epochs=100, limit=3)
    assert len(limited.rows) == 3 < limited.num_found


def test_a_look_up_finds_the_rows_of_each_single_token(opened: Catalog, rows: NDArray[np.integer]) -> None:
    """Among them are tokens at the end of the last epoch, too few for another row."""
    bound = bound_to(opened, size=5)
    for source, name in enumerate(names(THREE)):
        tokens = THREE.tokens(source)
        for start, token in enumerate(tokens.tolist()):
            found = look_up(bound.sampler, name, start, start + 1, Budget(), epochs=100)
            held = np.flatnonzero((rows == token).any(axis=1))
            assert [5 * each.plan_step + each.row for each in found.rows] == held.tolist()


def test_usage_counts_the_rows_of_each_source(opened: Catalog, rows: NDArray[np.integer]) -> None:
    bound = bound_to(opened)
    borders = [int(THREE.tokens(source)[0]) for source in range(3)]
    for step in (0, 1, 13, 80, 1000):
        used = count_usage(bound.sampler, 0, step, Budget()).sources
        own = np.searchsorted(borders, rows[: 5 * step, 0], side="right") - 1
        assert [used[name].rows for name in names(THREE)] == np.bincount(own, minlength=3).tolist()


def test_a_table_is_built_once_kept_and_bounded(
    folder: Path, rows: NDArray[np.integer], tmp_path: Path
) -> None:
    plan, kept = Plan.from_json(document(THREE)), tmp_path / "megatron"
    with catalog(THREE, folder, tables=Tables(kept)) as opened:
        first = opened.bind(plan, Budget())
        (path,) = kept.iterdir()
        made = (path / "samples.npy").stat().st_mtime_ns
        again = opened.bind(first.plan, Budget())
        assert again.plan == first.plan
        assert (path / "samples.npy").stat().st_mtime_ns == made
        np.testing.assert_array_equal(all_rows(again), rows)
        bound_to(opened, size=7)  # another batch size has the same table
        assert list(kept.iterdir()) == [path]
        (path / "samples.npy").unlink()  # else the one that is mapped would change
        (path / "samples.npy").write_bytes(b"damaged")
        np.testing.assert_array_equal(all_rows(opened.bind(plan, Budget())), rows)
        np.testing.assert_array_equal(all_rows(first), rows)  # what is mapped outlives its file
    with catalog(THREE, folder, tables=Tables(kept, max_bytes=1)) as opened:
        opened.bind(Plan.from_json({**document(THREE), "seed": 1}), Budget())
        assert len(list(kept.iterdir())) == 1


def test_a_large_table_is_built_by_another_process(
    folder: Path, rows: NDArray[np.integer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_MOST_IN_PROCESS", 0)
    plan = Plan.from_json(document(THREE))
    with catalog(THREE, folder, tables=Tables(tmp_path)) as opened:
        np.testing.assert_array_equal(all_rows(opened.bind(plan, Budget())), rows)
        monkeypatch.setattr(tables, "_build_here", sys.exit)  # its arguments make exit code 1
        with pytest.raises(ReadFailed, match="could not be built: exit code 1"):
            opened.bind(Plan.from_json({**document(THREE), "seed": 1}), Budget())
    assert len(list(tmp_path.iterdir())) == 1


def test_a_table_that_cannot_be_kept_is_used_from_memory(
    folder: Path, rows: NDArray[np.integer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with catalog(THREE, folder, tables=Tables(tmp_path / "file" / "megatron")) as opened:
        np.testing.assert_array_equal(all_rows(opened.bind(Plan.from_json(document(THREE)), Budget())), rows)
    assert "was not kept" in caplog.text


def test_other_documents_of_the_same_tokens_are_another_plan(folder: Path, tmp_path: Path) -> None:
    """The fingerprint of a corpus says nothing of its documents, and here they decide the rows."""
    with catalog(THREE, folder) as opened:
        plan = opened.bind(Plan.from_json(document(THREE)), Budget()).plan
    last = (*THREE.lengths[2][:-2], sum(THREE.lengths[2][-2:]))
    with (
        catalog(dataclasses.replace(THREE, lengths=(*THREE.lengths[:2], last)), tmp_path) as opened,
        pytest.raises(FingerprintMismatch, match="the documents of the plan's corpora are others"),
    ):
        opened.bind(plan, Budget())


def test_corpora_without_whole_documents_are_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw.bin", range(500))
    case = Case(lengths=((400,),), weights=None, seq_len=4, num_samples=10, seed=1)
    path = write_megatron(tmp_path / "cut", [range(300), range(100)], dtype="int32")
    specs = [spec(tmp_path / "raw.bin", "raw"), spec(path, "cut", token_range=(10, 350))]
    with Catalog.open(specs) as opened:
        for name, message in (("raw", "has no document index"), ("cut", "may cut a sequence in two")):
            stage = {"global_batch_size": 1, "mixture": {name: 1}}
            plan = {"seq_len": 4, "order": {"megatron": {"num_samples": case.num_samples}}, "stages": [stage]}
            with pytest.raises((UnknownDocument, InvalidParameter), match=message):
                opened.bind(Plan.from_json(plan), Budget())
