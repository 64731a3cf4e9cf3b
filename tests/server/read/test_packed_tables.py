"""Tables of packed rows: what decides them, who shares them, and what is left when building one fails.

That a damaged table is built again is tested over HTTP, in `web/test_documents`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.publish import publishing_folder
from corpus_server.errors import InvalidPlan, Overloaded, ReadFailed, StateUnavailable
from corpus_server.plan import Plan
from corpus_server.plan.tables import Job
from corpus_server.read import tables
from corpus_server.read.apart import map_in_copies
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.ends import check_ends
from corpus_server.read.table_files import MANIFEST, write_table
from corpus_server.read.tables import Tables
from corpus_server.work import Budget, ClientLeft
from tests.corpora import spec, write_megatron
from tests.serving import environment


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        documents = [[*range(1, length), 0] for length in draw.integers(2, 30, 500).tolist()]
        write_megatron(tmp_path / name, documents)
    write_megatron(tmp_path / "c", [*documents, [1, 2, 0, 3]])
    write_megatron(tmp_path / "d", [*documents, [4], [], [0]])  # what has no prediction may end with anything
    with Catalog.open(spec(tmp_path / f"{name}.bin", name, eot=0) for name in "abcd") as opened:
        yield opened


def plan(*corpora: str, seq_len: int = 16, block_documents: int = 100, seed: int = 0) -> Plan:
    rows = {"documents": {"block_documents": block_documents}}
    stage = {"global_batch_size": 4, "mixture": dict.fromkeys(corpora or ("a",), 1)}
    return Plan.from_json({"seq_len": seq_len, "seed": seed, "rows": rows, "stages": [stage]})


def bind(catalog: Catalog, folder: Path, asked: Plan) -> BoundPlan:
    """Bind as a new process would, which finds what others have kept."""
    catalog._tables = Tables(folder)
    return catalog.bind(asked, Budget())


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        (plan(seed=1), 1),
        (plan("a", "b"), 2),
        (plan(seq_len=8), 2),
        (plan(block_documents=99), 2),
        (plan("b", "d"), 3),
    ],
)
def test_a_table_is_for_lengths_seq_len_and_block_alone(
    catalog: Catalog, tmp_path: Path, asked: Plan, number: int
) -> None:
    for each in (plan(), asked, plan()):
        bind(catalog, tmp_path / "tables", each)
    assert len(list((tmp_path / "tables").iterdir())) == number


def assert_same_rows(*bound: BoundPlan) -> None:
    rows = (each.pieces(0, range(4), count=100) for each in bound)
    for one, other in zip(*rows, strict=True):
        np.testing.assert_array_equal(one, other)


def die_half_way(folder: Path, job: Job) -> None:
    """Stands for a process that is killed while it writes a table."""
    write_table(folder, job, job.build())
    (folder / MANIFEST).unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def test_of_a_build_that_is_killed_nothing_is_left(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tables"
    monkeypatch.setattr(tables, "_MOST_IN_PROCESS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_build_here", die_half_way)
        with pytest.raises(ReadFailed, match="could not be built: exit code -9"):
            bind(catalog, folder, plan())
    assert list(folder.iterdir()) == []
    apart = bind(catalog, folder, plan())
    monkeypatch.undo()
    assert_same_rows(apart, bind(catalog, tmp_path / "other", plan()))


def share_for_ever(folder: Path, job: Job) -> None:
    """Stands for a process whose copies pack blocks."""
    map_in_copies(time.sleep, [1000, 1000])


def write_for_ever(folder: Path, job: Job) -> None:
    """Stands for a process that has written most of a table."""
    write_table(folder, job, job.build(run=map_in_copies))
    time.sleep(1000)


def ask(corpus: str, folder: str, build: Callable[[Path, Job], None]) -> None:
    tables._MOST_IN_PROCESS, tables._build_here = 0, build
    with Catalog.open([spec(Path(corpus), "a", eot=0)]) as opened:
        bind(opened, Path(folder), plan())


@pytest.mark.parametrize("victim", ["who asks", "who builds"])
@pytest.mark.parametrize("doing", [share_for_ever, write_for_ever])
def test_killing_who_builds_leaves_no_process_and_nothing_half_written(
    catalog: Catalog,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    victim: str,
    doing: Callable[[Path, Job], None],
) -> None:
    folder, marked = tmp_path / "tables", environment(ASKED_FOR=str(tmp_path))
    module, name = doing.__module__, doing.__name__
    code = f"import {module} as of; of.ask({str(tmp_path / 'a.bin')!r}, {str(folder)!r}, of.{name})"

    def until(reached: Callable[[], object]) -> None:
        for _ in range(3000):
            if reached():
                return
            time.sleep(0.01)
        raise TimeoutError

    def is_alive(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return (
                process.environ().get("ASKED_FOR") == str(tmp_path)
                and process.status() != psutil.STATUS_ZOMBIE
            )
        return False

    with psutil.Popen([sys.executable, "-c", code], env=marked, stderr=subprocess.DEVNULL) as asking:
        until(asking.children)
        (building,) = asking.children()
        until(building.children if doing is share_for_ever else lambda: any(folder.glob(".*/table.json")))
        (asking if victim == "who asks" else building).kill()
        assert asking.wait(30) != 0
    until(lambda: not any(map(is_alive, psutil.process_iter())))
    found, expected = (bind(catalog, each, plan()) for each in (folder, tmp_path / "other"))
    assert len(list(folder.iterdir())) == 1  # what was left is taken over
    assert_same_rows(found, expected)
    assert "damaged" not in caplog.text


def test_who_comes_while_another_process_builds_is_told_to_come_again(
    catalog: Catalog, tmp_path: Path
) -> None:
    folder = tmp_path / "tables"
    bind(catalog, folder, plan())
    (path,) = folder.iterdir()
    path.rename(tmp_path / "kept")
    with publishing_folder(path), pytest.raises(Overloaded, match="is being built"):
        bind(catalog, folder, plan())
    bind(catalog, folder, plan("b"))  # whose table nobody builds


def test_documents_are_looked_at_before_a_table_is_built(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan, match="nothing tells whether the documents of corpus 'c' end or begin"):
        bind(catalog, tmp_path / "tables", plan("c"))
    assert not (tmp_path / "tables").exists()


def test_a_plan_that_was_made_for_other_lengths_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    bound = bind(catalog, tmp_path / "tables", plan())
    assert bound.plan.tabled is not None
    other = bound.plan.with_digests({"a": "xxh3-0"})
    with pytest.raises(tables.FingerprintMismatch) as caught:
        catalog.bind(other, Budget())
    assert caught.value.parameter == "rows.documents.lengths"
    assert catalog.bind(replace(bound.plan), Budget()).plan.id == bound.plan.id


def test_a_table_that_a_full_disk_cannot_keep_is_said_to_be_one_of_the_state_folder(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure was: `read-failed`, as if the corpus could not be read."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount")
    monkeypatch.setattr(tables, "_MOST_IN_PROCESS", 0)
    try:
        with pytest.raises(StateUnavailable, match="the table of a plan cannot be kept: No space left"):
            bind(catalog, folder / "tables", plan())
        assert [each.name for each in (folder / "tables").iterdir() if not each.name.startswith(".")] == []
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert_same_rows(bind(catalog, folder / "tables", plan()), bind(catalog, tmp_path / "other", plan()))


def test_the_ends_of_many_documents_are_looked_at_in_turns(tmp_path: Path) -> None:
    """So many that one turn would keep others waiting; who asks may leave between two."""
    write_megatron(tmp_path / "c", [[1, 0]] * 100_000)
    with Corpus.open(spec(tmp_path / "c.bin", eot=0)) as corpus:
        turns = 0

        def has_left() -> bool:
            nonlocal turns
            turns += 1
            return turns > 3

        check_ends(corpus, Budget())
        with pytest.raises(ClientLeft):
            check_ends(corpus, Budget(has_left=has_left))
    assert turns == 4
