"""Gathering equals slicing, whatever the shards look like, and a changed file is never served."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from corpus_server.corpus import guard as mapguard
from corpus_server.corpus.shards import Shard
from corpus_server.errors import CorpusChanged, ReadFailed
from corpus_server.pieces import Pieces
from corpus_server.read import gather
from corpus_server.read.gather import Gatherer
from corpus_server.read.memory import READS
from corpus_server.stores import Cache, StagedFile
from corpus_server.stores.objects import Store, StoreObject
from tests.corpora import open_shard, some_tokens, write_llmc, write_npy, write_raw
from tests.pages import drop
from tests.serving import environment


def write_odd_npy(path: Path, tokens: np.ndarray) -> Path:
    """Write an NPY file whose data begin at an odd byte."""
    header = f"{{'descr': '{tokens.dtype.str}', 'fortran_order': False, 'shape': ({tokens.size},), }}"
    header += " " * (len(header) % 2) + "\n"
    path.write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + tokens.tobytes()
    )
    assert (10 + len(header)) % 2
    return path


UINT16, UINT32 = np.dtype("uint16"), np.dtype("uint32")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Shard]]:
    """Types, alignments and sizes of all kinds, empty ones among them."""
    folder = tmp_path_factory.mktemp("shards")
    wide = {"dtype": "uint32", "vocabulary": 2**32}
    paths = [
        write_raw(folder / "0.bin", some_tokens(5000, seed=0)),
        write_raw(folder / "1.bin", []),
        write_npy(folder / "2.npy", some_tokens(3000, seed=2, **wide), dtype="uint32"),
        write_odd_npy(folder / "3.npy", some_tokens(4000, seed=3)),
        write_llmc(folder / "4.bin", some_tokens(2500, seed=4, **wide), dtype="uint32"),
        write_odd_npy(folder / "5.npy", some_tokens(900, seed=5, **wide)),
        write_npy(folder / "6.npy", some_tokens(700, dtype="uint8", vocabulary=256), dtype="uint8"),
        write_llmc(folder / "7.bin", []),
        write_raw(folder / "8.bin", some_tokens(64, seed=8)),
    ]
    with ExitStack() as opened:
        yield [opened.enter_context(open_shard(path, in_folder=True)) for path in paths]


def naive(shards: list[Shard], locations: np.ndarray, length: int, dtype: str) -> np.ndarray:
    """Read the files once more and slice."""
    rows = []
    for number, start in locations.tolist():
        shard = shards[number]
        content = shard.path.read_bytes()[shard.data_offset :]
        rows.append(np.frombuffer(content, shard.dtype)[start : start + length])
    return np.array(rows).astype(dtype).reshape(-1, length)


def windows(locations: np.ndarray, length: int) -> Pieces:
    """Return windows as rows of one piece."""
    return Pieces(np.insert(locations, 2, length, axis=1), np.arange(len(locations) + 1))


def locate_any(shards: list[Shard], length: int, count: int, seed: int) -> np.ndarray:
    """Return windows of `length` tokens at random places, the last possible start always among them."""
    draw = np.random.default_rng(seed)
    fitting = [number for number, shard in enumerate(shards) if shard.num_tokens >= length]
    numbers = draw.choice(fitting, count)
    last = np.array([shards[number].num_tokens - length for number in numbers])
    starts = draw.integers(0, last + 1)
    starts[:1] = last[:1]
    return np.stack((numbers, starts), axis=1).astype(np.int64)


@pytest.mark.parametrize(
    ("length", "count"), [(1, 1), (1, 3000), (2, 7), (64, 300), (65, 1025), (513, 512), (5000, 3)]
)
def test_equals_slicing(shards: list[Shard], length: int, count: int) -> None:
    locations = locate_any(shards, length, count, seed=length)
    tokens = Gatherer(shards).gather(locations, length, UINT32)
    assert (tokens.dtype, tokens.flags.c_contiguous) == (UINT32, True)
    assert (tokens == naive(shards, locations, length, "uint32")).all()


@settings(max_examples=60)
@given(length=st.integers(1, 700), count=st.integers(1, 60), seed=st.integers(0, 2**32), data=st.data())
def test_equals_slicing_over_any_list_of_shards(
    shards: list[Shard], length: int, count: int, seed: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(shards), min_size=1, max_size=6))
    if not any(shard.num_tokens >= length for shard in chosen):
        chosen.append(shards[0])
    locations = locate_any(chosen, length, count, seed)
    expected = naive(chosen, locations, length, "int64")
    selection = Gatherer(chosen).select(windows(locations, length), np.dtype("int64"))
    assert (selection.read(slice(count)) == expected).all()
    first = data.draw(st.integers(0, count))
    num = data.draw(st.integers(0, count - first))
    assert (selection.read(slice(first, first + num)) == expected[first : first + num]).all()


@pytest.mark.parametrize(
    ("shard", "start"),
    [(0, 4991), (0, -1), (0, 2**62), (1, 0), (8, 55), (7, -(2**62)), (-2, 0)],
    ids=["past-end", "negative", "huge", "empty-shard", "small-shard", "huge-negative", "no-shard"],
)
def test_a_window_outside_its_shard_is_never_read(shards: list[Shard], shard: int, start: int) -> None:
    """The address would lie in the memory of something else."""
    locations = np.array([[0, 0], [shard, start]], np.int64)
    with pytest.raises(IndexError, match="lies outside its shard"):
        Gatherer(shards).gather(locations, 10, UINT32)


def test_a_window_as_long_as_the_longest_reaches_over_a_large_corpus(tmp_path: Path) -> None:
    """2^20 + 1 tokens from a file of 9 TB, marked at the end: starts x length x bytes exceed 2^63."""
    num_tokens = 2**42 + 2**21
    path = tmp_path / "big.bin"
    with path.open("wb") as file:
        try:
            file.truncate(2 * num_tokens)
        except OSError as error:
            pytest.skip(f"this file system holds no file of 9 TB: {error}")
        file.seek(2 * num_tokens - 4)
        file.write(b"\x01\x00\x02\x00")
    with open_shard(path) as shard:
        out = Gatherer([shard]).gather(np.array([[0, num_tokens - 2**20 - 1]]), 2**20 + 1, UINT16)
    assert (out[0, :-2] == 0).all()
    assert out[0, -2:].tolist() == [1, 2]


TRUNCATED = """
import os, sys
from pathlib import Path
import numpy as np
from corpus_server.corpus import guard as mapguard
from corpus_server.errors import CorpusChanged
from corpus_server.read.gather import Gatherer
from corpus_server.corpus.shards import open_runs
path, keep, start, memory, when = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
assert mapguard.install()

class CutAfterCheck:
    def __init__(self, shard):
        self.shard = shard
        self.file = self
        self.num_checks = 0
    def __getattr__(self, name):
        return getattr(self.shard if hasattr(self.shard, name) else self.shard.file, name)
    def check_unchanged(self):
        self.shard.file.check_unchanged()
        self.num_checks += 1
        if when == "during" and self.num_checks % 2 and armed:
            os.truncate(path, keep)

armed = False
with open_runs(path)[0] as shard:
    gatherer = Gatherer([CutAfterCheck(shard)])
    locations = np.array([[0, start], [0, 0]])
    if memory == "warm":
        gatherer.gather(locations, 100, np.dtype("uint16"))
    armed = True
    if when == "before":
        os.truncate(path, keep)
    try:
        gatherer.gather(locations, 100, np.dtype("uint16"))
    except CorpusChanged as error:
        print(error.detail)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no guard elsewhere")
@pytest.mark.parametrize(
    ("keep", "start"),
    [(4096, 50_000), (0, 50_000), (99_000, 49_450), (99_000, 0)],
    ids=["gone-page", "empty-file", "tail-of-zeros", "window-still-there"],
)
@pytest.mark.parametrize(("memory", "when"), [("warm", "before"), ("cold", "during")])
def test_a_truncated_file_is_an_error_and_never_a_signal(
    tmp_path: Path, keep: int, start: int, memory: str, when: str
) -> None:
    """Before the first check, or between it and the copy; a SIGBUS would end the process with code -7."""
    path = write_raw(tmp_path / "a.bin", some_tokens(60_000))
    ended = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(path), str(keep), str(start), memory, when],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"a.bin: 120000 bytes at opening, {keep} now")


def test_a_selection_keeps_few_bytes_of_a_window(shards: list[Shard]) -> None:
    """A response to a reader that takes nothing any more keeps it."""
    gatherer = Gatherer(shards[:1])
    locations = np.zeros((100_000, 2), np.int64)
    gatherer.select(windows(locations[:1], 9), UINT16)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        selection = gatherer.select(windows(locations, 9), UINT16)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept <= 9 * len(locations) + 4096
    assert (selection.read(slice(99_999, 100_000)) == shards[0].tokens[:9]).all()


def test_only_the_shards_that_are_touched_are_checked(tmp_path: Path) -> None:
    paths = [write_raw(tmp_path / f"{k}.bin", some_tokens(5000, seed=k)) for k in range(2)]
    with open_shard(paths[0]) as first, open_shard(paths[1]) as second:
        gatherer = Gatherer([first, second])
        os.truncate(paths[1], 100)
        out = gatherer.gather(np.array([[0, 4990]]), 10, UINT16)
        assert (out[0] == some_tokens(5000, seed=0)[-10:]).all()
        with pytest.raises(CorpusChanged, match=r"1\.bin"):
            gatherer.gather(np.array([[1, 4990]]), 10, UINT16)


class Watched:
    """A shard, and its file, that counts its checks, and does something after the first one."""

    def __init__(self, shard: Shard, after_first: Callable[[], object] = lambda: None) -> None:
        self._shard, self.file = shard, self
        self._after_first = after_first
        self.num_checks = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._shard, name)

    def check_unchanged(self) -> None:
        self._shard.file.check_unchanged()
        self.num_checks += 1
        if self.num_checks == 1:
            self._after_first()


@pytest.mark.parametrize("change", ["cut", "written"])
def test_a_change_during_the_copy_is_found_after_it(tmp_path: Path, change: str) -> None:
    """Within the last page, where no page is missing: the copy holds zeros or new tokens, and is refused."""
    path = write_raw(tmp_path / "a.bin", some_tokens(3000))

    def change_it() -> None:
        if change == "cut":
            os.truncate(path, 5000)
        else:
            path.write_bytes(bytes(6000))
            os.utime(path, ns=(0, 0))

    with open_shard(path) as shard:
        watched = Watched(shard, change_it)
        with pytest.raises(CorpusChanged, match="5000 now" if change == "cut" else "written to since"):
            Gatherer([watched]).gather(np.array([[0, 2900]]), 100, UINT16)
        assert watched.num_checks == 1


@pytest.mark.parametrize(
    ("touched", "num_checks"), [([2, 0, 2], [2, 0, 2]), ([1, 0], [2, 2]), ([0, 1], [2, 2]), ([0, 0], [2])]
)
def test_every_shard_touched_is_checked_once_before_and_once_after(
    tmp_path: Path, touched: list[int], num_checks: list[int]
) -> None:
    numbers = range(len(num_checks))
    opened = [open_shard(write_raw(tmp_path / f"{k}.bin", some_tokens(500, seed=k))) for k in numbers]
    watched = [Watched(shard) for shard in opened]
    locations = np.array([[number, 5 * row] for row, number in enumerate(touched)])
    Gatherer(watched).gather(locations, 50, UINT16)
    assert [shard.num_checks for shard in watched] == num_checks
    for shard in opened:
        shard.close()


def test_a_shard_of_a_store_stays_mapped_while_it_is_copied_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its addresses would hold nothing, and touching them would end the process.

    A window that lies in two extents holds both, and no other one.
    """
    cache = Cache(tmp_path / "cache", 20_000, extent_bytes=4096)
    what = StoreObject(url="a", path="a", size_bytes=20_000, etag="1", modified="")
    tokens = some_tokens(10_000)
    with StagedFile(tmp_path / "a.bin", cast("Store", None), what, cache) as file:
        address = np.frombuffer(file.map(), np.uint8).ctypes.data
        extents = file.extents[:3]
        for each in extents:
            with cache.filling(each.part.key, each.size_bytes, urgent=False) as local:
                local.write(tokens.tobytes()[each.start : each.stop])
            assert each.attach()
        fields = {"data_offset": 0, "dtype": UINT16, "num_tokens": 10_000, "address": address}
        selection = Gatherer([SimpleNamespace(file=file, **fields)]).select(
            windows(np.array([[0, 2047]]), 3), UINT16
        )
        copy, left = selection._copy, list[list[bool]]()
        monkeypatch.setattr(
            selection,
            "_copy",
            lambda *part: (left.append([each.detach() for each in extents]), copy(*part))[1],
        )
        assert (selection.read(slice(0, 1))[0] == tokens[2047:2050]).all()
        assert left == [[False, False, True]]
        assert all(each.detach() for each in extents)


def test_a_page_that_the_disk_did_not_deliver_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is as it was, and yet a page of the copy was replaced by zeros."""
    guarded: list[mapguard.GuardedRange] = []
    guard = mapguard.guard

    def remember(start: int, num_bytes: int) -> mapguard.GuardedRange:
        guarded.append(guard(start, num_bytes))
        return guarded[-1]

    def fault() -> None:
        guarded[0].num_faults += 1

    monkeypatch.setattr(mapguard, "guard", remember)
    with open_shard(write_raw(tmp_path / "a.bin", some_tokens(100))) as shard:
        gatherer = Gatherer([Watched(shard, fault)])
        for _ in range(2):  # until the shard is opened anew
            with pytest.raises(ReadFailed, match=r"a\.bin: the disk did not deliver 1 pages"):
                gatherer.gather(np.array([[0, 0]]), 10, UINT16)


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Shard]:
    """A shard of 4 MB of which nothing is in memory."""
    path = write_raw(tmp_path / "cold.bin", some_tokens(2_000_000))
    drop(path)
    with open_shard(path) as shard:
        yield shard


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], set[int]]]:
    """What was asked for ahead: the addresses and the bytes of each call."""
    calls: list[tuple[list[int], set[int]]] = []
    read_ahead = gather.read_ahead

    def record(addresses: np.ndarray, num_bytes: np.ndarray) -> None:
        calls.append((addresses.tolist(), set(num_bytes.tolist())))
        read_ahead(addresses, num_bytes)

    monkeypatch.setattr(gather, "read_ahead", record)
    return calls


def scattered(count: int, *, seed: int) -> np.ndarray:
    """Return windows of 1,000 tokens all over the cold shard."""
    starts = np.random.default_rng(seed).permutation(2000)[:count] * 1000
    return np.stack((np.zeros_like(starts), starts), axis=1)


def test_once_a_window_came_from_disk_the_rest_are_asked_for_at_once(
    cold: Shard, asked: list[tuple[list[int], set[int]]]
) -> None:
    """After the first piece of a selection; of the next one before it."""
    gatherer = Gatherer([cold])
    for seed, first_piece in ((0, 40), (1, 0)):
        locations = scattered(200, seed=seed)
        selection = gatherer.select(windows(locations, 1000), UINT16)
        pieces = [selection.read(slice(first, first + 40)) for first in range(0, 200, 40)]
        written = sliding_window_view(some_tokens(2_000_000), 1000)  # the file, read again, would be warm
        assert (np.concatenate(pieces) == written[locations[:, 1]]).all()
        addresses = [cold.address + 2 * start for start in locations[first_piece:, 1].tolist()]
        assert asked.pop() == (addresses, {2000})
        assert asked == []
        assert gatherer.cold
    assert 1 <= gatherer.num_faults <= 2 * 40


def test_what_is_resident_is_not_asked_for(cold: Shard, asked: list[tuple[list[int], set[int]]]) -> None:
    """Neither at all, nor once it is seen that the disk is no longer waited for."""
    cold.path.read_bytes()
    gatherer = Gatherer([cold])
    gatherer.gather(scattered(200, seed=0), 1000, UINT16)
    assert (asked, gatherer.cold, gatherer.num_faults) == ([], False, 0)
    gatherer.cold = True
    for seed in range(3):
        gatherer.gather(scattered(200, seed=seed), 1000, UINT16)
        assert (asked, gatherer.cold) == ([], False)


@pytest.mark.parametrize("num_faults", [0, 1, 3])
def test_a_fault_tells_that_the_disk_was_waited_for(
    shards: list[Shard], monkeypatch: pytest.MonkeyPatch, num_faults: int
) -> None:
    monkeypatch.setattr(gather, "num_major_faults", itertools.count(10, num_faults).__next__)
    before = [READS.num_hits, READS.num_misses, READS.num_faults]
    gatherer = Gatherer(shards)
    assert (gatherer.cold, gatherer.num_faults, gatherer.reads_ahead) == (False, 0, True)
    gatherer.gather(np.array([[0, 0]]), 10, UINT16)
    after = [READS.num_hits, READS.num_misses, READS.num_faults]
    assert (gatherer.cold, gatherer.num_faults) == (num_faults > 0, num_faults)
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        num_faults == 0,
        num_faults > 0,
        num_faults,
    ]
