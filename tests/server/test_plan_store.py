"""Plans in the state folder: shared by processes, kept over restarts, safe to lose."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from corpus_server.errors import InvalidParameter, StateUnavailable, UnknownPlan
from corpus_server.plan import Plan
from corpus_server.plan_store import PlanStore, StoredPlan
from tests.reference import one_source
from tests.serving import environment


def bound(seed: int = 0) -> Plan:
    return Plan.from_json(one_source("web", 8, 4, seed=seed, fingerprints={"web": "sampled-00"}))


def seeds(found: list[StoredPlan]) -> list[int]:
    return [Plan.parse(each.document).seed for each in found]


def test_what_was_added_is_found_by_another_process_and_later(tmp_path: Path) -> None:
    plan = bound(2**64 - 1)
    with PlanStore(tmp_path / "deep" / "state") as store, PlanStore(tmp_path / "deep" / "state") as other:
        assert other.document(plan.id) is None
        store.add(plan)
        store.add(plan)
        assert other.find(plan.id) == plan
        (listed,) = other.listed(10)
        assert (Plan.parse(listed.document), listed.id, listed.sources) == (plan, plan.id, ["web"])
    with PlanStore(tmp_path / "deep" / "state") as later:
        found = later.find(plan.id)
        assert (found, found.id) == (plan, plan.id)


def test_a_database_of_an_older_server_is_replaced(tmp_path: Path) -> None:
    """Its ids were made without the plan's version, so that nobody can ask for them any more."""
    with sqlite3.connect(tmp_path / "plans.sqlite") as old:
        old.execute("CREATE TABLE plans (id TEXT PRIMARY KEY, document TEXT, seen REAL) WITHOUT ROWID")
        old.execute("CREATE INDEX plans_seen ON plans (seen DESC, id)")
        old.execute("INSERT INTO plans VALUES ('ab', '{}', 1)")
    old.close()
    with PlanStore(tmp_path) as store:
        assert (store.count(), store.listed(3)) == (0, [])
        store.add(bound(1))
    with PlanStore(tmp_path) as store:
        assert seeds(store.listed(3)) == [1]


def test_a_database_of_an_older_release_with_all_tables_is_replaced_too(tmp_path: Path) -> None:
    """The failure was: "table totals already exists", and the server did not start."""
    with PlanStore(tmp_path) as store:
        store.add(bound(1))
    with contextlib.closing(sqlite3.connect(tmp_path / "plans.sqlite")) as older:
        older.execute("PRAGMA user_version = 2")
    with PlanStore(tmp_path) as store:
        assert (store.count(), store.listed(3)) == (0, [])
        store.add(bound(2))
        assert seeds(store.listed(3)) == [2]


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "time", lambda: seconds)


def test_seen_is_the_last_time_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the minute, so that a plan that is posted often is seldom written."""
    with PlanStore(tmp_path) as store:
        for seconds, seed, expected in (
            (1000.0, 1, [(1, 1000.0)]),
            (1010.0, 2, [(2, 1010.0), (1, 1000.0)]),
            (1050.0, 1, [(2, 1010.0), (1, 1000.0)]),
            (1060.0, 1, [(1, 1060.0), (2, 1010.0)]),
            (500.0, 2, [(1, 1060.0), (2, 500.0)]),  # the clock was put back
        ):
            set_clock(monkeypatch, seconds)
            store.add(bound(seed))
            assert [(*seeds([each]), each.seen) for each in store.listed(3)] == expected


def test_a_bounded_number_of_plans_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PlanStore(tmp_path, max_plans=3) as store:
        for seconds, seed in enumerate((1, 2, 3, 1, 4, 5)):
            set_clock(monkeypatch, 100.0 * seconds)
            store.add(bound(seed))
            assert store.count() <= 3
        assert seeds(store.listed(9)) == [5, 4, 1]
        assert store.document(bound(2).id) is None


def test_a_bounded_number_of_bytes_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large plan takes the place of many; one that is too large alone is kept alone."""
    size = len(bound(1000).canonical_json)
    with PlanStore(tmp_path, max_bytes=200 * size) as store:
        for seed in range(1000, 1300):
            set_clock(monkeypatch, float(seed))
            store.add(bound(seed))
        assert store.count() == 200
        for num_steps, expected in ((100 * size // 12, range(10, 110)), (300 * size // 12, [1])):
            skip_steps = [[10_000 + 2 * k, 10_001 + 2 * k] for k in range(num_steps)]
            large = one_source("web", 8, 4, fingerprints={"web": "x"}, skip_steps=skip_steps)
            set_clock(monkeypatch, 5000.0 + num_steps)
            store.add(Plan.from_json(large))
            assert store.count() in expected
            assert Plan.parse(store.listed(1)[0].document) == Plan.from_json(large)


def test_a_list_of_large_plans_is_cut_but_never_empty(tmp_path: Path) -> None:
    with PlanStore(tmp_path) as store:
        for seed in range(3):
            store.add(bound(seed))
        size = len(bound(0).canonical_json)
        assert seeds(store.listed(3, max_bytes=2 * size)) == [2, 1]
        assert seeds(store.listed(3, max_bytes=1)) == [2]


OPEN_AND_ADD = """
import sys
from pathlib import Path
from corpus_server.plan import Plan
from corpus_server.plan_store import PlanStore
from tests.reference import one_source
print("imported", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    with PlanStore(Path(sys.argv[1]) / str(number)) as store:
        seed = int(sys.argv[2])
        store.add(Plan.from_json(one_source("web", 8, 4, seed=seed, fingerprints={"web": "x"})))
"""


def open_in_four_processes(folder: Path, times: int) -> list[str]:
    """Let processes open folders 0, 1, ... at the same moments, each add a plan; return what they logged."""
    arguments = [sys.executable, "-c", OPEN_AND_ADD, str(folder)]
    processes = [
        subprocess.Popen(
            [*arguments, str(seed), str(times)],
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
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    for number in range(times):
        with PlanStore(folder / str(number)) as store:
            assert len(store.listed(10)) == 4
    return "".join(said).splitlines()


def test_processes_may_open_a_new_folder_at_the_same_moment(tmp_path: Path) -> None:
    """The workers of a first start do just that."""
    assert open_in_four_processes(tmp_path, 40) == []


def damage_head(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def damage_pages(path: Path) -> None:
    with PlanStore(path.parent) as store:
        for seed in range(100, 200):
            store.add(bound(seed))
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    damage_pages(path)
    path.write_bytes(path.read_bytes()[:5000])


def damage_log(path: Path) -> None:
    damage_head(path)
    path.with_name("plans.sqlite-wal").write_bytes(b"no log")


DAMAGES = pytest.mark.parametrize("damage", [damage_head, damage_pages, cut_off, damage_log])


@DAMAGES
def test_a_damaged_database_is_moved_aside(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server without its old plans is better than none: clients post theirs again."""
    path = tmp_path / "plans.sqlite"
    damage(path)
    content = path.read_bytes()
    with PlanStore(tmp_path) as store:
        store.add(bound())
        assert store.find(bound().id) == bound()
    (aside,) = tmp_path.glob("plans.sqlite.damaged-*")
    assert aside.read_bytes() == content
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert f"{path} is damaged" in warning.getMessage()
    assert aside.name in warning.getMessage()
    with PlanStore(tmp_path) as store:
        assert store.count() == 1


def test_damage_that_opening_does_not_meet_is_moved_aside_when_it_shows(tmp_path: Path) -> None:
    """Else these plans would be 503 for ever, which no client mends by posting."""
    plans = [bound(seed=seed) for seed in range(400)]
    path = tmp_path / "plans.sqlite"
    with PlanStore(tmp_path) as store:
        for plan in plans:
            store.add(plan)
    content, newest = bytearray(path.read_bytes()), plans[-1].canonical_json.encode()
    for start in range(0, len(content), 4096):
        page = content[start : start + 4096]
        if page[0] == 10 and b'"seed":' in page and newest not in page:  # a leaf
            content[start : start + 8] = b"\xa5" * 8
    path.write_bytes(content)
    with PlanStore(tmp_path) as store, PlanStore(tmp_path) as other:
        for each in (store, other):
            assert {each.document(plan.id) for plan in plans} <= {None, *(p.canonical_json for p in plans)}
        for plan in plans:
            store.add(plan)
        assert [other.document(plan.id) for plan in plans] == [plan.canonical_json for plan in plans]
    assert len([*tmp_path.glob("plans.sqlite.damaged-*")]) == 1


def test_a_write_ahead_log_that_is_cut_off_under_two_that_use_it_is_given_up(tmp_path: Path) -> None:
    """Neither would ever read the other's index of the log as wrong, and new plans would be 503 for ever."""
    with PlanStore(tmp_path) as store, PlanStore(tmp_path) as other:
        for seed in range(100):
            store.add(bound(seed))
        (tmp_path / "plans.sqlite-wal").write_bytes(b"")
        for each in (other, store):
            each.add(bound(100))
            assert each.find(bound(100).id) == bound(100)
    assert len([*tmp_path.glob("plans.sqlite.damaged-*")]) == 1


def test_a_newer_release_s_database_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Going back to an older release must not delete what the newer one was told to keep."""
    with PlanStore(tmp_path) as store:
        store.add(bound(1))
        store.keep(bound(1).id)
    path = tmp_path / "plans.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as newer:
        newer.execute("PRAGMA user_version = 1000")
    with PlanStore(tmp_path) as store:
        assert store.count() == 0
    (aside,) = tmp_path.glob("plans.sqlite.newer-*")
    assert f"{path} is newer (a newer release uses it: version 1000" in caplog.text
    path.unlink()
    aside.rename(path)
    with contextlib.closing(sqlite3.connect(path)) as newer:
        newer.execute("PRAGMA user_version = 3")
    with PlanStore(tmp_path) as store:
        assert store.find(bound(1).id) == bound(1)


def test_processes_that_open_a_damaged_database_move_it_aside_once(tmp_path: Path) -> None:
    """And none of them moves away what another has just made."""
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        damage_head(tmp_path / str(number) / "plans.sqlite")
    warnings = open_in_four_processes(tmp_path, 20)
    assert len(warnings) == len([line for line in warnings if "is damaged" in line]) == 20
    for number in range(20):
        assert len([*(tmp_path / str(number)).glob("*.damaged-*")]) == 1


def test_opening_waits_for_a_process_that_writes(tmp_path: Path) -> None:
    blocker = sqlite3.connect(tmp_path / "plans.sqlite", isolation_level=None)
    blocker.execute("PRAGMA journal_mode = WAL")
    blocker.execute("CREATE TABLE other (number INTEGER)")
    blocker.execute("BEGIN IMMEDIATE")
    opened: list[float] = []

    def open_it() -> None:
        with PlanStore(tmp_path) as store:
            opened.append(time.monotonic())
            store.add(bound())

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    released = time.monotonic()
    blocker.execute("ROLLBACK")
    blocker.close()
    thread.join(30)
    assert opened
    assert opened[0] >= released


def test_close_may_be_repeated_and_leaves_one_file(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.add(bound())
    store.close()
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["plans.sqlite"]


def test_a_database_that_another_process_holds_fails_in_words_and_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is known can be read, and seen again; the failure is logged once."""
    with PlanStore(tmp_path) as store:
        store.check_writable()
        store.add(bound(1))
        with contextlib.closing(sqlite3.connect(tmp_path / "plans.sqlite", isolation_level=None)) as blocker:
            blocker.execute("BEGIN IMMEDIATE")
            for refused in (store.check_writable, lambda: store.add(bound(2))):
                with pytest.raises(StateUnavailable, match=r"^plans cannot be kept: database is locked$"):
                    refused()
            store.add(bound(1))
            assert store.find(bound(1).id) == bound(1)
        store.check_writable()
        store.add(bound(2))
        assert store.count() == 2
    assert caplog.text.count("database is locked") == 2  # reading went well in between


def drop_table(database: sqlite3.Connection) -> None:
    database.execute("DROP TABLE runs")
    database.execute("DROP TABLE plans")


def drop_column(database: sqlite3.Connection) -> None:
    database.executescript("DROP INDEX plans_seen; DROP INDEX plans_of_owner; DROP INDEX plans_usage;")
    database.executescript("DROP TRIGGER plans_added; DROP TRIGGER plans_removed;")
    database.execute("ALTER TABLE plans DROP COLUMN seen")


def empty_totals(database: sqlite3.Connection) -> None:
    database.execute("DELETE FROM totals")


def strange_version(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA user_version = -1")


@pytest.mark.parametrize("harm", [drop_table, drop_column, empty_totals, strange_version])
def test_a_database_that_lacks_something_is_moved_aside_at_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[sqlite3.Connection], None]
) -> None:
    """The failure was: "cannot be written: no such column: seen; give another with --state-dir"."""
    with PlanStore(tmp_path) as store:
        store.add(bound(1))
    with contextlib.closing(sqlite3.connect(tmp_path / "plans.sqlite")) as database:
        harm(database)
        database.commit()
    with PlanStore(tmp_path) as store:
        store.add(bound(2))
        assert store.find(bound(2).id) == bound(2)
    assert len([*tmp_path.glob("plans.sqlite.damaged-*")]) == 1
    assert "was renamed to plans.sqlite.damaged-" in caplog.text


@pytest.mark.parametrize("harm", [drop_table, drop_column, empty_totals])
def test_what_is_taken_out_of_an_open_database_is_noticed_by_the_next_call(
    tmp_path: Path, harm: Callable[[sqlite3.Connection], None]
) -> None:
    """The failure was: new plans were 503 until a restart, and the server called itself ready."""
    with PlanStore(tmp_path) as store, PlanStore(tmp_path) as other:
        store.add(bound(1))
        with contextlib.closing(sqlite3.connect(tmp_path / "plans.sqlite")) as database:
            harm(database)
            database.commit()
        for each, seed in ((store, 2), (other, 3)):
            each.add(bound(seed))
        assert set(seeds(store.listed(9))) == {2, 3}
    assert len([*tmp_path.glob("plans.sqlite.damaged-*")]) == 1


def test_a_database_that_was_cut_to_nothing_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a server that has it open, whose log may still hold all of it, and by a worker that opens it."""
    for is_open in (True, False):
        folder = tmp_path / str(is_open)
        with PlanStore(folder) as store:
            store.add(bound(1))
            if is_open:
                (folder / "plans.sqlite").write_bytes(b"")
                store.add(bound(2))
                assert store.find(bound(2).id) == bound(2)
        (folder / "plans.sqlite").write_bytes(b"")
        with PlanStore(folder) as store:
            assert store.count() == 0
    assert caplog.text.count("it is empty") >= 2


def test_a_newer_release_that_takes_the_database_over_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure was: the older one went on writing. Renaming would make the two take turns."""
    path = tmp_path / "plans.sqlite"
    with PlanStore(tmp_path) as store, contextlib.closing(sqlite3.connect(path)) as newer:
        store.add(bound(1))
        newer.execute("PRAGMA user_version = 1000")
        for _ in range(2):
            with pytest.raises(StateUnavailable, match="a newer release uses it"):
                store.add(bound(2))
            with pytest.raises(StateUnavailable, match="a newer release uses it"):
                store.check_writable()
        assert newer.execute("SELECT count(*) FROM plans").fetchone() == (1,)
        newer.execute("PRAGMA user_version = 3")
        store.add(bound(2))
    assert caplog.text.count("a newer release uses it") == 1
    assert [each.name for each in tmp_path.glob("*newer*")] == []


def test_a_database_that_cannot_be_opened_again_is_opened_later(tmp_path: Path) -> None:
    """The failure was: after damage, one lack of descriptors left it closed until a restart."""
    path = tmp_path / "plans.sqlite"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    plans = [bound(seed) for seed in range(400)]
    with PlanStore(tmp_path) as store:
        for plan in plans:
            store.add(plan)
    with PlanStore(tmp_path) as store:  # which has read a few pages
        overwrite(path)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            failures = 0
            for plan in plans:
                try:
                    store.document(plan.id)
                except StateUnavailable:
                    failures += 1
            assert failures > 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        store.add(bound(2))
        assert store.find(bound(2).id) == bound(2)


def test_a_token_s_plans_push_out_its_own_and_not_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PlanStore(tmp_path, max_plans=12) as store:
        for seed in range(6):
            set_clock(monkeypatch, 100.0 * seed)
            store.add(bound(seed), owner="careful")
        for seed in range(100, 160):
            set_clock(monkeypatch, 100.0 * seed)
            store.add(bound(seed), owner="greedy")
        assert set(seeds(store.listed(99))) == {*range(6), *range(154, 160)}
        set_clock(monkeypatch, 99_999.0)
        store.add(bound(7), owner="new")  # which has less than its share: who has most makes room
        assert len({*range(6)} & set(seeds(store.listed(99)))) + 6 >= 11
        assert store.count() == 12


def delete(path: Path) -> None:
    path.unlink()


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def overwrite(path: Path) -> None:
    path.with_name("plans.sqlite-wal").write_bytes(b"")
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("harm", [delete, delete_folder, overwrite])
def test_a_database_that_was_lost_is_made_again_at_once(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """By every process that has it open, into one file for all."""
    with PlanStore(tmp_path / "state") as store, PlanStore(tmp_path / "state") as other:
        for seed in range(50):
            store.add(bound(seed))
        harm(tmp_path / "state" / "plans.sqlite")
        store.add(bound(100))  # perhaps into what SQLite holds in memory of the old one
        other.check_writable()
        other.add(bound(101))
        store.add(bound(102))
        assert set(seeds(other.listed(200))) >= {101, 102}


def test_a_plan_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    plans = [bound(seed) for seed in range(20)]
    with PlanStore(tmp_path) as store:
        for plan in plans:
            store.add(plan)
        for plan in plans:
            assert store.find(plan.id) == plan
            assert store.find(plan.id[:8]).id == plan.id
        for wrong in ("", "g", "%", "A", plans[0].id + "0", plans[0].id[:7], plans[0].id[:8].upper() + "G"):
            with pytest.raises(InvalidParameter, match="the 64 digits"):
                store.find(wrong)
        with pytest.raises(UnknownPlan):
            store.find("f" * 64)


def test_the_runs_that_posted_a_plan_are_listed_last_seen_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, others = 1e9, [f"run-{number}" for number in range(30)]  # 32 runs of a plan are kept
    monkeypatch.setattr(time, "time", lambda: now)
    with PlanStore(tmp_path, max_plans=2) as store, PlanStore(tmp_path, read_only=True) as reading:
        for run in ("a", "", "b", *others, "a", "c", "a"):
            now += 40.0  # within a minute a plan is not written again, but a new run of it is
            store.add(bound(1), run=run)
        store.add(bound(2), run="b")
        assert [each.runs for each in reading.listed(9)] == [("b",), ("a", "c", *others[::-1])]
        assert [(plan.seed, runs[:2]) for plan, _, runs in reading.newest(9, "a")] == [(1, ("a", "c"))]
        assert reading.newest(9, "z") == []
        for seed in (3, 4):
            store.add(bound(seed))
            now += 1.0
        assert store.newest(9, "a") == []  # removed with its plan
    with contextlib.closing(sqlite3.connect(tmp_path / "plans.sqlite")) as older:
        older.execute("DROP TRIGGER runs_removed")
        older.execute("DROP TABLE runs")
        older.commit()
    with PlanStore(tmp_path, read_only=True) as reading:
        assert [each.runs for each in reading.listed(9)] == [(), ()]
        assert reading.newest(9, "a") == []


def test_opening_for_reading_creates_nothing_and_sees_what_a_server_adds(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="holds no plans that can be read"):
        PlanStore(tmp_path / "none", read_only=True)
    assert list(tmp_path.iterdir()) == []
    with PlanStore(tmp_path) as store, PlanStore(tmp_path, read_only=True) as reading:
        store.add(bound())
        assert reading.find(bound().id) == bound()
        with pytest.raises(StateUnavailable, match="readonly"):
            reading.add(bound(1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "plans.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(InvalidParameter, match="not a database"):
        PlanStore(tmp_path / "other", read_only=True)
