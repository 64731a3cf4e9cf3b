from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corpus_server.errors import CacheFull, UnreadableCorpus
from corpus_server.stores.cache import PLANNED_SECONDS, Cache
from tests.corpora import open_descriptors
from tests.serving import environment


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1000)


def fill(cache: Cache, key: str, num_bytes: int, *, urgent: bool = False) -> None:
    with cache.filling(key, num_bytes, urgent=urgent) as file:
        file.write(key[-1:].encode() * num_bytes)


def age(cache: Cache, key: str, seconds: float = 2 * PLANNED_SECONDS) -> None:
    then = time.time() - seconds
    os.utime(cache.extents / key, (then, then))


def num_bytes(cache: Cache) -> int:
    return sum(path.stat().st_size for path in cache.extents.glob("*/*/*"))


def files_of(cache: Cache) -> list[str]:
    return sorted(path.relative_to(cache.extents).as_posix() for path in cache.extents.rglob("*"))


def test_an_extent_appears_when_it_is_whole(cache: Cache) -> None:
    with cache.filling("o/a", 3, urgent=False) as file:
        file.write(b"abc")
        assert not cache.has("o/a")
        assert cache.open("o/a") is None
    opened = cache.open("o/a")
    assert opened is not None
    with opened as file:
        assert file.read(0, 3) == b"abc"
    assert num_bytes(cache) == 3


def test_a_failure_leaves_nothing(cache: Cache) -> None:
    def fail() -> None:
        with cache.filling("o/a", 3, urgent=False) as file:
            file.write(b"ab")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert files_of(cache) == []


def held(cache: Cache, names: str) -> str:
    """Return which extents are there, of one object."""
    return "".join(each for each in names if cache.has(f"o/{each}"))


def test_the_one_wanted_longest_ago_makes_room(cache: Cache) -> None:
    for key, seconds in {"o/a": 20, "o/b": 40, "o/c": 30}.items():
        fill(cache, key, 300)
        age(cache, key, seconds)
    cache.touch("o/b")
    fill(cache, "o/d", 300)
    assert held(cache, "abcd") == "abd"


def test_the_one_needed_last_makes_room_and_before_it_those_that_nobody_needs(cache: Cache) -> None:
    """Whenever they were wanted."""
    needed_in = {"o/a": 7.0, "o/b": 9.0, "o/c": 8.0}
    cache.needed_in = lambda keys: [needed_in.get(key, math.inf) for key in keys]
    for key, seconds in {"o/a": 40, "o/b": 20, "o/x": 20, "o/c": 30, "o/y": 30}.items():
        fill(cache, key, 200)
        age(cache, key, seconds)
    left = []
    for key in ("1/1", "2/2", "3/3", "4/4"):
        fill(cache, key, 200)
        cache.touch(key)
        left.append(held(cache, "abcxy"))
    assert left == ["abcx", "abc", "ac", "a"]


def test_one_in_use_stays(cache: Cache) -> None:
    fill(cache, "o/a", 600)
    age(cache, "o/a")
    opened = cache.open("o/a")
    assert opened is not None
    with opened, pytest.raises(CacheFull, match="--cache-bytes is 1000"):
        fill(cache, "o/b", 600, urgent=True)
    assert files_of(cache) == ["o", "o/a", "o/a/tokens"]
    fill(cache, "o/b", 600)
    assert files_of(cache) == ["o", "o/b", "o/b/tokens"]


def test_one_that_somebody_plans_for_makes_room_only_for_a_request_that_waits(cache: Cache) -> None:
    fill(cache, "o/a", 600)
    with pytest.raises(CacheFull):
        fill(cache, "o/b", 600)
    fill(cache, "o/b", 600, urgent=True)
    assert not cache.has("o/a")
    cache.touch("o/b", planned=False)
    fill(cache, "o/c", 600)


def test_an_extent_larger_than_the_cache_is_refused(cache: Cache) -> None:
    with pytest.raises(CacheFull):
        fill(cache, "o/a", 1001)
    assert files_of(cache) == []


def test_the_same_extent_is_staged_once(cache: Cache) -> None:
    with (
        cache.filling("o/a", 3, urgent=False),
        pytest.raises(BlockingIOError),
        cache.filling("o/a", 3, urgent=True),
    ):
        pass
    assert cache.has("o/a")


def test_an_extent_that_is_there_is_not_staged_again(cache: Cache) -> None:
    """Another process may stage it between a look for it and its turn: the copy that is mapped must stay."""
    fill(cache, "o/a", 600)
    opened = cache.open("o/a")
    assert opened is not None
    with opened:
        with pytest.raises(BlockingIOError):
            fill(cache, "o/a", 600)
        assert os.fstat(opened.fd).st_nlink == 1
    assert files_of(cache) == ["o", "o/a", "o/a/tokens"]
    assert cache.held() == (1, 600)


def test_extents_count_before_the_disk_has_made_room_for_them(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making room takes long, and the cache is not locked meanwhile."""
    counted: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: counted.append(num_bytes(cache)))
    fill(cache, "o/a", 600)
    assert counted == [600]


def test_a_full_disk_is_said_before_anything_is_fetched(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CacheFull, match="No space left on device"):
        fill(cache, "o/a", 3)
    assert files_of(cache) == []


def test_what_a_killed_process_left_is_removed(cache: Cache) -> None:
    script = (
        "import sys, time; from pathlib import Path; from corpus_server.stores.cache import Cache\n"
        f"with Cache(Path({str(cache.folder)!r}), 1000).filling('o/a', 600, urgent=False):\n"
        "    print('begun', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment(), text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert num_bytes(cache) == 600
        with pytest.raises(CacheFull):
            fill(cache, "o/b", 600)
        process.send_signal(signal.SIGKILL)
        process.wait()
    fill(cache, "o/b", 600)
    assert files_of(cache) == ["o", "o/b", "o/b/tokens"]


def test_a_machine_that_was_started_again_has_an_empty_cache(cache: Cache) -> None:
    fill(cache, "o/a", 3)
    Cache(cache.folder, 1000)
    assert cache.has("o/a")
    (cache.folder / "boot").write_bytes(b"an earlier one")
    Cache(cache.folder, 1000)
    assert not cache.has("o/a")
    fill(cache, "o/a", 3)
    Cache(cache.folder, 1000)
    assert cache.has("o/a")


def test_one_that_is_removed_while_it_is_opened_is_not_there(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes would still be right, but nothing would say when the disk did not take them."""
    fill(cache, "o/a", 3)
    lock = fcntl.flock

    def remove_first(fd: int, how: int) -> None:
        (cache.extents / "o" / "a" / "tokens").unlink()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    assert cache.open("o/a") is None


def test_a_disk_that_does_not_take_an_extent_takes_it_from_everybody(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache, "o/a", 3)
    cache.sync("o/a")
    cache.sync("none")
    opened = cache.open("o/a")
    assert opened is not None
    with opened as file:

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", fail)
        cache.sync("o/a")
        assert not cache.has("o/a")
        assert os.fstat(file.fd).st_nlink == 0


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnreadableCorpus, match="cannot be used"):
        Cache(tmp_path / "file" / "cache", 1000)


def test_without_descriptors_an_extent_cannot_be_opened_and_nobody_waits(cache: Cache) -> None:
    """Not an extent that was removed a moment ago, for which the cache looks again."""
    fill(cache, "o/a", 10)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 8, limits[1]))
    try:
        held: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        with pytest.raises(UnreadableCorpus, match=r"Too many open files.*ulimit -n"):
            cache.open("o/a")
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    opened = cache.open("o/a")
    assert opened is not None
    opened.close()
