"""Publishing: whole or not at all, and what killed processes left does not stay."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from corpus_server.corpus import publish
from corpus_server.corpus.publish import publishing, publishing_folder, remove_stale, scratch_folder
from tests.corpora import open_files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_is_there_at_the_end_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old and longer")
    with publishing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old and longer"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, list[str]]]:
    """Note what is flushed to disk: its path, the size of a file, and the names in `tmp_path` by then."""
    flush, seen = os.fsync, list[tuple[str, int | None, list[str]]]()

    def note(fd: int) -> None:
        path = Path(os.readlink(f"/dev/fd/{fd}"))  # noqa: PTH115
        size = os.fstat(fd).st_size if path.is_file() else None
        seen.append((path.relative_to(tmp_path).as_posix(), size, names(tmp_path)))
        flush(fd)

    monkeypatch.setattr(os, "fsync", note)
    return seen


def test_a_durable_file_is_on_disk_before_its_name(
    tmp_path: Path, synced: list[tuple[str, int | None, list[str]]]
) -> None:
    before = open_files()
    with publishing(tmp_path / "a") as file:
        file.write(b"new")
    assert synced == [(".a.tmp", 3, [".a.tmp"]), (".", None, ["a"])]
    synced.clear()
    with publishing(tmp_path / "a", durable=False) as file:
        file.write(b"newer")
    assert (synced, (tmp_path / "a").read_bytes()) == ([], b"newer")
    assert not open_files() - before


def test_the_names_in_a_folder_are_on_disk_before_its_own(
    tmp_path: Path, synced: list[tuple[str, int | None, list[str]]]
) -> None:
    before = open_files()
    with publishing_folder(tmp_path / "a") as folder:
        (folder / "inner").mkdir()
    assert synced == [
        (".a.tmp", None, [".a.tmp"]),
        (".a.tmp/inner", None, [".a.tmp"]),
        (".", None, ["a"]),
    ]
    assert not open_files() - before


def test_a_published_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for mask, mode in ((0o022, 0o644), (0, 0o666)):
            os.umask(mask)
            with publishing(tmp_path / f"{mask}"):
                pass
            assert (tmp_path / f"{mask}").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    before = open_files()
    with pytest.raises(error), publishing(path) as file:  # noqa: PT012
        file.write(b"new")
        raise error
    assert (names(tmp_path), path.read_bytes()) == (["a"], b"old")
    assert not open_files() - before


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    with publishing(tmp_path / "a") as file:
        file.write(b"first")
        before = open_files()
        with (
            pytest.raises(BlockingIOError, match="another process is writing it") as caught,
            publishing(tmp_path / "a"),
        ):
            pass
        assert not open_files() - before
        assert caught.tb is not None  # it would keep a file open that nobody has closed
        with pytest.raises(BlockingIOError):
            remove_stale(tmp_path / "a")
    assert (names(tmp_path), (tmp_path / "a").read_bytes()) == (["a"], b"first")


def test_a_published_file_is_not_taken_for_the_one_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened before another writer's rename and locked after it, it is the published file."""
    plain = fcntl.flock
    raced = False

    def publish_first(file: object, how: int) -> None:
        nonlocal raced
        if not raced:
            raced = True
            (tmp_path / ".a.tmp").write_bytes(b"theirs")
            (tmp_path / ".a.tmp").replace(tmp_path / "a")
        plain(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", publish_first)
    with publishing(tmp_path / "a") as file:
        file.write(b"ours")
        assert (tmp_path / "a").read_bytes() == b"theirs"
    assert (tmp_path / "a").read_bytes() == b"ours"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_no_folder(tmp_path: Path, error: type[BaseException]) -> None:
    before = open_files()
    with pytest.raises(error), publishing_folder(tmp_path / "a") as folder:  # noqa: PT012
        (folder / "b").write_bytes(b"new")
        raise error
    assert (names(tmp_path), open_files() - before) == ([], set())


def test_a_folder_that_a_killed_process_left_is_emptied(tmp_path: Path) -> None:
    (tmp_path / ".a.tmp" / "inner").mkdir(parents=True)
    (tmp_path / ".a.tmp" / "b").write_bytes(b"half")
    with publishing_folder(tmp_path / "a"):
        pass
    assert (names(tmp_path), names(tmp_path / "a")) == (["a"], [])


def test_a_link_that_a_killed_process_left_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "b").write_bytes(b"old")
    (tmp_path / ".a.tmp").mkdir()
    (tmp_path / ".a.tmp" / "link").symlink_to(tmp_path / "kept")
    with publishing_folder(tmp_path / "a"):
        pass
    assert (names(tmp_path / "a"), names(tmp_path / "kept")) == ([], ["b"])


def _publish(folder: Path) -> None:
    (folder / ".a.tmp").rename(folder / "a")


def _publish_and_begin_again(folder: Path) -> None:
    _publish(folder)
    (folder / ".a.tmp").mkdir()


@pytest.mark.parametrize("race", [_publish, _publish_and_begin_again])
def test_a_published_folder_is_not_taken_for_the_one_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, race: Callable[[Path], None]
) -> None:
    """Opened before another writer's rename and locked after it, it is the published folder."""
    plain = fcntl.flock

    def publish_first(lock: int, how: int) -> None:
        (tmp_path / ".a.tmp" / "b").write_bytes(b"theirs")
        race(tmp_path)
        plain(lock, how)

    monkeypatch.setattr(fcntl, "flock", publish_first)
    before = open_files()
    with (
        pytest.raises(BlockingIOError, match="another process is writing it"),
        publishing_folder(tmp_path / "a"),
    ):
        pass
    assert (names(tmp_path / "a"), open_files() - before) == (["b"], set())


def test_those_who_write_a_folder_and_those_who_remove_it_meet_anywhere(tmp_path: Path) -> None:
    """A folder may be removed before its writer has locked it; each comes through or is told to wait."""
    done = threading.Event()

    def remove() -> None:
        while not done.is_set():
            for stale in tmp_path.glob(".*"):
                with contextlib.suppress(OSError):
                    fd = os.open(stale, os.O_RDONLY | os.O_DIRECTORY)
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        # The folder of that name may be another one by now, whose writer has its lock.
                        with contextlib.suppress(FileNotFoundError):
                            if os.path.samestat(os.fstat(fd), stale.stat()):
                                shutil.rmtree(stale, ignore_errors=True)
                    os.close(fd)

    def write() -> int:
        written = 0
        for _ in range(20):
            with contextlib.suppress(BlockingIOError), publishing_folder(tmp_path / "a") as folder:
                (folder / "b").write_bytes(b"whole")
                written += 1
            shutil.rmtree(tmp_path / "a", ignore_errors=True)
            with scratch_folder(tmp_path, ".scratch-") as folder:
                (folder / "b").write_bytes(b"whole")
        return written

    with ThreadPoolExecutor(3) as threads:
        removing = [threads.submit(remove) for _ in range(2)]
        try:
            assert threads.submit(write).result() > 0
        finally:
            done.set()
        for each in removing:
            each.result()


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Network file systems cannot exchange two names, and none of them is here."""
    if not exchanges:
        monkeypatch.setattr(publish.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=lambda *_: -1))
    old = tmp_path / "a"
    old.mkdir()
    (old / "one").write_bytes(b"old")
    (old / "two").write_bytes(b"old")
    with publishing_folder(old, replace=True) as folder:
        (folder / "one").write_bytes(b"new")
        assert names(old) == ["one", "two"]
    assert names(tmp_path) == ["a"]
    assert (names(old), (old / "one").read_bytes()) == (["one"], b"new")
    with pytest.raises(ZeroDivisionError), publishing_folder(old, replace=True):
        _ = 1 / 0
    assert (names(tmp_path), names(old)) == (["a"], ["one"])
