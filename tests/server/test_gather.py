"""Gathering equals slicing, whatever the shards look like, and a changed file is never served."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from corpus_server.pages import Method, PageFault, Pager
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import CorpusChanged, ReadFailed
from corpus_server.formats import TokenDtype
from corpus_server.gather import Gatherer
from corpus_server.shard import Shard
from tests.corpora import some_tokens, write_llmc, write_npy, write_raw
from tests.serving import environment

METHODS: tuple[Method, ...] = ("vectored", "single", "none")


@pytest.fixture(params=METHODS)
def pager(request: pytest.FixtureRequest) -> Iterator[Pager]:
    """A pager for each way to bring pages in, forced."""
    made = Pager()
    made.method = request.param
    yield made
    made.method = "single"  # "none" has no descriptor to close
    made.close()


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
def test_equals_slicing(shards: list[Shard], pager: Pager, length: int, count: int) -> None:
    gatherer = Gatherer(shards, pager)
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
    made = Pager()
    locations = locate_any(chosen, length, count, seed)
    out = np.full((count, length), 7, "int64")
    Gatherer(chosen, made).gather(locations, out)
    made.close()
    assert (out == naive(chosen, locations, out)).all()


def test_fills_a_row_range_of_a_larger_buffer_and_nothing_else(shards: list[Shard], pager: Pager) -> None:
    buffer = np.full((6, 10), 9, "uint32")
    locations = np.array([[0, 3], [4, 5]])
    Gatherer(shards, pager).gather(locations, buffer[2:4])
    assert (buffer[2:4] == naive(shards, locations, buffer[2:4])).all()
    assert (buffer[[0, 1, 4, 5]] == 9).all()


def test_no_window_is_no_work(shards: list[Shard], pager: Pager) -> None:
    Gatherer(shards, pager).gather(np.empty((0, 2), np.int64), np.empty((0, 5), "uint16"))


@pytest.mark.parametrize(
    ("shard", "start"),
    [(0, 4991), (0, -1), (0, 2**62), (1, 0), (8, 55), (7, -(2**62))],
    ids=["past-end", "negative", "huge", "empty-shard", "small-shard", "huge-negative"],
)
def test_a_window_outside_its_shard_is_never_read(
    shards: list[Shard], pager: Pager, shard: int, start: int
) -> None:
    """The address would lie in the memory of something else."""
    locations = np.array([[0, 0], [shard, start]], np.int64)
    with pytest.raises(IndexError, match="a window of 10 tokens lies outside its shard"):
        Gatherer(shards, pager).gather(locations, np.empty((2, 10), "uint16"))


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
    made = Pager()
    with Shard.open(path) as shard:
        out = np.empty((1, 2**20 + 1), "uint16")
        Gatherer([shard], made).gather(np.array([[0, num_tokens - 2**20 - 1]]), out)
    made.close()
    assert (out[0, :-2] == 0).all()
    assert out[0, -2:].tolist() == [1, 2]


TRUNCATED = """
import os, sys
from pathlib import Path
import numpy as np
from corpus_server.errors import CorpusChanged
from corpus_server.gather import Gatherer
from corpus_server.pages import Pager
from corpus_server.shard import Shard
path, method, keep, start = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pager = Pager()
pager.method = method
with Shard.open(path) as shard:
    gatherer = Gatherer([shard], pager)
    out = np.full((2, 100), 7, "uint16")
    if sys.argv[5] == "warm":
        gatherer.gather(np.array([[0, start], [0, 0]]), out)
    os.truncate(path, keep)
    try:
        gatherer.gather(np.array([[0, start], [0, 0]]), out)
    except CorpusChanged as error:
        print(error.detail)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("keep", "start"),
    [(4096, 50_000), (0, 50_000), (99_000, 49_450), (99_000, 0)],
    ids=["gone-page", "empty-file", "tail-of-zeros", "window-still-there"],
)
@pytest.mark.parametrize("memory", ["warm", "cold"])
def test_a_truncated_file_is_an_error_and_never_a_signal(
    tmp_path: Path, method: str, keep: int, start: int, memory: str
) -> None:
    """In a process of its own, which a SIGBUS would end with code -7."""
    path = write_raw(tmp_path / "a.bin", some_tokens(60_000))
    ended = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(path), method, str(keep), str(start), memory],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"a.bin: 120000 bytes at opening, {keep} now")


def test_only_the_shards_that_are_touched_are_checked(tmp_path: Path, pager: Pager) -> None:
    paths = [write_raw(tmp_path / f"{k}.bin", some_tokens(5000, seed=k)) for k in range(2)]
    with Shard.open(paths[0]) as first, Shard.open(paths[1]) as second:
        gatherer = Gatherer([first, second], pager)
        os.truncate(paths[1], 100)
        out = np.empty((1, 10), "uint16")
        gatherer.gather(np.array([[0, 4990]]), out)
        assert (out[0] == some_tokens(5000, seed=0)[-10:]).all()
        with pytest.raises(CorpusChanged, match=r"1\.bin"):
            gatherer.gather(np.array([[1, 4990]]), out)


class ChangesWhileCopied:
    """A shard whose file is cut between the pre-check and the end of the copy."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.tokens, self.num_tokens, self.address = shard.tokens, shard.num_tokens, shard.address
        self.dtype: TokenDtype = shard.dtype
        self.checks = 0

    def check_unchanged(self) -> None:
        self.checks += 1
        self._shard.check_unchanged()


def test_a_change_during_the_copy_is_found_after_it(tmp_path: Path) -> None:
    """A cut inside the last page, between populating and checking: the copy holds zeros, and is refused."""
    path = write_raw(tmp_path / "a.bin", some_tokens(3000))
    made = Pager()
    populate = made.populate

    def populate_then_cut(addresses: np.ndarray, num_bytes: int | np.ndarray) -> None:
        populate(addresses, num_bytes)
        os.truncate(path, 5000)

    made.populate = populate_then_cut  # type: ignore[method-assign]
    with Shard.open(path) as shard:
        watched = ChangesWhileCopied(shard)
        with pytest.raises(CorpusChanged, match="6000 bytes at opening, 5000 now"):
            Gatherer([watched], made).gather(np.array([[0, 2900]]), np.empty((1, 100), "uint16"))
        assert watched.checks == 1
    made.close()


def test_a_fault_without_a_change_is_the_disk(tmp_path: Path) -> None:
    made = Pager()

    def fail(addresses: np.ndarray, num_bytes: int | np.ndarray) -> None:
        raise PageFault(14, "Bad address")

    made.populate = fail  # type: ignore[method-assign]
    with (
        Shard.open(write_raw(tmp_path / "a.bin", some_tokens(100))) as shard,
        pytest.raises(ReadFailed, match="did not deliver"),
    ):
        Gatherer([shard], made).gather(np.array([[0, 0]]), np.empty((1, 10), "uint16"))
    made.close()


def test_threads_may_share_it(shards: list[Shard], pager: Pager) -> None:
    gatherer = Gatherer(shards, pager)
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
