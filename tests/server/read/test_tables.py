"""Tables of plans in Megatron's order: what makes room, and what is told when there is none to have.

That they hold Megatron's rows is tested in `test_megatron_order`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.corpus import Corpus
from corpus_server.errors import FingerprintMismatch
from corpus_server.plan import MegatronOrder, Plan
from corpus_server.plan.orders.samples import Table
from corpus_server.read import table_files, tables
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.tables import Tables
from corpus_server.work import Budget
from tests.megatron import THREE, document, specs

ARRAYS = Table._fields


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with Catalog.open(specs(THREE, tmp_path_factory.mktemp("corpora"))) as found:
        yield found


@pytest.fixture(scope="module")
def bound(opened: Catalog) -> BoundPlan:
    return opened.bind(Plan.from_json(document(THREE)), Budget())


def plan_of(bound: BoundPlan, seed: int = 0, **fields: object) -> Plan:
    """Return a plan with the fingerprints of its corpora."""
    return replace(
        Plan.from_json({**document(THREE), "seed": seed, **fields}), fingerprints=bound.plan.fingerprints
    )


def bind(kept: Tables, plan: Plan, bound: BoundPlan) -> tuple[Plan, list[Any]]:
    """Return the plan with its digests, and its tables."""
    plan, found = kept.bind(plan, bound.corpora, Budget())
    return plan, [each.table for each in found]


@pytest.mark.parametrize(("bytes_less", "left"), [(0, [1, 2]), (1, [2])])
def test_tables_that_fit_to_the_byte_are_kept_and_the_newest_always(
    bound: BoundPlan, tmp_path: Path, bytes_less: int, left: list[int]
) -> None:
    folder = tmp_path / "state" / "tables"  # made at need, with the folders above it
    kept, paths = Tables(folder), []
    for seed in range(2):
        kept.bind(plan_of(bound, seed), bound.corpora, Budget())
        (path,) = set(folder.iterdir()) - set(paths)
        paths.append(path)
        os.utime(path, (time.time() - 100 + seed,) * 2)
    (folder / ".being-made").mkdir()
    table_bytes = sum(file.stat().st_size for file in paths[0].iterdir())
    Tables(folder, max_bytes=2 * table_bytes - bytes_less).bind(plan_of(bound, 2), bound.corpora, Budget())
    (newest,) = set(folder.glob("[!.]*")) - set(paths)
    paths.append(newest)
    assert [number for number, path in enumerate(paths) if path.exists()] == left
    assert (folder / ".being-made").exists()


def test_a_table_is_used_again_and_noted_as_used(bound: BoundPlan, tmp_path: Path) -> None:
    kept = Tables(tmp_path)
    plan, (made,) = bind(kept, plan_of(bound), bound)
    (path,) = tmp_path.iterdir()
    assert sorted(file.name for file in path.iterdir()) == sorted(
        [*(f"{name}.npy" for name in ARRAYS), "table.json"]
    )
    files = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    os.utime(path, (1, 1))
    same = replace(plan, fingerprints=dict(reversed(plan.fingerprints.items())))
    again, (mapped,) = bind(kept, same, bound)
    assert again == plan
    assert path.stat().st_mtime > 1
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == files
    for name, array in made._asdict().items():
        np.testing.assert_array_equal(getattr(mapped, name), array)
        assert type(getattr(mapped, name)) is np.ndarray
        assert not getattr(mapped, name).flags.writeable


def test_a_table_is_on_the_disk_before_it_has_its_name(
    bound: BoundPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure it would else hold zeros, and be taken for good."""
    flush, flushed = os.fsync, list[str]()

    def note(fd: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        flush(fd)

    monkeypatch.setattr(os, "fsync", note)
    Tables(tmp_path).bind(plan_of(bound), bound.corpora, Budget())
    assert flushed[: len(ARRAYS)] == [f"{name}.npy" for name in ARRAYS]


def test_a_table_that_another_release_wrote_otherwise_is_not_used(
    bound: BoundPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Tables(tmp_path)
    kept.bind(plan_of(bound), bound.corpora, Budget())
    monkeypatch.setattr(table_files, "FORMAT", "another")
    kept.bind(plan_of(bound), bound.corpora, Budget())
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [b"damaged", b"", None], ids=["damaged", "empty", "a folder"])
def test_a_damaged_table_is_built_again(
    bound: BoundPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    kept = Tables(tmp_path)
    _, (made,) = bind(kept, plan_of(bound), bound)
    (path,) = tmp_path.iterdir()
    damaged = path / f"{ARRAYS[-1]}.npy"
    damaged.unlink()
    if content is None:
        damaged.mkdir()
    else:
        damaged.write_bytes(content)
    _, (again,) = bind(kept, plan_of(bound), bound)
    assert f"a damaged table is built again: {path}: " in caplog.text
    assert damaged.is_file()
    for name, array in made._asdict().items():
        np.testing.assert_array_equal(getattr(again, name), array)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_table_of_the_right_size_with_other_numbers_is_built_again(
    bound: BoundPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """They would be other rows, and nobody would see it."""
    kept = Tables(tmp_path)
    _, (made,) = bind(kept, plan_of(bound), bound)
    (path,) = tmp_path.iterdir()
    damaged = path / f"{name}.npy"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.unlink()  # else the array that is mapped would change
    damaged.write_bytes(content)
    _, (again,) = bind(kept, plan_of(bound), bound)
    assert f"a damaged table is built again: {path}: " in caplog.text
    np.testing.assert_array_equal(getattr(again, name), getattr(made, name))


def test_stages_and_skips_do_not_make_another_table(bound: BoundPlan, tmp_path: Path) -> None:
    kept = Tables(tmp_path)
    stages = document(THREE, 3)["stages"]
    for each in (plan_of(bound), plan_of(bound, stages=stages), plan_of(bound, skip_steps=[[0, 2]])):
        kept.bind(each, bound.corpora, Budget())
    assert len(list(tmp_path.iterdir())) == 1
    kept.bind(plan_of(bound, 1), bound.corpora, Budget())
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_folder_each_is_built_in_memory(bound: BoundPlan) -> None:
    one, other = (Tables().bind(plan_of(bound), bound.corpora, Budget()) for _ in range(2))
    assert one[0] == other[0]
    assert one[1][0] is not other[1][0]


def test_other_documents_than_the_plans_are_refused(
    bound: BoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = Tables().bind(plan_of(bound), bound.corpora, Budget())
    assert isinstance(plan.order, MegatronOrder)
    said = dict(plan.order.documents)
    assert sorted(said) == list(plan.sources)
    monkeypatch.setattr(tables, "_digest", lambda *arrays: "0")
    with pytest.raises(FingerprintMismatch) as caught:
        Tables().bind(plan, bound.corpora, Budget())
    assert caught.value.detail == (
        "the documents of the plan's corpora are others than those that it was made for: the plan says "
        f"{said}, this server {dict.fromkeys(said, 'xxh3-0')}"
    )
    assert caught.value.parameter == "order.megatron.documents"
    assert caught.value.remedy == "serve the document indices that the plan was made for"


def test_a_table_that_is_kept_is_found_without_a_look_at_the_lengths(
    bound: BoundPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bind read the lengths of all documents: seconds at 10^8 of them."""
    kept, num_read = Tables(tmp_path), 0
    bind(kept, plan_of(bound), bound)

    def read(corpus: Corpus) -> Any:
        nonlocal num_read
        num_read += 1
        return sequences(corpus)

    sequences = Corpus.sequences
    monkeypatch.setattr(Corpus, "sequences", read)
    bind(kept, plan_of(bound), bound)
    assert num_read == 0
    bind(kept, plan_of(bound, seed=1), bound)
    assert num_read > 0
