"""Plans in the state folder: shared by processes, kept over restarts, safe to lose."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from corpus_server.errors import InvalidParameter, UnknownPlan
from corpus_server.plan import Plan
from corpus_server.plan.store import PlanStore
from tests.reference import one_source
from tests.serving import environment


def bound(seed: int = 0) -> Plan:
    return Plan.from_json(one_source("web", 8, 4, seed=seed, fingerprints={"web": "sampled-00"}))


def test_what_was_added_is_found_by_another_process_and_later(tmp_path: Path) -> None:
    plan = bound(2**64 - 1)
    with PlanStore(tmp_path / "deep" / "state") as store, PlanStore(tmp_path / "deep" / "state") as other:
        assert other.get(plan.id) is None
        store.add(plan)
        store.add(plan)
        assert other.get(plan.id) == plan
        assert [(found, found.id) for found, _ in other.newest(10)] == [(plan, plan.id)]
    with PlanStore(tmp_path / "deep" / "state") as later:
        found = later.get(plan.id)
        assert found == plan
        assert found is not None
        assert found.id == plan.id


def test_the_newest_come_first(tmp_path: Path) -> None:
    with PlanStore(tmp_path) as store:
        for seed in range(5):
            store.add(bound(seed))
        newest = store.newest(3)
        assert [plan.seed for plan, _ in newest] == [4, 3, 2]
        assert newest[0][1] >= newest[2][1]
        assert store.count() == 5


def test_listing_the_newest_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    """Counted in instructions of SQLite's virtual machine; without an index they grow 20-fold here."""
    with PlanStore(tmp_path) as store:
        counts = []
        for number in (10, 200):
            for seed in range(store.count(), number):
                store.add(bound(seed))
            instructions: list[None] = []
            store._connection.set_progress_handler(lambda seen=instructions: seen.append(None), 1)
            assert [plan.seed for plan, _ in store.newest(3)] == [number - 1, number - 2, number - 3]
            store._connection.set_progress_handler(None, 1)
            counts.append(len(instructions))
        assert counts[1] <= counts[0] * 1.5


def test_a_database_of_an_older_server_is_listed_as_fast(tmp_path: Path) -> None:
    with PlanStore(tmp_path) as store:
        store.add(bound(1))
        store._connection.execute("DROP INDEX plans_seen")
    with PlanStore(tmp_path) as store:
        assert [plan.seed for plan, _ in store.newest(3)] == [1]
        (found,) = store._connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'").fetchall()
        assert found == ("plans_seen",)


def test_a_list_of_large_plans_is_cut_but_never_empty(tmp_path: Path) -> None:
    with PlanStore(tmp_path) as store:
        for seed in range(3):
            store.add(bound(seed))
        size = len(bound(0).canonical_json())
        assert [plan.seed for plan, _ in store.newest(3, max_bytes=2 * size)] == [2, 1]
        assert [plan.seed for plan, _ in store.newest(3, max_bytes=1)] == [2]


def test_threads_may_share_it(tmp_path: Path) -> None:
    with PlanStore(tmp_path) as store:
        failures: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for seed in range(first, first + 20):
                    store.add(bound(seed))
                    assert store.get(bound(seed).id) is not None
            except BaseException as error:  # noqa: BLE001 - shown below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(10 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(store.newest(1000)) == 50


OPEN_AND_ADD = """
import sys
from pathlib import Path
from corpus_server.plan import Plan
from corpus_server.plan.store import PlanStore
from tests.reference import one_source
print("imported", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    with PlanStore(Path(sys.argv[1]) / str(number)) as store:
        seed = int(sys.argv[2])
        store.add(Plan.from_json(one_source("web", 8, 4, seed=seed, fingerprints={"web": "x"})))
"""


def test_processes_may_open_a_new_folder_at_the_same_moment(tmp_path: Path) -> None:
    """The workers of a first start do just that."""
    arguments = [sys.executable, "-c", OPEN_AND_ADD, str(tmp_path)]
    processes = [
        subprocess.Popen(
            [*arguments, str(seed), "40"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for seed in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    for number in range(40):
        with PlanStore(tmp_path / str(number)) as store:
            assert len(store.newest(10)) == 4


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidParameter, match=r"cannot be written.*--state-dir"):
        PlanStore(tmp_path / "file")


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "plans.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(InvalidParameter, match=r"cannot be written: file is not a database"):
        PlanStore(tmp_path)


def test_close_may_be_repeated_and_leaves_one_file(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.add(bound())
    store.close()
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["plans.sqlite"]


def test_readiness_notices_that_nothing_can_be_kept(tmp_path: Path) -> None:
    with PlanStore(tmp_path) as store:
        store.check_writable()
        store.add(bound())
        blocker = sqlite3.connect(store.path, isolation_level=None)
        blocker.execute("PRAGMA query_only = 0")
        blocker.execute("BEGIN IMMEDIATE")
        store._connection.execute("PRAGMA busy_timeout = 1")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            store.check_writable()
        blocker.execute("ROLLBACK")
        blocker.close()
        store.check_writable()


def test_a_plan_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    plans = [bound(seed) for seed in range(20)]
    with PlanStore(tmp_path) as store:
        for plan in plans:
            store.add(plan)
        for plan in plans:
            assert store.find(plan.id) == plan
            alone = next(k for k in range(65) if sum(p.id.startswith(plan.id[:k]) for p in plans) == 1)
            assert store.find(plan.id[:alone]).id == plan.id
            with pytest.raises(InvalidParameter):
                store.find(plan.id[: alone - 1])
        for wrong in ("", "g", "%", "A", plans[0].id + "0"):
            with pytest.raises(InvalidParameter, match="64 of the digits"):
                store.find(wrong)
        with pytest.raises(UnknownPlan):
            store.find("f" * 64)


def test_opening_for_reading_creates_nothing_and_sees_what_a_server_adds(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="holds no plans that can be read"):
        PlanStore.open_existing(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
    with PlanStore(tmp_path) as store, PlanStore.open_existing(tmp_path) as reading:
        store.add(bound())
        assert reading.get(bound().id) == bound()
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reading.add(bound(1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "plans.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(InvalidParameter, match="not a database"):
        PlanStore.open_existing(tmp_path / "other")
