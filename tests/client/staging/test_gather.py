"""Gathering equals slicing, whatever the local shards look like."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from corpus_client import errors
from corpus_client.network.control import ShardDescription
from corpus_client.staging.gather import PIECE_BYTES, Gatherer, LocalShard


def shard_of(tokens: np.ndarray, path: Path, offset: int = 0) -> LocalShard:
    path.write_bytes(bytes(offset) + tokens.tobytes())
    described = ShardDescription(
        corpus="c",
        name=path.name,
        num_tokens=len(tokens),
        dtype=tokens.dtype.name,
        data_offset=offset,
        size_bytes=offset + tokens.nbytes,
    )
    return LocalShard(path, described)


SHARDS = {
    "one": [("uint16", 5000, 0)],
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
        numbers = draw.choice(fitting, 3000)
        last = np.array([len(arrays[number]) - window for number in numbers])
        starts = draw.integers(0, last + 1)
        starts[:200] = last[:200]
        dtype = np.result_type(*(array.dtype for array in arrays))
        out = np.zeros((3000, window), dtype)
        gatherer = Gatherer(shards, window)
        assert gatherer.select(np.stack([numbers, starts], axis=1)) == 3000
        for first, stop in ((0, 1000), (1000, 3000)):
            gatherer.gather(first, out[first:stop])
        assert window == 1 or out.nbytes > PIECE_BYTES
        for number, start, row in zip(numbers, starts, out, strict=True):
            assert np.array_equal(row, arrays[number][start : start + window])


@pytest.mark.parametrize("index", [(0, -1), (0, 91), (1, 0), (-1, 0), (0, 2**62)])
def test_an_index_outside_is_refused(tmp_path: Path, index: tuple[int, int]) -> None:
    with (
        closing(shard_of(np.arange(100, dtype="uint16"), tmp_path / "a.bin")) as shard,
        pytest.raises(errors.AnswerCorrupt),
    ):
        Gatherer([shard], 10).select(np.array([(0, 0), index]))


def test_one_thread_copies_and_nobody_else_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's other threads would spin beside the training loop between two gathers."""
    select, threads = torch.index_select, {}

    def noted(*arguments: torch.Tensor | int, out: torch.Tensor) -> torch.Tensor:
        threads["here"] = torch.get_num_threads()
        other = threading.Thread(target=lambda: threads.update(there=torch.get_num_threads()))
        other.start()
        other.join()
        return select(*arguments, out=out)

    monkeypatch.setattr(torch, "index_select", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with closing(shard_of(np.arange(100, dtype="uint16"), tmp_path / "a.bin")) as shard:
            gatherer = Gatherer([shard], 10)
            gatherer.select(np.array([(0, 5)]))
            gatherer.gather(0, np.zeros((1, 10), "uint16"))
        assert threads == {"here": 1, "there": 3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


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
        monkeypatch.setattr(torch, "index_select", Mock(side_effect=AssertionError("it was read")))
        with pytest.raises(errors.LocalCopyMismatch, match=r"a\.bin changed"):
            gatherer.gather(0, np.zeros((1, 10), "uint16"))


def test_a_shard_that_changes_during_the_copy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied of a file that is truncated meanwhile are zeros."""
    with closing(shard_of(np.arange(100, dtype="uint16"), tmp_path / "a.bin")) as shard:
        gatherer = Gatherer([shard], 10)
        gatherer.select(np.array([(0, 0)]))
        select = torch.index_select

        def change_and_select(*arguments: torch.Tensor | int, out: torch.Tensor) -> torch.Tensor:
            (tmp_path / "a.bin").write_bytes(bytes(200))
            return select(*arguments, out=out)

        monkeypatch.setattr(torch, "index_select", change_and_select)
        with pytest.raises(errors.LocalCopyMismatch, match=r"a\.bin changed"):
            gatherer.gather(0, np.zeros((1, 10), "uint16"))
