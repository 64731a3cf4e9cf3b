"""Rows that are put together from pieces: equal to slices, and read from a cold disk all at once."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus.shards import Shard
from corpus_server.errors import CorpusChanged
from corpus_server.pieces import NO_SHARD, Pieces
from corpus_server.read import gather
from corpus_server.read.gather import Gatherer
from tests.corpora import open_shard, some_tokens, write_llmc, write_npy, write_raw
from tests.pages import drop

NUM_TOKENS = 1_000_000
UINT16, INT64 = np.dtype("uint16"), np.dtype("int64")


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [write_raw(tmp_path / f"{n}.bin", some_tokens(NUM_TOKENS, seed=n)) for n in range(2)]


@pytest.fixture
def gatherer(paths: list[Path]) -> Iterator[Gatherer]:
    with open_shard(paths[0]) as first, open_shard(paths[1]) as second:
        yield Gatherer([first, second])


def scattered_pieces(num_rows: int) -> Pieces:
    """Return two pieces for each row, of 400 and 200 tokens of the two shards, and the rows' borders."""
    starts = np.random.default_rng(0).permutation(NUM_TOKENS // 5000)[: 2 * num_rows] * 5000
    shards = np.arange(2 * num_rows) % 2
    return Pieces(np.stack((shards, starts, 400 - 200 * shards), axis=1), np.arange(0, 2 * num_rows + 1, 2))


def naive(shards: list[np.ndarray], pieces: Pieces, length: int, ends: list[int]) -> np.ndarray:
    """Lay slices end to end, one after another."""
    rows = []
    for row, end in enumerate(ends):
        parts = [shards[n][at : at + size] for n, at, size in pieces[0][pieces[1][row] : pieces[1][row + 1]]]
        rows.append(np.concatenate([*parts, np.full(length - sum(map(len, parts)), end)]))
    return np.array(rows, dtype=np.int64).reshape(-1, length)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Shard]]:
    """Two shards of one type, an empty one, then others; several are shorter than a chunk."""
    folder = tmp_path_factory.mktemp("kinds")
    wide = {"dtype": "uint32", "vocabulary": 2**32}
    paths = [
        write_raw(folder / "0.bin", some_tokens(3000, seed=0)),
        write_raw(folder / "1.bin", some_tokens(40, seed=1)),
        write_raw(folder / "2.bin", []),
        write_npy(folder / "3.npy", some_tokens(1500, seed=2, **wide), dtype="uint32"),
        write_llmc(folder / "4.bin", some_tokens(300, seed=4, **wide), dtype="uint32"),
    ]
    opened = [open_shard(path, in_folder=True) for path in paths]
    yield opened
    for shard in opened:
        shard.close()


@settings(max_examples=150, deadline=None)
@given(
    length=st.sampled_from([1, 2, 65, 255, 256, 257, 513, 1200]),
    num_rows=st.integers(0, 9),
    mean=st.sampled_from([1, 20, 256, 900]),
    num_shards=st.sampled_from([1, 2, 3, 5]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_any_rows_equal_a_loop_over_their_pieces(
    kinds: list[Shard], length: int, num_rows: int, mean: int, num_shards: int, seed: int, data: st.DataObject
) -> None:
    """Pieces of all lengths, at the ends of their shards too; ends of rows, and rows of nothing else."""
    draw = np.random.default_rng(seed)
    shards = kinds[:num_shards]
    held = [number for number, shard in enumerate(shards) if shard.num_tokens]
    pieces, borders = [], [0]
    for _ in range(num_rows):
        left = length - int(draw.integers(0, length + 1)) * int(draw.integers(0, 2))
        while left:
            number = int(draw.choice(held))
            size = int(min(left, 1 + draw.geometric(1 / mean), shards[number].num_tokens))
            last = shards[number].num_tokens - size
            pieces.append((number, last if draw.random() < 0.2 else int(draw.integers(0, last + 1)), size))
            left -= size
        borders.append(len(pieces))
    given_pieces = Pieces(np.array(pieces, dtype=np.int64).reshape(-1, 3), np.array(borders))
    ends = draw.integers(0, 60_000, num_rows)
    expected = naive([shard.tokens for shard in shards], given_pieces, length, ends.tolist())
    ended = given_pieces.ended(length, ends)
    dtype = UINT16 if num_shards <= 3 else INT64
    selection = Gatherer(shards).select(ended, dtype)
    for first, stop in ((0, num_rows), sorted(data.draw(st.tuples(*[st.integers(0, num_rows)] * 2)))):
        found = selection.read(slice(first, stop))
        assert (found.dtype, found.flags.c_contiguous) == (dtype, True)
        if num_rows:
            np.testing.assert_array_equal(found, expected[first:stop])


def test_the_end_of_a_row_is_one_piece_of_no_shard() -> None:
    """Rows that are full stay as they are; one id may stand for all rows."""
    pieces = Pieces(np.array([(0, 7, 3), (1, 0, 2), (0, 9, 5)]), np.array([0, 0, 2, 3]))
    found, borders = pieces.ended(5, 50256)
    assert found.tolist() == [[NO_SHARD, 50256, 5], *pieces[0].tolist()]
    assert borders.tolist() == [0, 1, 3, 4]
    found, borders = pieces.ended(6, np.array([1, 2, 3], dtype=np.uint16))
    assert found[borders[1:] - 1].tolist() == [[-1, 1, 6], [-1, 2, 1], [-1, 3, 1]]


@pytest.mark.parametrize("piece", [(0, -1, 5), (0, NUM_TOKENS - 4, 5), (1, 2**62, 5)])
def test_a_piece_outside_its_shard_is_never_read(gatherer: Gatherer, piece: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError, match="lies outside its shard"):
        gatherer.select(Pieces(np.array([(0, 0, 5), piece]), np.arange(3)), UINT16)


def test_once_a_piece_came_from_disk_the_rest_are_asked_for_at_once(
    paths: list[Path], gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        gather, "read_ahead", lambda at, sizes: asked.extend(zip(at.tolist(), sizes.tolist(), strict=True))
    )
    all_pieces, borders = scattered_pieces(60)
    all_pieces[-1, 1] = NUM_TOKENS - 200
    for path in paths:
        drop(path)
    selection = gatherer.select(Pieces(all_pieces, borders), UINT16)
    first = selection.read(slice(0, 20))
    assert gatherer.cold
    assert gatherer.num_faults >= 40  # reading ahead goes on after such a request
    assert asked == []
    rest = [selection.read(slice(20, 40)), selection.read(slice(40, 60))]
    addresses = [shard.address for shard in gatherer.shards]
    assert asked == [
        (addresses[number] + 2 * at, 2 * count) for number, at, count in all_pieces[40:].tolist()
    ]
    tokens = [some_tokens(NUM_TOKENS, seed=number) for number in range(2)]
    expected = naive(tokens, Pieces(all_pieces, borders), 600, [0] * 60)
    np.testing.assert_array_equal(np.concatenate([first, *rest]), expected)


def test_a_change_during_the_copy_is_found_after_it(
    paths: list[Path], gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rows of the changed shard are refused."""
    all_pieces, borders = scattered_pieces(2)
    all_pieces[1:, 0] = 0, 1, 1  # each row lies in one shard
    selection = gatherer.select(Pieces(all_pieces, borders), UINT16)
    selection.check_unchanged(slice(0, 2))
    monkeypatch.setattr(gather, "num_major_faults", lambda: paths[1].write_bytes(bytes(2 * NUM_TOKENS)))
    selection.read(slice(0, 1))
    with pytest.raises(CorpusChanged, match=r"1\.bin: written to since it was opened"):
        selection.read(slice(1, 2))
    with pytest.raises(CorpusChanged, match=r"1\.bin"):
        selection.check_unchanged(slice(0, 2))


FENCED = 9  # pages, of which none may be touched but 1, 2, 4, 5 and 7


@pytest.fixture(scope="module")
def fenced() -> Iterator[Gatherer]:
    """Three shards, each of whole pages, with pages before and behind that end the process if touched."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, FENCED * page)
    tokens = np.frombuffer(memory, np.uint16)
    tokens[:] = some_tokens(len(tokens))
    libc, first = ctypes.CDLL(None, use_errno=True), tokens.ctypes.data
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    fences = [first + number * page for number in (0, 3, 6, 8)]
    assert not any(libc.mprotect(fence, page, 0) for fence in fences)
    file = SimpleNamespace(check_unchanged=lambda: None)
    shards = [
        SimpleNamespace(
            file=file,
            data_offset=0,
            dtype=UINT16,
            num_tokens=pages * page // 2,
            address=first + number * page,
            is_resident=lambda _: True,
        )
        for number, pages in ((1, 2), (4, 2), (7, 1))
    ]
    yield Gatherer(shards)
    assert not any(libc.mprotect(fence, page, mmap.PROT_READ) for fence in fences)


@settings(max_examples=300, deadline=None)
@given(is_cold=st.booleans(), mean=st.sampled_from([1, 20, 128, 400, 1000]), seed=st.integers(0, 2**32))
def test_no_page_is_touched_but_those_of_the_pieces(
    fenced: Gatherer, is_cold: bool, mean: int, seed: int
) -> None:
    """Many pieces begin or end at a page's edge, or a token beside it."""
    draw, page_tokens = np.random.default_rng(seed), mmap.PAGESIZE // 2
    shards = draw.integers(0, 3, 60)
    sizes = np.array([each.num_tokens for each in fenced.shards])[shards]
    counts = np.minimum(draw.geometric(1 / mean, 60), sizes)
    edges = draw.integers(0, 3, 60) * page_tokens + draw.integers(-1, 2, 60)
    starts = np.where(draw.random(60) < 0.5, edges - counts, edges)
    starts = np.clip(np.where(draw.random(60) < 0.3, draw.integers(0, 5000, 60), starts), 0, sizes - counts)
    fenced.cold = is_cold
    rows = Pieces(np.stack((shards, starts, counts), axis=1), np.array([0, 60]))
    its = fenced.select(rows, UINT16).read(slice(0, 1))
    memory = [
        np.frombuffer((ctypes.c_char * (2 * each.num_tokens)).from_address(each.address), np.uint16)
        for each in fenced.shards
    ]
    assert (its == naive(memory, rows, int(counts.sum()), [0])).all()
