"""Bringing pages in: by every method the same, and a fault is an error."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from corpus_server.pages import Method, PageFault, Pager

from tests.corpora import open_descriptors

PAGE = mmap.PAGESIZE
NUM_PAGES = 3000


@pytest.fixture(params=["vectored", "single"])
def pager(request: pytest.FixtureRequest) -> Iterator[Pager]:
    with_method = Pager()
    method: Method = request.param
    if with_method.method == "none" or (with_method.method == "single" and method == "vectored"):
        with_method.close()
        pytest.skip(f"this kernel has no {method} populate")
    with_method.method = method
    yield with_method
    with_method.close()


@pytest.fixture
def mapped(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A file of 3,000 pages and a view of its map."""
    path = tmp_path / "pages"
    path.write_bytes(os.urandom(NUM_PAGES * PAGE))
    with path.open("rb") as file:
        return path, np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def resident_kilobytes(view: np.ndarray) -> int:
    """Return how much of a map this process has in its page table (Rss in smaps)."""
    start = f"{view.ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(start):
            return next(int(rest.split()[1]) for rest in lines if rest.startswith("Rss:"))
    raise AssertionError("the map is gone")


def test_exactly_the_pages_of_the_ranges_come_in(pager: Pager, mapped: tuple[Path, np.ndarray]) -> None:
    """1,500 ranges, more than one call takes, each over the border of two pages."""
    _, view = mapped
    assert resident_kilobytes(view) == 0
    addresses = (
        view.ctypes.data + np.arange(1500, dtype=np.uint64) * np.uint64(2 * PAGE) + np.uint64(PAGE - 8)
    )
    pager.populate(addresses[:10], 8)
    pager.populate(addresses, 16)
    assert resident_kilobytes(view) == NUM_PAGES * PAGE // 1024


def test_each_range_may_have_a_length_of_its_own(pager: Pager, mapped: tuple[Path, np.ndarray]) -> None:
    _, view = mapped
    addresses = np.array([view.ctypes.data, view.ctypes.data + 100 * PAGE], np.uint64)
    pager.populate(addresses, np.array([1, 3 * PAGE], np.uint64))
    assert resident_kilobytes(view) >= 4 * PAGE // 1024


def test_no_range_is_no_work(pager: Pager) -> None:
    pager.populate(np.empty(0, np.uint64), 100)
    pager.read_ahead(np.empty(0, np.uint64), 100)


@pytest.mark.parametrize("bad", [0, 700, 1023, 1024, 1499])
def test_one_bad_range_among_many_is_a_fault(pager: Pager, mapped: tuple[Path, np.ndarray], bad: int) -> None:
    path, view = mapped
    os.truncate(path, 2000 * PAGE)
    addresses = view.ctypes.data + np.arange(1500, dtype=np.uint64) * np.uint64(PAGE)
    pager.populate(addresses, 64)
    addresses[bad] = view.ctypes.data + 2500 * PAGE
    with pytest.raises(PageFault, match="Bad address"):
        pager.populate(addresses, 64)
    pager.read_ahead(addresses, 64)


def test_a_range_that_ends_behind_the_file_is_a_fault(pager: Pager, mapped: tuple[Path, np.ndarray]) -> None:
    path, view = mapped
    os.truncate(path, 10 * PAGE)
    last = np.array([view.ctypes.data + 10 * PAGE - 4], np.uint64)
    pager.populate(last, 4)
    with pytest.raises(PageFault):
        pager.populate(last, 5)


def test_none_does_nothing() -> None:
    pager = Pager()
    method, pager.method = pager.method, "none"
    pager.populate(np.array([0], np.uint64), 1)
    pager.read_ahead(np.array([0], np.uint64), 1)
    pager.method = method
    pager.close()


def test_close_may_be_repeated() -> None:
    before = open_descriptors()
    pager = Pager()
    pager.close()
    pager.close()
    assert open_descriptors() == before
