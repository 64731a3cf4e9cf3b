"""Gathering equals slicing, whatever the shards look like, and a changed file is never served."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server import gather, mapguard
from corpus_server.errors import CorpusChanged, ReadFailed
from corpus_server.formats import TokenDtype
from corpus_server.gather import Gatherer
from corpus_server.shard import Shard
from tests.corpora import some_tokens, write_llmc, write_npy, write_raw
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
        yield [opened.enter_context(Shard.open(path)) for path in paths]


def naive(shards: list[Shard], locations: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Read the files once more and slice."""
    rows = []
    for number, start in locations.tolist():
        shard = shards[number]
        content = shard.path.read_bytes()[shard.data_offset :]
        rows.append(np.frombuffer(content, shard.dtype)[start : start + out.shape[1]])
    return np.array(rows).astype(out.dtype).reshape(out.shape)


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
    gatherer = Gatherer(shards)
    locations = locate_any(shards, length, count, seed=length)
    out = np.full((count, length), 0xAAAAAAAA, "uint32")
    gatherer.gather(locations, out)
    assert (out == naive(shards, locations, out)).all()


@settings(max_examples=60)
@given(length=st.integers(1, 700), count=st.integers(1, 60), seed=st.integers(0, 2**32), data=st.data())
def test_equals_slicing_over_any_list_of_shards(
    shards: list[Shard], length: int, count: int, seed: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(shards), min_size=1, max_size=6))
    if not any(shard.num_tokens >= length for shard in chosen):
        chosen.append(shards[0])
    locations = locate_any(chosen, length, count, seed)
    out = np.full((count, length), 7, "int64")
    Gatherer(chosen).gather(locations, out)
    assert (out == naive(chosen, locations, out)).all()


def test_fills_a_row_range_of_a_larger_buffer_and_nothing_else(shards: list[Shard]) -> None:
    buffer = np.full((6, 10), 9, "uint32")
    locations = np.array([[0, 3], [4, 5]])
    Gatherer(shards).gather(locations, buffer[2:4])
    assert (buffer[2:4] == naive(shards, locations, buffer[2:4])).all()
    assert (buffer[[0, 1, 4, 5]] == 9).all()


def test_no_window_is_no_work(shards: list[Shard]) -> None:
    Gatherer(shards).gather(np.empty((0, 2), np.int64), np.empty((0, 5), "uint16"))


@pytest.mark.parametrize(
    ("shard", "start"),
    [(0, 4991), (0, -1), (0, 2**62), (1, 0), (8, 55), (7, -(2**62))],
    ids=["past-end", "negative", "huge", "empty-shard", "small-shard", "huge-negative"],
)
def test_a_window_outside_its_shard_is_never_read(shards: list[Shard], shard: int, start: int) -> None:
    """The address would lie in the memory of something else."""
    locations = np.array([[0, 0], [shard, start]], np.int64)
    with pytest.raises(IndexError, match="a window of 10 tokens lies outside its shard"):
        Gatherer(shards).gather(locations, np.empty((2, 10), "uint16"))


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
    with Shard.open(path) as shard:
        out = np.empty((1, 2**20 + 1), "uint16")
        Gatherer([shard]).gather(np.array([[0, num_tokens - 2**20 - 1]]), out)
    assert (out[0, :-2] == 0).all()
    assert out[0, -2:].tolist() == [1, 2]


TRUNCATED = """
import os, sys
from pathlib import Path
import numpy as np
from corpus_server import mapguard
from corpus_server.errors import CorpusChanged
from corpus_server.gather import Gatherer
from corpus_server.shard import Shard
path, keep, start, memory, when = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
assert mapguard.install()

class CutAfterCheck:
    def __init__(self, shard):
        self.shard = shard
        self.num_checks = 0
    def __getattr__(self, name):
        return getattr(self.shard, name)
    def check_unchanged(self):
        self.shard.check_unchanged()
        self.num_checks += 1
        if when == "during" and self.num_checks % 2 and armed:
            os.truncate(path, keep)

armed = False
with Shard.open(path) as shard:
    gatherer = Gatherer([CutAfterCheck(shard)])
    out = np.full((2, 100), 7, "uint16")
    locations = np.array([[0, start], [0, 0]])
    if memory == "warm":
        gatherer.gather(locations, out)
    armed = True
    if when == "before":
        os.truncate(path, keep)
    try:
        gatherer.gather(locations, out)
    except CorpusChanged as error:
        print(error.detail)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no guard elsewhere")
@pytest.mark.parametrize(
    ("keep", "start"),
    [(4096, 50_000), (0, 50_000), (99_000, 49_450), (99_000, 0)],
    ids=["gone-page", "empty-file", "tail-of-zeros", "window-still-there"],
)
@pytest.mark.parametrize("memory", ["warm", "cold"])
@pytest.mark.parametrize("when", ["before", "during"])
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


def test_only_the_shards_that_are_touched_are_checked(tmp_path: Path) -> None:
    paths = [write_raw(tmp_path / f"{k}.bin", some_tokens(5000, seed=k)) for k in range(2)]
    with Shard.open(paths[0]) as first, Shard.open(paths[1]) as second:
        gatherer = Gatherer([first, second])
        os.truncate(paths[1], 100)
        out = np.empty((1, 10), "uint16")
        gatherer.gather(np.array([[0, 4990]]), out)
        assert (out[0] == some_tokens(5000, seed=0)[-10:]).all()
        with pytest.raises(CorpusChanged, match=r"1\.bin"):
            gatherer.gather(np.array([[1, 4990]]), out)


class Watched:
    """A shard that counts its checks, and does something after the first one."""

    def __init__(self, shard: Shard, after_first: Callable[[], object] = lambda: None) -> None:
        self._shard = shard
        self._after_first = after_first
        self.tokens, self.num_tokens, self.address = shard.tokens, shard.num_tokens, shard.address
        self.dtype: TokenDtype = shard.dtype
        self.num_checks = 0

    def check_unchanged(self) -> None:
        self._shard.check_unchanged()
        self.num_checks += 1
        if self.num_checks == 1:
            self._after_first()


@pytest.mark.parametrize("change", ["cut", "written"])
def test_a_change_during_the_copy_is_found_after_it(tmp_path: Path, change: str) -> None:
    """Within the last page, where no page is missing: the copy holds zeros or new tokens, and is refused."""
    path = write_raw(tmp_path / "a.bin", some_tokens(3000))
    out = np.empty((1, 100), "uint16")

    def change_it() -> None:
        if change == "cut":
            os.truncate(path, 5000)
        else:
            path.write_bytes(bytes(6000))
            os.utime(path, ns=(0, 0))

    with Shard.open(path) as shard:
        watched = Watched(shard, change_it)
        with pytest.raises(CorpusChanged, match="5000 now" if change == "cut" else "written to since"):
            Gatherer([watched]).gather(np.array([[0, 2900]]), out)
        assert watched.num_checks == 1
        assert not out.any()


def test_every_shard_touched_is_checked_once_before_and_once_after(tmp_path: Path) -> None:
    opened = [Shard.open(write_raw(tmp_path / f"{k}.bin", some_tokens(500, seed=k))) for k in range(3)]
    watched = [Watched(shard) for shard in opened]
    locations = np.array([[2, 0], [0, 5], [2, 9]])
    Gatherer(watched).gather(locations, np.empty((3, 50), "uint16"))
    assert [shard.num_checks for shard in watched] == [2, 0, 2]
    for shard in opened:
        shard.close()


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
    with Shard.open(write_raw(tmp_path / "a.bin", some_tokens(100))) as shard:
        gatherer = Gatherer([Watched(shard, fault)])
        for _ in range(2):  # until the shard is opened anew
            with pytest.raises(ReadFailed, match=r"a\.bin: the disk did not deliver 1 pages"):
                gatherer.gather(np.array([[0, 0]]), np.empty((1, 10), "uint16"))


class SlowClock:
    """Lets every gather appear to take as long as set."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._calls = 0

    def __call__(self) -> float:
        self._calls += 1
        return 1000.0 * self._calls + (self.seconds if self._calls % 2 == 0 else 1000.0)


@pytest.mark.parametrize("length", [10, 2000])
def test_windows_are_asked_for_ahead_while_the_last_ones_came_slowly(
    shards: list[Shard], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Slow, fast, slow again: the gather after a slow one asks, with all of its windows at once."""
    asked: list[tuple[list[int], int]] = []
    clock = SlowClock()
    monkeypatch.setattr(gather.time, "perf_counter", clock)
    monkeypatch.setattr(
        gather, "read_ahead", lambda addresses, num_bytes: asked.append((addresses.tolist(), num_bytes))
    )
    gatherer = Gatherer([shards[0]])
    locations = np.array([[0, 7], [0, 2900], [0, 100]])
    out = np.empty((3, length), "uint16")
    expected = ([shards[0].address + 2 * start for start in locations[:, 1].tolist()], 2 * length)
    limit = 3 * (20e-6 + 2e-9 * length)
    history = []
    for seconds in (limit * 2, limit * 2, limit / 2, limit / 2, limit * 2, limit / 2):
        clock.seconds = seconds
        gatherer.gather(locations, out)
        history.append(len(asked))
        assert (out == naive(shards, locations, out)).all()
    assert history == [0, 1, 2, 2, 2, 3]
    assert asked == [expected] * 3


def test_threads_may_share_it(shards: list[Shard]) -> None:
    gatherer = Gatherer(shards)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(20):
            locations = locate_any(shards, 65, 64, seed * 1000 + turn)
            out = np.empty((64, 65), "uint32")
            gatherer.gather(locations, out)
            if not (out == naive(shards, locations, out)).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
