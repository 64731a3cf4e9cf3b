"""Which extents of files in object stores hold pieces of shards: arithmetic on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Int64Array, expanded
from corpus_server.stores.attached import MappedSpans
from corpus_server.stores.cuts import PAGE_BYTES, Cuts, grain_bytes
from corpus_server.stores.staged import Extent, StagedFile, is_staged

_CLOSE: Final = 8  # codes for each one that is there: more are sorted
_BLOCK_SHARE: Final = 4  # blocks of less than this part of an extent share extents: each would be a request


class _Shard(Protocol):
    """A `Shard`, or what stands beside one."""

    @property
    def file(self) -> object:
        """The file that holds it."""

    @property
    def data_offset(self) -> int:
        """The byte at which it begins there."""

    @property
    def num_tokens(self) -> int:
        """How many it holds."""

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """The type of its tokens."""


class Blocks(NamedTuple):
    """Consecutive windows of a source that an order reads together.

    Attributes:
        num_windows: of a block.
        stride, length: tokens from a window to the next one, and of a window.
        first_window: `(shards,)`, the number in its source of each shard's first window.
        shard_windows: `(shards,)`, windows of each shard.
    """

    num_windows: int
    stride: int
    length: int
    first_window: Int64Array
    shard_windows: Int64Array

    def of(self, numbers: Int64Array, starts: Int64Array) -> Int64Array:
        """Return the numbers of the blocks that hold tokens, `(k,)`; see `windows`."""
        within = np.minimum(starts // self.stride, self.shard_windows[numbers] - 1)
        return (self.first_window[numbers] + within) // self.num_windows

    def windows(self, numbers: Int64Array, starts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the windows [low, high) of their shard that lie in one block with a token, `(k,)` each.

        Args:
            numbers: of shards, which have windows.
            starts: tokens of theirs; one beyond the last window counts as in it.
        """
        first, count = self.first_window[numbers], self.shard_windows[numbers]
        before = self.of(numbers, starts) * self.num_windows
        return np.maximum(before - first, 0), np.minimum(before + self.num_windows - first, count)


class ShardExtents(NamedTuple):
    """The extents that hold some shards, one at least of each: `(m,)` each, ascending.

    Attributes:
        shards: which of the shards.
        starts: the byte of its tokens at which the extent begins, negative if it begins before.
        num_bytes: of the extent, 0 for a shard on this machine.
        itemsizes: bytes of a token.
        windows: [low, high) of the shard, outside of which none reads the extent; None: any may.
    """

    shards: NDArray[np.intp]
    starts: Int64Array
    num_bytes: Int64Array
    itemsizes: Int64Array
    windows: tuple[Int64Array, Int64Array] | None


class Extents:
    """The extents of a list of shards; of those that lie on this machine there are none.

    Without blocks they are those of the files. Where there are blocks, an extent ends with its block, so that
    none is fetched for a few bytes of a neighbour: windows of two blocks share a token. With recorded hashes
    it ends with the bytes of a hash; those of 16 MiB are as large as an extent, so such a file is not cut,
    nor is one of several shards.

    Args:
        shards: numbered as in pieces; None: there is nothing to read.
        blocks: of an order.

    Attributes:
        is_cut: `(shards,)`, of which each extent belongs to one block.
    """

    def __init__(self, shards: Sequence[_Shard | None], blocks: Blocks | None = None) -> None:
        self._shards = shards
        self._files: dict[int, StagedFile] = {}
        staged: list[tuple[int, int, int, int, int]] = []
        # All of a process lie in one cache.
        caches = (shard.file.cache for shard in shards if shard is not None and is_staged(shard.file))
        self._extent_bytes = next((each.extent_bytes for each in caches), PAGE_BYTES)
        self._grain = grain_bytes(self._extent_bytes)
        for number, shard in enumerate(shards):
            if shard is not None and is_staged(shard.file):
                self._files[number] = shard.file
                data, offset = shard.file.data, shard.data_offset - shard.file.data.start
                itemsize, num_bytes = shard.dtype.itemsize, len(data)
                is_alone = shard.num_tokens * itemsize == num_bytes
                staged.append((1, offset, itemsize, num_bytes, is_alone * self._end_bytes(shard.file)))
            else:
                staged.append((0, 0, 0, 0, 0))
        # Whether it is, where it begins in its file's extents, bytes of a token, bytes of all those extents,
        # and at which multiple those of blocks end, 0: they may not.
        columns = np.array(staged, np.int64).reshape(-1, 5).T.copy()
        self._staged, self._offsets, self._itemsizes, self._lengths, self._end_multiples = columns
        self._is_staged = np.array([*(self._staged > 0), False])  # the last one stands for `NO_SHARD`, -1
        self._blocks = blocks
        self.is_cut: NDArray[np.bool_] = np.zeros(len(shards), np.bool_)
        if blocks is not None and self._grain:
            least = -(-self._extent_bytes // (_BLOCK_SHARE * blocks.stride))
            is_large = blocks.num_windows * self._itemsizes >= least
            self.is_cut = (self._end_multiples > 0) & is_large & (blocks.shard_windows > 0)
        self._has_cut = bool(self.is_cut.any())
        if blocks is not None and self._has_cut:
            # Those of all shards are numbered; one without blocks counts as one.
            self._first_block = blocks.first_window // blocks.num_windows
            lasts = (blocks.first_window + np.maximum(blocks.shard_windows, 1) - 1) // blocks.num_windows
            num_blocks = np.where(self.is_cut, lasts - self._first_block + 1, 1)
            self._blocks_before = num_blocks.cumsum() - num_blocks

    def __bool__(self) -> bool:
        return bool(self._files)

    def _end_bytes(self, file: StagedFile) -> int:
        """Return the multiple of bytes at which extents of blocks end in a file, 0 if none may."""
        if not file.recorded:
            return PAGE_BYTES
        (its, *_) = file.recorded
        return its.block_bytes if self._grain and self._grain % its.block_bytes == 0 else 0

    def cut(self, blocks: Blocks) -> Extents:
        """Return the extents of an order of these blocks."""
        return Extents(self._shards, blocks)

    @cached_property
    def num_extents(self) -> int:
        """How many there are, those of each shard counted."""
        num_tokens = [0 if shard is None else shard.num_tokens for shard in self._shards]
        listed = self.of_shards(np.arange(len(num_tokens)), np.array(num_tokens, dtype=np.int64))
        return int(np.count_nonzero(listed.num_bytes))

    @cached_property
    def whole(self) -> MappedSpans | None:
        """All extents of the files, for rows so many that they read most of them; None if blocks are cut."""
        if self._has_cut:
            return None
        return MappedSpans([each for file in dict.fromkeys(self._files.values()) for each in file.extents])

    def _find(self, places: Int64Array) -> _Found:
        """Return which extents hold pieces.

        Args:
            places: `(k, 3)`: shard number, `NO_SHARD` or not, start token, tokens.
        """
        numbers, starts, counts = places.T
        which: NDArray[np.intp] | None = None
        is_staged = (counts > 0) & self._is_staged[numbers]
        if not is_staged.all():
            which = np.flatnonzero(is_staged)
            numbers, starts, counts = numbers[which], starts[which], counts[which]
        itemsizes = self._itemsizes[numbers]
        begins = self._offsets[numbers] + starts * itemsizes
        cuts, of_cut = self._cuts_of(numbers, starts)
        first, last = begins // self._extent_bytes, (begins + counts * itemsizes - 1) // self._extent_bytes
        if self._has_cut:
            first, last = cuts.within(first, of_cut), cuts.within(last, of_cut)
        if (first == last).all():  # most often: each then has one extent
            pieces, extents = np.arange(len(first)), first
        else:
            pieces, extents = expanded(first, last - first + 1)
            of_cut = of_cut[pieces]
        num_extents = cuts.lasts - cuts.firsts + 1
        one_of, own = distinct((num_extents.cumsum() - num_extents - cuts.firsts)[of_cut] + extents)
        bounds = cuts.bounds(of_cut[one_of], extents[one_of])
        found = []
        for number, start, stop in zip(
            numbers[pieces[one_of]].tolist(), *(each.tolist() for each in bounds), strict=True
        ):
            file = self._files[number]
            found.append(Extent(file, file.data.start + start, file.data.start + stop))
        return _Found(pieces if which is None else which[pieces], own, found)

    def _cuts_of(self, numbers: Int64Array, starts: Int64Array) -> tuple[Cuts, NDArray[np.integer]]:
        """Return how files of shards and blocks are cut that hold tokens; and which of those each token's is.

        Each once: to compute where a block is cut takes ten times as long as to find out which one it is.
        """
        blocks = self._blocks
        if blocks is None or not self._has_cut:
            return self._shard_cuts, numbers
        within = (blocks.of(numbers, starts) - self._first_block[numbers]) * self.is_cut[numbers]
        one_of, own = distinct(self._blocks_before[numbers] + within)
        return self._cuts(numbers[one_of], starts[one_of]), own

    @cached_property
    def _shard_cuts(self) -> Cuts:
        """How the files of all shards are cut that have no blocks."""
        return Cuts.of(np.zeros_like(self._lengths), self._lengths, self._extent_bytes)

    def _cuts(self, numbers: Int64Array, starts: Int64Array) -> Cuts:
        """Return how the files of shards are cut, or the blocks that hold tokens of theirs."""
        lows, highs = np.zeros_like(numbers), self._lengths[numbers]
        is_cut = self.is_cut[numbers]
        if self._blocks is not None and is_cut.any():
            begins, ends = self._bytes(
                numbers[is_cut], *self._blocks.windows(numbers[is_cut], starts[is_cut])
            )
            lows[is_cut], highs[is_cut] = begins, ends
        return Cuts.of(lows, highs, self._extent_bytes, is_cut)

    def _bytes(self, numbers: Int64Array, low: Int64Array, high: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return which bytes are fetched for windows [low, high) of shards, with the last all behind it."""
        assert self._blocks is not None
        _, stride, length, _, count = self._blocks
        itemsizes, of_file = self._itemsizes[numbers], self._lengths[numbers]
        begins, ends = low * stride * itemsizes, ((high - 1) * stride + length) * itemsizes
        multiples = self._end_multiples[numbers]
        ends = np.where(high == count[numbers], of_file, -(-ends // multiples) * multiples)
        return begins // self._grain * self._grain, np.minimum(ends, of_file)

    def of_shards(self, numbers: NDArray[np.intp], num_tokens: Int64Array) -> ShardExtents:
        """Return the extents that hold shards of so many tokens."""
        blocks = self._blocks
        if blocks is None or not self.is_cut[numbers].any():
            found = np.arange(len(numbers))
            starts, stops, windows = np.zeros_like(num_tokens), num_tokens, None
        else:
            first = blocks.first_window[numbers]
            lasts = first + np.maximum(blocks.shard_windows[numbers], 1) - 1
            count = lasts // blocks.num_windows - first // blocks.num_windows + 1
            found, number = expanded(first // blocks.num_windows, np.where(self.is_cut[numbers], count, 1))
            is_cut, shard_windows = self.is_cut[numbers[found]], blocks.shard_windows[numbers[found]]
            low = np.where(is_cut, np.maximum(number * blocks.num_windows - first[found], 0), 0)
            high = np.where(is_cut, (number + 1) * blocks.num_windows - first[found], shard_windows)
            windows = low, np.minimum(high, shard_windows)
            starts = low * blocks.stride
            is_inner, inner = high < shard_windows, (high - 1) * blocks.stride + blocks.length
            stops = np.where(is_inner, inner, num_tokens[found])
        of = numbers[found]
        staged, offsets, itemsizes = self._staged[of], self._offsets[of], self._itemsizes[of]
        cuts = self._cuts(of, starts)
        each = np.arange(len(of))
        first = cuts.at(offsets + starts * itemsizes, each)
        last = cuts.at(np.maximum(offsets + stops * itemsizes - 1, offsets + starts * itemsizes), each)
        which, extents = expanded(first, last - first + 1)
        begins, ends = cuts.bounds(which, extents)
        return ShardExtents(
            found[which],
            begins - offsets[which],
            (ends - begins) * staged[which],
            np.maximum(itemsizes, 1)[which],
            None if windows is None else (windows[0][which], windows[1][which]),
        )

    def uses(self, places: Int64Array) -> list[tuple[int, int, Extent]]:
        """Return the first and the last piece that lies in each extent, and the extent; first used first."""
        pieces, numbers, extents = self._find(places)
        first, last = np.empty((2, len(extents)), np.int64)
        first[numbers[::-1]], last[numbers] = pieces[::-1], pieces  # of several, NumPy keeps what comes last
        order = np.argsort(first, kind="stable")
        found = (extents[number] for number in order.tolist())
        return list(zip(first[order].tolist(), last[order].tolist(), found, strict=True))

    def of(self, places: Int64Array) -> list[Extent]:
        """Return the extents that hold pieces, each once."""
        return list(dict.fromkeys(self._find(places).extents)) if self._files else []

    def numbered(self, places: Int64Array) -> tuple[NDArray[np.intp], NDArray[np.intp], list[Extent]]:
        """Return which extents hold pieces: `(m,)` each, a piece, ascending, and the number of an extent.

        That is one of the extents, which are returned, too; each is there once for each shard.
        """
        return self._find(places)


class _Found(NamedTuple):
    """See `Extents.numbered`."""

    pieces: NDArray[np.intp]
    numbers: NDArray[np.intp]
    extents: list[Extent]


def distinct(codes: Int64Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return a place of each code that is there, and for each place the number of its code among those.

    In the order of the codes. Where they lie close together, in a fifth of the time that sorting takes.
    """
    if not codes.size:
        return np.empty(0, np.intp), np.empty(0, np.intp)
    low = int(codes.min())
    num_codes = int(codes.max()) - low + 1
    if num_codes > _CLOSE * codes.size:
        _, places, numbers = np.unique(codes, return_index=True, return_inverse=True)
        return places, numbers
    at = codes - low
    place_of = np.full(num_codes, -1, np.intp)
    place_of[at] = np.arange(codes.size)
    found = np.flatnonzero(place_of >= 0)
    number_of = np.empty(num_codes, np.intp)
    number_of[found] = np.arange(found.size)
    return place_of[found], number_of[at]
