"""Gathering equals slicing, whatever the local shards look like."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from corpus_client import errors
from corpus_client.network.control import ShardDescription
from corpus_client.staging.gather import NO_SHARD, PIECE_BYTES, Gatherer, LocalShard, PieceGatherer


def shard_of(tokens: np.ndarray, path: Path, offset: int = 0) -> LocalShard:
    path.write_bytes(bytes(offset) + tokens.tobytes())
    described = ShardDescription(
        corpus="c",
        name=path.name,
        file=path.name,
        num_tokens=len(tokens),
        dtype=tokens.dtype.name,
        data_offset=offset,
        size_bytes=offset + tokens.nbytes,
    )
    return LocalShard(path, described)


SHARDS = {
    "one": [("uint16", 5000, 0)],
    "one-window": [("uint16", 101, 0)],
    "several": [("uint16", 5000, 0), ("uint16", 3000, 8), ("uint16", 101, 0)],
    "bytes": [("uint8", 4000, 0), ("uint8", 3000, 3)],
    "four-bytes": [("uint32", 4000, 0), ("uint32", 3000, 4)],
    "signed": [("int32", 4000, 0)],
    "odd-offset": [("uint16", 5000, 0), ("uint16", 3000, 3)],
    "two-types": [("uint16", 5000, 0), ("uint32", 3000, 0)],
    "an-empty-one": [("uint16", 0, 0), ("uint16", 3000, 0)],
}


@pytest.mark.parametrize("window", [1, 101])
@pytest.mark.parametrize("kinds", SHARDS.values(), ids=SHARDS)
def test_equals_slicing(tmp_path: Path, kinds: Sequence[tuple[str, int, int]], window: int) -> None:
    """The last windows of every shard among them, and more than one piece of them."""
    draw = np.random.default_rng(0)
    arrays = [draw.integers(0, np.iinfo(dtype).max, n, dtype, endpoint=True) for dtype, n, _ in kinds]
    with ExitStack() as opened:
        shards = [
            opened.enter_context(closing(shard_of(array, tmp_path / f"{number}.bin", offset)))
            for number, (array, (_, _, offset)) in enumerate(zip(arrays, kinds, strict=True))
        ]
        fitting = [number for number, array in enumerate(arrays) if len(array) >= window]
        numbers = draw.choice(fitting, 6000)
        last = np.array([len(arrays[number]) - window for number in numbers])
        starts = draw.integers(0, last + 1)
        starts[:200] = last[:200]
        dtype = np.result_type(*(array.dtype for array in arrays))
        out = np.zeros((6000, window), dtype)
        gatherer = Gatherer(shards, window)
        assert gatherer.select(np.stack([numbers, starts], axis=1)) == 6000
        for first, stop in ((0, 1000), (1000, 6000)):
            gatherer.gather(first, out[first:stop])
        assert window == 1 or out.nbytes > PIECE_BYTES
        for number, start, row in zip(numbers, starts, out, strict=True):
            assert np.array_equal(row, arrays[number][start : start + window])


def test_tokens_are_widened_where_other_corpora_of_the_plan_need_it(tmp_path: Path) -> None:
    written = np.arange(65_000, 65_100, dtype="uint16")
    with closing(shard_of(written, tmp_path / "a.bin")) as shard:
        gatherer = Gatherer([shard], 10)
        gatherer.select(np.array([(0, 7)]))
        out = np.zeros((1, 10), "uint32")
        gatherer.gather(0, out)
    assert out[0].tolist() == written[7:17].tolist()


@pytest.mark.parametrize("row_tokens", [1, 256, 700])
@pytest.mark.parametrize("mean", [1, 60, 400])
@pytest.mark.parametrize("kinds", SHARDS.values(), ids=SHARDS)
def test_rows_of_pieces_equal_a_loop_over_them(
    tmp_path: Path, kinds: Sequence[tuple[str, int, int]], mean: int, row_tokens: int
) -> None:
    """Pieces of all lengths, at the ends of their shards too; and ends of rows that a token id fills."""
    draw = np.random.default_rng(mean)
    arrays = [draw.integers(0, np.iinfo(dtype).max, n, dtype, endpoint=True) for dtype, n, _ in kinds]
    held = [number for number, array in enumerate(arrays) if len(array)]
    pieces: list[tuple[int, int, int, int]] = []
    dtype = np.result_type(*(array.dtype for array in arrays))
    expected = np.full((40, row_tokens), 7, dtype)
    for row in range(40):
        at, stop = 0, row_tokens if draw.random() < 0.5 else int(draw.integers(0, row_tokens + 1))
        while at < stop:
            number = int(draw.choice(held))
            count = int(min(stop - at, draw.geometric(1 / mean), len(arrays[number])))
            last = len(arrays[number]) - count
            start = last if draw.random() < 0.2 else int(draw.integers(0, last + 1))
            pieces.append((row, number, start, count))
            expected[row, at : at + count] = arrays[number][start : start + count]
            at += count
        if at < row_tokens:
            pieces.append((row, -1, 7, row_tokens - at))
    with ExitStack() as opened:
        shards = [
            opened.enter_context(closing(shard_of(array, tmp_path / f"{number}.bin", offset)))
            for number, (array, (_, _, offset)) in enumerate(zip(arrays, kinds, strict=True))
        ]
        gatherer = PieceGatherer(shards, row_tokens)
        assert gatherer.select(np.array(pieces)) == 40
        out = np.zeros((40, row_tokens), dtype)
        for first, end in ((0, 1), (1, 17), (17, 40)):
            gatherer.gather(first, out[first:end])
        del gatherer
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 0, 0, 5), (1, 0, 0, 10)], "pieces must make rows of 10 tokens"),
        ([(0, 0, 0, 5), (0, 0, 0, 6)], "pieces must make rows of 10 tokens"),
        ([(0, 0, 0, 5), (1, 0, 0, 5)], "pieces must make rows of 10 tokens"),
        ([(0, 0, 0, 10), (1, 0, 0, 5)], "pieces must make rows of 10 tokens"),
        ([(1, 0, 0, 10), (0, 0, 0, 10)], "pieces must make rows of 10 tokens"),
        ([(0, 0, 0, 12), (0, 0, 0, -2)], "pieces must make rows of 10 tokens"),
        ([(0, 0, 0, 2**62)] * 4, "pieces must make rows of 10 tokens"),
        ([(0, 0, 0, 10), (1, 0, 95, 6), (1, 0, 0, 4)], r"a start lies outside .*a\.bin: 95"),
        ([(0, 0, -3, 10)], r"a start lies outside .*a\.bin: -3"),
        ([(0, 1, 0, 10)], r"shard numbers must be in \[0, 1\), got 1"),
        ([(0, -2, 0, 10)], r"shard numbers must be in \[0, 1\), got -2"),
    ],
)
def test_pieces_that_make_no_rows_are_refused(
    tmp_path: Path, pieces: list[tuple[int, int, int, int]], message: str
) -> None:
    with (
        closing(shard_of(np.arange(100, dtype="uint16"), tmp_path / "a.bin")) as shard,
        pytest.raises(errors.ResponseCorrupt, match=message),
    ):
        PieceGatherer([shard], 10).select(np.array(pieces))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, -1), "a start lies outside {folder}/a.bin: -1"),
        ((0, 91), "a start lies outside {folder}/a.bin: 91"),
        ((0, 2**62), f"a start lies outside {{folder}}/a.bin: {2**62}"),
        ((1, 1), "a start lies outside {folder}/b.bin: 1"),
        ((2, 0), "a start lies outside {folder}/c.bin: 0"),
        ((3, 0), "shard numbers must be in [0, 3), got 3"),
        ((-1, 0), "shard numbers must be in [0, 3), got -1"),
    ],
)
def test_an_index_outside_is_refused(tmp_path: Path, index: tuple[int, int], message: str) -> None:
    with ExitStack() as opened:
        shards = [
            opened.enter_context(
                closing(shard_of(np.arange(count, dtype="uint16"), tmp_path / f"{name}.bin"))
            )
            for name, count in (("a", 100), ("b", 10), ("c", 0))
        ]
        gatherer = Gatherer(shards, 10)
        assert gatherer.select(np.array([(0, 90), (1, 0), (0, 0)])) == 3
        with pytest.raises(errors.ResponseCorrupt) as caught:
            gatherer.select(np.array([(0, 0), index, (0, 95)]))
    assert str(caught.value) == message.format(folder=tmp_path)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_shard_holds_its_tokens_until_it_is_closed(tmp_path: Path, count: int) -> None:
    written = np.arange(count, dtype="uint32") + 2**31
    shard = shard_of(written, tmp_path / "a.bin", offset=8)
    assert (shard.tokens.tolist(), shard.tokens.dtype) == (written.tolist(), np.dtype("uint32"))
    assert shard.address == shard.tokens.ctypes.data
    assert not shard.tokens.size or not shard.tokens.flags.writeable
    shard.close()
    assert (shard.tokens.shape, shard.tokens.dtype) == ((0,), np.dtype("uint32"))


@pytest.mark.parametrize(
    ("size", "got"), [(None, "No such file or directory; is local_root right?"), (199, "199"), (201, "201")]
)
def test_a_file_that_is_not_the_shard_is_refused(tmp_path: Path, size: int | None, got: str) -> None:
    path = tmp_path / "a.bin"
    described = ShardDescription(
        corpus="web",
        name="b.bin",
        file="b.bin",
        num_tokens=100,
        dtype="uint16",
        data_offset=0,
        size_bytes=200,
    )
    if size is not None:
        path.write_bytes(bytes(size))
    with pytest.raises(errors.LocalCopyMismatch) as caught:
        LocalShard(path, described)
    assert str(caught.value) == (
        f"corpus 'web': shard b.bin must lie at {path}, got {got}"
        if size is None
        else f"corpus 'web': {path} must have 200 bytes, got {got}; was the copy interrupted?"
    )


def test_a_pipe_in_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.bin")
    described = ShardDescription(
        corpus="web", name="a.bin", file="a.bin", num_tokens=4, dtype="uint8", data_offset=0, size_bytes=4
    )
    with pytest.raises(errors.LocalCopyMismatch, match="must have 4 bytes, got 0"):
        LocalShard(tmp_path / "a.bin", described)


def test_a_window_that_is_longer_than_every_shard_is_nowhere(tmp_path: Path) -> None:
    with closing(shard_of(np.arange(9, dtype="uint16"), tmp_path / "a.bin")) as shard:
        gatherer = Gatherer([shard], 10)
        with pytest.raises(errors.ResponseCorrupt, match=r"a start lies outside .*a\.bin: 0"):
            gatherer.select(np.array([(0, 0)]))


def test_shards_that_lie_too_far_apart_for_one_view_are_copied_one_after_another(tmp_path: Path) -> None:
    """NumPy counts the bytes of an array in 63 bits: 2^46 windows of 2^18 bytes."""
    tokens = np.arange(2**17 + 1, dtype="uint32").astype("uint16")
    with (
        closing(shard_of(tokens, tmp_path / "a.bin")) as near,
        closing(shard_of(tokens[::-1], tmp_path / "b.bin")) as far,
    ):
        far.address = near.address + 2**46
        gatherer = Gatherer([near, far], 2**17)
        gatherer.select(np.array([(1, 1), (0, 1)]))
        out = np.zeros((2, 2**17), "uint16")
        gatherer.gather(0, out)
    assert np.array_equal(out, [tokens[-2::-1], tokens[1:]])


def test_a_cold_window_brings_no_more_than_itself(tmp_path: Path) -> None:
    """The kernel reads nothing ahead (`rr`): megabytes for a window of 2 KiB."""
    with closing(shard_of(np.arange(100, dtype="uint16"), tmp_path / "a.bin")) as shard:
        first = f"{shard.address:x}-"
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        next(line for line in lines if line.startswith(first))
        flags = next(line for line in lines if line.startswith("VmFlags:"))
        assert "rr" in flags.split()


@pytest.mark.parametrize("same", ["size", "time"])
def test_a_shard_that_changed_is_refused_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: str
) -> None:
    """Reading what a file has lost would end the process with SIGBUS."""
    path = tmp_path / "a.bin"
    with closing(shard_of(np.arange(100, dtype="uint16"), path)) as shard:
        gatherer = Gatherer([shard], 10)
        gatherer.select(np.array([(0, 0)]))
        before = path.stat().st_mtime_ns
        path.write_bytes(bytes(200 if same == "size" else 20))
        os.utime(path, ns=(before, before if same == "time" else before + 1))
        monkeypatch.setattr(gatherer, "_copy", Mock(side_effect=AssertionError("it was read")))
        with pytest.raises(errors.LocalCopyMismatch) as caught:
            gatherer.gather(0, np.zeros((1, 10), "uint16"))
    assert str(caught.value) == f"{path} changed while it was in use; copy it again"


def test_a_shard_that_changes_during_the_copy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied of a file that is truncated meanwhile are zeros."""
    with closing(shard_of(np.arange(100, dtype="uint16"), tmp_path / "a.bin")) as shard:
        gatherer = Gatherer([shard], 10)
        gatherer.select(np.array([(0, 0)]))
        copy = gatherer._copy

        def change_and_copy(*arguments: Any) -> None:
            (tmp_path / "a.bin").write_bytes(bytes(200))
            copy(*arguments)

        monkeypatch.setattr(gatherer, "_copy", change_and_copy)
        with pytest.raises(errors.LocalCopyMismatch, match=r"a\.bin changed"):
            gatherer.gather(0, np.zeros((1, 10), "uint16"))


def test_a_row_whose_documents_are_all_excluded_has_a_piece_without_tokens(tmp_path: Path) -> None:
    with closing(shard_of(np.arange(100, dtype="uint16"), tmp_path / "a.bin")) as shard:
        gatherer = PieceGatherer([shard], 9)
        pieces = [(0, 0, 10, 9), (1, 0, 40, 0), (1, NO_SHARD, 7, 9), (2, 0, 20, 4), (2, 0, 50, 5)]
        assert gatherer.select(np.array(pieces)) == 3
        out = np.empty((3, 9), np.uint16)
        gatherer.gather(0, out)
    assert out.tolist() == [[*range(10, 19)], [7] * 9, [*range(20, 24), *range(50, 55)]]
