"""Which extents rows are read from: those of files, or of the blocks of an order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import pytest

from corpus_server.stores import Blocks, Cache, Extent, Extents, StagedFile
from corpus_server.stores.download import Recorded
from corpus_server.stores.objects import Store, StoreObject

EXTENT_BYTES = 16 * 4096
HEADER = 20


class Shard(NamedTuple):
    file: StagedFile
    num_tokens: int
    data_offset: int = HEADER
    dtype: np.dtype[np.uint16] = np.dtype(np.uint16)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, 1, EXTENT_BYTES)


def shard(cache: Cache, num_tokens: int) -> Shard:
    size = HEADER + 2 * num_tokens
    what = StoreObject(url="s3://b/a", path="a", size_bytes=size, etag=f"{num_tokens}", modified="")
    file = StagedFile(Path("a"), cast("Store", None), what, cache)
    file.data = range(HEADER, size)
    return Shard(file, num_tokens)


def blocks_of(shards: list[Shard], num_windows: int, stride: int, length: int) -> Blocks:
    counts = np.array([max(0, (each.num_tokens - length) // stride + 1) for each in shards])
    return Blocks(num_windows, stride, length, counts.cumsum() - counts, counts)


@pytest.mark.parametrize("stride", [64, 100, 1000])
@pytest.mark.parametrize("block_bytes", [16 << 10, 50_000, 2 * EXTENT_BYTES, 300_000])
def test_an_extent_of_a_block_ends_with_it(cache: Cache, block_bytes: int, stride: int) -> None:
    """Each window lies in extents of its block, which hold two pages more than the block at most."""
    shards = [shard(cache, tokens) for tokens in (500_001, 30, 123_456, 1_000_000)]
    length, num_windows = stride + 1, -(-block_bytes // (2 * stride))
    blocks = blocks_of(shards, num_windows, stride, length)
    extents = Extents(shards).cut(blocks)
    of_block: dict[int, dict[Extent, tuple[int, int]]] = {}
    for number, count in enumerate(blocks.shard_windows.tolist()):
        places = np.stack([np.full(count, number), np.arange(count) * stride, np.full(count, length)], axis=1)
        which, numbers, found = extents.numbered(places)
        of_window: list[list[Extent]] = [[] for _ in range(count)]
        for window, extent in zip(which.tolist(), numbers.tolist(), strict=True):
            of_window[window].append(found[extent])
        for window, its in enumerate(of_window):
            begin = HEADER + 2 * stride * window
            assert its[0].start <= begin
            assert begin + 2 * length <= its[-1].stop
            for each, following in pairwise(its):
                assert each.stop == following.start
            block = of_block.setdefault((int(blocks.first_window[number]) + window) // num_windows, {})
            for each in its:
                low, _ = block.get(each, (begin, 0))
                block[each] = low, begin + 2 * length
        assert of_window[:3] == [extents.of(places[window, None]) for window in range(min(3, count))]
        assert set(extents.of(places)) == {each for *_, each in extents.uses(places)} == set(found)
    listed = extents.of_shards(np.arange(4), np.array([each.num_tokens for each in shards]))
    sizes = [each.size_bytes for found in of_block.values() for each in found]
    assert sorted(listed.num_bytes[listed.shards != 1].tolist()) == sorted(sizes)
    for found in of_block.values():
        for file in {each.file for each in found}:
            spans = {each: span for each, span in found.items() if each.file is file}
            used = max(high for _, high in spans.values()) - min(low for low, _ in spans.values())
            is_last = max(spans, key=lambda each: each.stop).stop == file.data.stop
            assert sum(each.size_bytes for each in spans) <= used + 2 * 4096 + is_last * 2 * stride
            assert all(each.size_bytes <= 1.5 * EXTENT_BYTES for each in spans)
    assert sum(sizes) >= sum(len(each.file.data) for each in shards if each.num_tokens > length)


def test_an_extent_of_a_block_ends_with_what_was_hashed_of_it(cache: Cache) -> None:
    """A block of 64 MiB needs one token more: with it come the 2 MiB that were hashed, not 16 MiB."""
    cache = Cache(cache.folder, 1, 16 << 20)
    its = shard(cache, 2**26)
    its.file.recorded.append(Recorded(HEADER, 2**27, "", 2 << 20))
    extents = Extents([its]).cut(blocks_of([its], 2**14, 2**11, 2**11 + 1))
    found = extents.of(np.array([(0, 0, 10), (0, 2**25 - 1, 2)]))
    assert [(each.start - HEADER, each.stop - HEADER) for each in found] == [
        (0, 16 << 20),
        (48 << 20, 66 << 20),
    ]


@pytest.mark.parametrize("reason", ["hashes", "runs", "small blocks"])
def test_extents_are_those_of_files_where_blocks_cannot_have_their_own(cache: Cache, reason: str) -> None:
    whole = shard(cache, 500_000)
    shards = [whole]
    if reason == "hashes":
        whole.file.recorded.append(Recorded(HEADER, 1_000_000, ""))
    if reason == "runs":
        shards = [Shard(whole.file, 250_000), Shard(whole.file, 250_000, HEADER + 500_000)]
    num_windows = 10 if reason == "small blocks" else 700
    extents = Extents(shards).cut(blocks_of(shards, num_windows, 100, 101))
    places = np.array(
        [(number, start, 101) for number in range(len(shards)) for start in range(0, 249_000, 100)]
    )
    assert set(extents.of(places)) <= set(whole.file.extents)


def test_a_block_of_a_quarter_of_an_extent_is_fetched_as_one(cache: Cache) -> None:
    its = shard(cache, 500_000)
    extents = Extents([its]).cut(blocks_of([its], 100, 100, 101))
    found = extents.of(np.array([(0, start, 101) for start in range(0, 10_000, 100)]))
    assert [(each.start, each.stop) for each in found] == [(HEADER, HEADER + 5 * 4096)]
