"""Reading ahead: the pages of the ranges are on their way in, by either system call, and nothing else is."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.read import readahead
from corpus_server.read.readahead import read_ahead
from tests.corpora import open_files
from tests.pages import drop, resident

PAGE = mmap.PAGESIZE
NUM_PAGES = 6000


@pytest.fixture(params=["vectored", "one-by-one"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either way to ask, and never the other one."""
    if request.param == "one-by-one":

        @contextlib.contextmanager
        def none() -> Iterator[int]:
            yield -1

        monkeypatch.setattr(readahead, "_own_pid_fd", none)
        return "one-by-one"
    one_by_one: list[object] = []
    monkeypatch.setattr(readahead._libc(), "madvise", lambda *range_: one_by_one.append(range_))
    read_ahead(np.array([np.zeros(1).ctypes.data], np.uint64), 1)
    if one_by_one:
        pytest.skip("this kernel takes no list of ranges from this process")
    monkeypatch.setattr(readahead._libc(), "madvise", lambda *range_: pytest.fail("asked one by one"))
    return "vectored"


@pytest.fixture
def cold(tmp_path: Path) -> np.ndarray:
    """A view of 6,000 mapped pages, `(NUM_PAGES * PAGE,) uint8`, none of which is in memory."""
    path = tmp_path / "cold"
    path.write_bytes(os.urandom(NUM_PAGES * PAGE))
    drop(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # as shards are: nothing comes along by itself
    return np.frombuffer(mapped, np.uint8)


def read_ahead_until_resident(
    view: np.ndarray, addresses: np.ndarray, num_bytes: int, expected: np.ndarray
) -> None:
    """Ask, and wait until every expected page is there: the disk works on while the call has returned.

    Asked again now and then: a kernel that is short of memory leaves hints out.
    """
    deadline = time.monotonic() + 20
    asked = 0.0
    while not resident(view)[expected].all():
        assert time.monotonic() < deadline, f"{(~resident(view)[expected]).sum()} pages are missing"
        if time.monotonic() - asked > 2:
            read_ahead(addresses, num_bytes)
            asked = time.monotonic()
        time.sleep(0.01)


def test_the_pages_of_the_ranges_come_in_and_no_others(calls: str, cold: np.ndarray) -> None:
    """1,500 ranges, more than one call takes, each over the border of two pages, three of four pages left."""
    pages = np.arange(1500) * 4
    addresses = np.uint64(cold.ctypes.data) + pages.astype(np.uint64) * np.uint64(PAGE) + np.uint64(PAGE - 8)
    expected = np.zeros(NUM_PAGES, bool)
    expected[pages] = expected[pages + 1] = True
    read_ahead_until_resident(cold, addresses, 16, expected)
    assert resident(cold).sum() == expected.sum()


def test_the_last_byte_of_a_page_brings_no_second_one(calls: str, cold: np.ndarray) -> None:
    addresses = np.array([cold.ctypes.data + 8 * PAGE - 1], np.uint64)
    read_ahead_until_resident(cold, addresses, 1, np.arange(NUM_PAGES) == 7)
    assert resident(cold).sum() == 1


def test_a_range_that_is_gone_is_no_error(calls: str, tmp_path: Path) -> None:
    """A hint: what cannot be read is found when it is copied."""
    path = tmp_path / "cut"
    path.write_bytes(bytes(8 * PAGE))
    with path.open("rb") as file:
        view = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    os.truncate(path, PAGE)
    read_ahead(np.array([view.ctypes.data, view.ctypes.data + 5 * PAGE], np.uint64), PAGE)
    assert view[0] == 0


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = open_files()
    here = np.zeros(10, np.uint8)
    for _ in range(5):
        read_ahead(np.array([here.ctypes.data], np.uint64), 1)
    assert not open_files() - before


@pytest.mark.parametrize("who", ["the kernel", "Python"])
def test_without_pid_descriptors_ranges_are_asked_for_one_by_one(
    cold: np.ndarray, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """As of a kernel before 5.3, and of some sandboxes."""

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if who == "Python":
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    addresses = np.array([cold.ctypes.data + 3 * PAGE], np.uint64)
    read_ahead_until_resident(cold, addresses, PAGE, np.arange(NUM_PAGES) == 3)


def test_each_range_may_have_its_own_size(calls: str, cold: np.ndarray) -> None:
    expected = np.zeros(NUM_PAGES, bool)
    expected[100] = expected[200:203] = True
    addresses = np.array([cold.ctypes.data + page * PAGE for page in (100, 200)], np.uint64)
    read_ahead_until_resident(cold, addresses, np.array([1, 2 * PAGE + 1]), expected)
    assert resident(cold).sum() == 4
