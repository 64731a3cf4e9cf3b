"""The second implementation of versions 1 and 2, written from docs/arithmetic.md alone, not from the code.

It proves that the page is complete: `tests/server/plan/test_arithmetic_page.py` compares it with the page's
vectors, with the golden rows and, over random plans, with the server. Its sections are those of the page, and
so are its names. Each row is computed by itself, in Python's integers. Caches hold what rows share.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Final

import xxhash

GOLDEN: Final = 0x9E3779B97F4A7C15
M1: Final = 0xBF58476D1CE4E5B9
M2: Final = 0x94D049BB133111EB
U64: Final = 2**64 - 1
BLOCK_ROWS: Final = 65536
"""Rows in a block of a mixture of version 1, and units in a stage's weights."""
CIRCLE_PLACES: Final = 32
"""How many places of a group's circle are looked at for a substitute."""

BLOCK_DOCUMENTS: Final = 262_144
CLASS_PIECES: Final = 128
"""A class with so many pieces takes no further length."""

Range = tuple[int, int]
"""A half-open range, as (start, stop)."""
Document = tuple[int, int]
"""A document, as (first token, tokens); tokens are counted through the source's shards."""
Pattern = tuple[tuple[int, ...], int]
"""Rows that hold pieces of the same classes, as (list of classes, height)."""


# Notation and keys


def mix(x: int) -> int:
    """Return the output function of splitmix64 of `x`."""
    x = ((x ^ (x >> 30)) * M1) & U64
    x = ((x ^ (x >> 27)) * M2) & U64
    return x ^ (x >> 31)


@cache
def key(purpose: str, seed: int, name: str) -> int:
    """Return the key of a series of decisions."""
    text = f"corpus-server/1/{purpose}/{seed}/{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@lru_cache(maxsize=4096)
def round_keys(key: int, epoch: int) -> tuple[int, ...]:
    """Return the eight round keys of a key in an epoch."""
    state = mix((key + (epoch + 1) * GOLDEN) & U64)
    return tuple(mix((state + (r + 1) * GOLDEN) & U64) for r in range(8))


# The permutation


def hashed(x: int, k: int) -> int:
    """Return the hash of a coordinate under a round key."""
    v = x ^ k
    v = ((v ^ (v >> 30)) * M1) & U64
    v = ((v ^ (v >> 27)) * M2) & U64
    return v >> 8


def grid(n: int) -> tuple[int, int]:
    """Return height and width of the smallest grid for `n` cells."""
    height = math.isqrt(n - 1) + 1
    return height, -(-n // height)


def permute(position: int, n: int, key: int, epoch: int) -> int:
    """Return where `position` of [0, n) goes."""
    height, width = grid(n)
    keys = round_keys(key, epoch)
    cell = position
    while True:
        row, column = divmod(cell, width)
        for r in (0, 2, 4, 6):
            row = (row + hashed(column, keys[r])) % height
            column = (column + hashed(row, keys[r + 1])) % width
        cell = row * width + column
        if cell < n:
            return cell


def invert(value: int, n: int, key: int, epoch: int) -> int:
    """Return the position that `permute` takes to `value`."""
    height, width = grid(n)
    keys = round_keys(key, epoch)
    cell = value
    while True:
        row, column = divmod(cell, width)
        for r in (6, 4, 2, 0):
            column = (column - hashed(row, keys[r + 1])) % width
            row = (row - hashed(column, keys[r])) % height
        cell = row * width + column
        if cell < n:
            return cell


# Draws


def draw(counter: int, bound: int, key: int) -> int:
    """Return the number in [0, bound) that belongs to `counter`."""
    state = mix((key + (counter + 1) * GOLDEN) & U64)
    attempt = 1
    while True:
        value = mix((state + attempt * GOLDEN) & U64)
        if value < 2**64 - 2**64 % bound:
            return value % bound
        attempt += 1


# Windows


class Windows:
    """The windows of a source: those of its shards, one shard after the other."""

    def __init__(self, shard_tokens: Sequence[int], seq_len: int, stride: int) -> None:
        self.seq_len, self.stride = seq_len, stride
        self.counts = [max(0, (tokens - seq_len - 1) // stride + 1) for tokens in shard_tokens]
        self.first_windows = [0, *accumulate(self.counts)]
        self.first_tokens = [0, *accumulate(shard_tokens)]
        self.n = sum(self.counts)
        if self.n == 0:
            raise ValueError("a source needs at least one window")

    def place(self, window: int) -> tuple[int, int]:
        """Return the shard of a window and the window's first token in it."""
        shard = bisect_right(self.first_windows, window) - 1  # the last, and so never a shard without windows
        return shard, (window - self.first_windows[shard]) * self.stride

    def touched(self, tokens: Range) -> Iterable[Range]:
        """Yield, shard by shard, the windows that hold a token of a range of the source's tokens."""
        for shard, count in enumerate(self.counts):
            start = max(tokens[0], self.first_tokens[shard]) - self.first_tokens[shard]
            stop = min(tokens[1], self.first_tokens[shard + 1]) - self.first_tokens[shard]
            if start >= stop:
                continue
            # Window k holds the tokens [k * stride, k * stride + seq_len], both included.
            first = max(0, -((self.seq_len - start) // self.stride))
            last = min(count - 1, (stop - 1) // self.stride)
            if first <= last:
                yield self.first_windows[shard] + first, self.first_windows[shard] + last + 1


def merged(ranges: Iterable[Sequence[int]]) -> list[Range]:
    """Return ranges sorted, and merged where they touch or overlap."""
    found: list[Range] = []
    for start, stop in sorted((start, stop) for start, stop in ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


# Mixtures


def units(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the units of each source, sorted by name; a plan refuses 0."""
    total = sum(Fraction(weight) for weight in weights.values())
    shares = {name: BLOCK_ROWS * Fraction(weights[name]) / total for name in sorted(weights)}
    whole = {name: math.floor(share) for name, share in shares.items()}
    remaining = BLOCK_ROWS - sum(whole.values())
    by_fraction = sorted(shares, key=lambda name: (whole[name] - shares[name], name))
    for name in by_fraction[:remaining]:
        whole[name] += 1
    return whole


# Mixtures of version 1


def slot(offset: int, block: int, seed: int, stage: int) -> int:
    """Return the slot of a row of a stage that lies in `block` at `offset`."""
    return permute(offset, BLOCK_ROWS, key("mixture", seed, str(stage)), block)


@lru_cache(maxsize=256)
def slots(block: int, seed: int, stage: int) -> Sequence[int]:
    """Return `slot` of every offset of a block.

    It is `permute` with n = 65,536, for all positions side by side. The grid has 256 rows and 256 columns. So
    a round adds one of 256 hashes, and no pass is repeated.
    """
    keys = round_keys(key("mixture", seed, str(stage)), block)
    added = [[hashed(x, k) % 256 for x in range(256)] for k in keys]
    rows = [offset // 256 for offset in range(BLOCK_ROWS)]
    columns = [offset % 256 for offset in range(BLOCK_ROWS)]
    for r in (0, 2, 4, 6):
        add = added[r]
        rows = [(row + add[column]) % 256 for row, column in zip(rows, columns, strict=True)]
        add = added[r + 1]
        columns = [(column + add[row]) % 256 for row, column in zip(rows, columns, strict=True)]
    return [row * 256 + column for row, column in zip(rows, columns, strict=True)]


@lru_cache(maxsize=64)
def block_rows(block: int, seed: int, stage: int, shares: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return for each offset of a block which source has it, and how many smaller offsets that source has.

    `shares` are the units of the stage's sources; the sources are numbered in this order.
    """
    owner = [source for source, share in enumerate(shares) for _ in range(share)]
    sources = [owner[slot] for slot in slots(block, seed, stage)]
    given = [0] * len(shares)
    earlier = []
    for source in sources:
        earlier.append(given[source])
        given[source] += 1
    return sources, earlier


# Joins: mixtures of version 2


@dataclass(frozen=True)
class Join:
    """A join of two members; members 0 to k - 1 are the k sources, member k + j is join j."""

    small: int
    large: int
    n: int  # units of the join
    a: int  # units of its small member
    key: int

    def small_row(self, m: int) -> int:
        """Return which row of the join is the small member's row `m`."""
        lap, i = divmod(m, self.a)
        start = -(-i * self.n // self.a)  # of stratum i, in rows of the lap
        w = -(-(i + 1) * self.n // self.a) - start
        return lap * self.n + start + (((mix((self.key + (m + 1) * GOLDEN) & U64) >> 32) * w) >> 32)

    def small_rows(self, x: int) -> int:
        """Return how many of the join's first `x` rows the small member gets."""
        lap, offset = divmod(x, self.n)
        m = lap * self.a + offset * self.a // self.n  # the stratum of row x; earlier strata have a row each
        return m + (self.small_row(m) < x)


@lru_cache(maxsize=256)
def joins(shares: tuple[int, ...], seed: int, stage: int) -> tuple[Join, ...]:
    """Return the joins of a stage; `shares` are the units of its sources, sorted by name."""
    units_of = list(shares)  # of each member
    stage_key = key("mixture", seed, str(stage))
    unjoined = list(range(len(shares)))
    found: list[Join] = []
    while len(unjoined) > 1:
        small, large = sorted(unjoined, key=lambda member: (units_of[member], member))[:2]
        join_key = mix((stage_key + (len(found) + 1) * GOLDEN) & U64)
        n, a = units_of[small] + units_of[large], units_of[small]
        found.append(Join(small, large, n, a, join_key))
        unjoined = [member for member in unjoined if member not in (small, large)]
        unjoined.append(len(units_of))
        units_of.append(n)
    return tuple(found)


def joined(row: int, units: Mapping[str, int], seed: int, stage: int) -> tuple[str, int]:
    """Return the source of a row of a stage, and the row's rank among those of the source."""
    names = sorted(units)
    found = joins(tuple(units[name] for name in names), seed, stage)
    member = len(names) + len(found) - 1  # the last join, or the only source
    while member >= len(names):
        join = found[member - len(names)]
        smaller = join.small_rows(row)
        if join.small_row(smaller) == row:
            member, row = join.small, smaller
        else:
            member, row = join.large, row - smaller
    return names[member], row


def joined_rows(rows: int, units: Mapping[str, int], seed: int, stage: int) -> dict[str, int]:
    """Return how many of a stage's first `rows` rows belong to each source, from the last join down."""
    names = sorted(units)
    found = joins(tuple(units[name] for name in names), seed, stage)
    rows_of = [rows] * (len(names) + len(found))  # of each member; the last one has all rows
    for j in reversed(range(len(found))):
        join, of_join = found[j], rows_of[len(names) + j]
        rows_of[join.small] = join.small_rows(of_join)
        rows_of[join.large] = of_join - rows_of[join.small]
    return dict(zip(names, rows_of, strict=False))


# Steps, stages and positions


@dataclass
class Stage:
    """A stage, and what holds at its start."""

    version: int
    number: int
    seed: int
    from_step: int
    global_batch_size: int
    seq_len: int
    parts: int  # rows that read one window
    units: dict[str, int]
    exclude: dict[str, list[Range]]  # of this stage alone
    positions: dict[str, int]  # of all sources, at the stage's start
    excluded: dict[str, list[Range]]  # windows or pieces, by the ranges of this and all earlier stages

    def source_and_rank(self, row: int) -> tuple[str, int]:
        """Return the source of a row of the stage, and the row's rank among those of the source."""
        if self.version == 2:
            return joined(row, self.units, self.seed, self.number)
        names = list(self.units)
        if len(names) == 1:
            return names[0], row
        block, offset = divmod(row, BLOCK_ROWS)
        sources, earlier = block_rows(block, self.seed, self.number, tuple(self.units.values()))
        name = names[sources[offset]]
        return name, block * self.units[name] + earlier[offset]

    def rows_of(self, name: str, rows: int) -> int:
        """Return how many of the stage's first `rows` rows belong to a source of its mixture."""
        if self.version == 2:
            return joined_rows(rows, self.units, self.seed, self.number)[name]
        block, offset = divmod(rows, BLOCK_ROWS)
        if len(self.units) == 1 or not offset:
            return block * self.units[name] + offset
        sources, _ = block_rows(block, self.seed, self.number, tuple(self.units.values()))
        return block * self.units[name] + sources[:offset].count(list(self.units).index(name))


# Bounded shuffle


class Groups:
    """The groups of a source under a bounded shuffle, in one epoch.

    No group is laid end to end in memory. All blocks but the source's last have `block_windows` windows, so
    each place of that list is computed.
    """

    def __init__(self, n: int, order: Mapping[str, int], seed: int, name: str, epoch: int) -> None:
        block_windows, group_blocks = order["block_windows"], order["group_blocks"]
        self.block_windows, self.group_blocks, self.epoch = block_windows, group_blocks, epoch
        self.blocks = -(-n // block_windows)
        self.groups = -(-self.blocks // group_blocks)
        self.blocks_key, self.windows_key, self.circle_key = (
            key(purpose, seed, name) for purpose in ("blocks", "windows", "circle")
        )
        self.lacking = self.blocks * block_windows - n  # windows that the last block is short of
        self.short_place = invert(self.blocks - 1, self.blocks, self.blocks_key, epoch)

    def block_start(self, place: int) -> int:
        """Return how many windows the blocks at smaller places have."""
        return place * self.block_windows - (self.lacking if place > self.short_place else 0)

    def start(self, group: int) -> int:
        """Return the first offset of the epoch that belongs to a group."""
        return self.block_start(min(group * self.group_blocks, self.blocks))

    def group_at(self, offset: int) -> int:
        """Return the group that an offset of the epoch belongs to."""
        group = offset // (self.group_blocks * self.block_windows)  # or the next one, as one block is short
        return group if offset < self.start(group + 1) else group + 1

    def size(self, group: int) -> int:
        """Return how many windows a group has."""
        return self.start(group + 1) - self.start(group)

    def laid(self, group: int, index: int) -> int:
        """Return the window at `index` of the group laid end to end."""
        offset = self.start(group) + index
        place = offset // self.block_windows  # or the next one, as above
        place = place if offset < self.block_start(place + 1) else place + 1
        block = permute(place, self.blocks, self.blocks_key, self.epoch)
        return block * self.block_windows + offset - self.block_start(place)

    def index_of(self, window: int) -> tuple[int, int]:
        """Return the group of a window and its index in the group laid end to end."""
        block, within = divmod(window, self.block_windows)
        place = invert(block, self.blocks, self.blocks_key, self.epoch)
        group = place // self.group_blocks
        return group, self.block_start(place) + within - self.start(group)

    def window(self, offset: int) -> int:
        """Return the window at an offset of the epoch."""
        group = self.group_at(offset)
        index, size, epoch = offset - self.start(group), self.size(group), self.epoch * self.groups + group
        return self.laid(group, permute(index, size, self.windows_key, epoch))

    def following(self, window: int) -> Iterable[int]:
        """Yield the windows after `window` on its group's circle that are looked at for a substitute."""
        group, index = self.index_of(window)
        size, epoch = self.size(group), self.epoch * self.groups + group
        place = invert(index, size, self.circle_key, epoch)
        for distance in range(1, CIRCLE_PLACES + 1):
            yield self.laid(group, permute((place + distance) % size, size, self.circle_key, epoch))


# Exclusions


def holds(ranges: Sequence[Range], window: int) -> bool:
    """Return whether a window lies in one of sorted ranges of windows."""
    return any(start <= window < stop for start, stop in ranges)


def substitute(window: int, n: int, excluded: Sequence[Range], exclude_key: int, epoch: int) -> int:
    """Return the substitute of an excluded window by the rule without groups."""
    left = n - sum(stop - start for start, stop in excluded)
    rank = sum(min(stop, window) - start for start, stop in excluded if start < window)
    lap, place = divmod(rank, left)
    chosen = permute(place, left, exclude_key, (epoch + lap * GOLDEN) & U64)
    for start, stop in excluded:  # `chosen` counts the windows left; add the excluded ones before it
        if start > chosen:
            break
        chosen += stop - start
    return chosen


# Rows of documents


@dataclass(frozen=True)
class Piece:
    """Tokens of a document that stay together."""

    document: int
    start: int  # counted through the source's shards
    tokens: int


def cuts(number: int, document: Document, seq_len: int) -> list[Piece]:
    """Return the pieces of document `number` of a source."""
    start, length = document
    count = -(-(length - 1) // seq_len) if length else 0
    stops = [min((k + 1) * seq_len, length - 1) + 1 for k in range(count)]
    return [Piece(number, start + k * seq_len, stop - k * seq_len) for k, stop in enumerate(stops)]


def rooms(tails: Mapping[int, int]) -> dict[int, int]:
    """Return for each length of a block's tails the room of its class; `tails` counts them by length."""
    found: dict[int, int] = {}
    room = size = 0
    for length in sorted(tails, reverse=True):
        if not found or size >= CLASS_PIECES or (room - length) * 512 > room:
            room, size = length, 0
        size += tails[length]
        found[length] = room
    return found


def spread(classes: Sequence[tuple[int, int]], row_tokens: int) -> list[Pattern]:
    """Return the patterns of a block's tails, sorted; `classes` are (room, size) in order of room."""
    by_space: dict[int, deque[tuple[int, ...]]] = defaultdict(deque)  # lists; longest at this space first
    by_space[row_tokens].extend([()] * -(-sum(room * size for room, size in classes) // row_tokens))
    for number, (room, size) in reversed(list(enumerate(classes))):
        for waiting in range(size, 0, -1):
            spaces = [space for space, rows in by_space.items() if rows and space >= room]
            if not spaces:
                by_space[row_tokens].extend([()] * -(-waiting // (row_tokens // room)))
                spaces = [row_tokens]
            space = max(spaces) if max(spaces) >= 2 * room else min(spaces)
            by_space[space - room].append((*by_space[space].popleft(), number))
    return sorted(Counter(row for rows in by_space.values() for row in rows).items())


def dealt(costs: Sequence[int], world_size: int) -> list[list[int]]:
    """Return the rows of each rank, of a step whose rows have these costs."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    sums = [0] * world_size
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        open_ranks = [rank for rank in range(world_size) if len(ranks[rank]) < len(costs) // world_size]
        rank = min(open_ranks, key=lambda rank: (sums[rank], rank))
        ranks[rank].append(row)
        sums[rank] += costs[row]
    return [sorted(rows) for rows in ranks]


class DocumentRows:
    """The rows of a source whose documents are packed, with `Windows`' methods.

    Where a plan over windows has a window, this has a row; where that excludes windows, this excludes pieces.
    """

    def __init__(
        self,
        shard_tokens: Sequence[int],
        documents: Sequence[Document],
        seq_len: int,
        block_documents: int,
        key: int,
    ) -> None:
        self.key = key
        self.pieces: list[Piece] = []
        self.first: list[int] = []  # of each class: its first piece and first slot
        self.size: list[int] = []
        self.slots: list[list[int]] = []  # of each row, in descending order
        self.costs: list[int] = []  # of each row
        self.first_tokens = [0, *accumulate(shard_tokens)]
        blocks: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        documents_of = [0] * len(shard_tokens)
        for number, document in enumerate(documents):
            shard = self._shard(document[0])
            block = shard, documents_of[shard] // block_documents
            blocks[block] += cuts(number, document, seq_len)
            documents_of[shard] += 1
        for pieces in filter(None, blocks.values()):
            self._add_block(pieces, seq_len + 1)
        self.n = len(self.slots)
        if self.n == 0:
            raise ValueError("a source needs at least one row")

    def _shard(self, token: int) -> int:
        """Return the first shard that ends after a token, or the last one."""
        return min(bisect_right(self.first_tokens[1:], token), len(self.first_tokens) - 2)

    def _add_block(self, pieces: Sequence[Piece], row_tokens: int) -> None:
        """Add the classes, patterns and rows of a block's pieces."""
        room_of = rooms(Counter(piece.tokens for piece in pieces if piece.tokens < row_tokens))
        room_of[row_tokens] = row_tokens
        classes = sorted(Counter(room_of[piece.tokens] for piece in pieces).items())
        tails = [(room, size) for room, size in classes if room < row_tokens]
        patterns = spread(tails, row_tokens)
        if tails != classes:
            patterns.append(((len(tails),), classes[-1][1]))  # the highest number, so this is sorted
        sizes = [size for _, size in classes]
        next_slots = list(accumulate(sizes[:-1], initial=len(self.pieces)))
        self.first += next_slots
        self.size += sizes
        self.pieces += sorted(pieces, key=lambda piece: (room_of[piece.tokens], piece.document, piece.start))
        for numbers, height in patterns:
            rows: list[list[int]] = [[] for _ in range(height)]
            for number in numbers:
                for row in rows:
                    row.append(next_slots[number])
                    next_slots[number] += 1
            self.slots += [sorted(row, reverse=True) for row in rows]
            self.costs += [sum(classes[number][0] ** 2 for number in numbers)] * height

    def held(self, row: int, epoch: int, excluded: Sequence[Range], exclude_key: int) -> list[Piece]:
        """Return the pieces of a row in an epoch of the source; `excluded` are sorted ranges of pieces.

        A row of which everything is excluded has one piece, of no token.
        """
        slots = self.slots[row]
        turn = draw((epoch * self.n + row) & U64, len(slots), mix(self.key))
        found = []
        for slot in slots[turn:] + slots[:turn]:
            number = bisect_right(self.first, slot) - 1
            first, size = self.first[number], self.size[number]
            class_epoch = (epoch * len(self.first) + number) & U64
            piece = permute(slot - first, size, self.key, class_epoch)
            of_class = [(max(0, start - first), min(size, stop - first)) for start, stop in excluded]
            of_class = [(start, stop) for start, stop in of_class if start < stop]
            if holds(of_class, piece):
                if of_class == [(0, size)]:
                    found.append(replace(self.pieces[first + piece], tokens=0))  # an empty slot
                    continue
                piece = substitute(piece, size, of_class, exclude_key, class_epoch)
            found.append(self.pieces[first + piece])
        return [piece for piece in found if piece.tokens] or found[:1]

    def place(self, piece: Piece) -> tuple[int, int]:
        """Return the shard of a piece and the piece's first token in it."""
        shard = self._shard(piece.start)
        return shard, piece.start - self.first_tokens[shard]

    def touched(self, tokens: Range) -> Iterable[Range]:
        """Yield the pieces that hold a token of a range of the source's tokens, as ranges of pieces."""
        for number, piece in enumerate(self.pieces):
            if max(piece.start, tokens[0]) < min(piece.start + piece.tokens, tokens[1]):
                yield number, number + 1


def lengths_digest(documents: Sequence[Document]) -> str:
    """Return the digest of a source's documents in the canonical document."""
    values = [*(start for start, _ in documents), *(length for _, length in documents)]
    return f"xxh3-{xxhash.xxh3_128_hexdigest(struct.pack(f'<{len(values)}q', *values))}"


# The row, put together, and the id of the plan


class SecondPlan:
    """A plan over sources whose shards have the given numbers of tokens.

    `documents` are those of each source; only rows of documents need them.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        shard_tokens: Mapping[str, Sequence[int]],
        documents: Mapping[str, Sequence[Document]] | None = None,
    ) -> None:
        mixes = any(len(stage["mixture"]) > 1 for stage in document["stages"])
        self.version: int = document.get("version") or (2 if mixes else 1)
        self.window_seq_len: int = document["seq_len"]
        self.seed: int = document.get("seed", 0)
        self.order: Any = document.get("order", "shuffle")
        self.stride: int = document.get("stride") or (1 if self.order == "random" else self.window_seq_len)
        self.skip_steps = merged(document.get("skip_steps", []))
        mixtures = [units(stage["mixture"]) for stage in document["stages"]]
        if any(0 in mixture.values() for mixture in mixtures):
            raise ValueError("a source has no unit")
        self.sources = list(dict.fromkeys(name for mixture in mixtures for name in mixture))
        self.documents = documents or {}
        self.block_documents = 0  # rows are windows
        self.windows: dict[str, Windows] = {}
        self.packed: dict[str, DocumentRows] = {}
        if document.get("rows", "windows") != "windows":
            self.block_documents = document["rows"]["documents"].get("block_documents", BLOCK_DOCUMENTS)
        for name in self.sources:
            if self.block_documents:
                documents_key = key("documents", self.seed, name)
                self.packed[name] = DocumentRows(
                    shard_tokens[name],
                    self.documents[name],
                    self.window_seq_len,
                    self.block_documents,
                    documents_key,
                )
            else:
                self.windows[name] = Windows(shard_tokens[name], self.window_seq_len, self.stride)
        self.rows: Mapping[str, Windows | DocumentRows] = self.packed or self.windows
        counts = [len(shard_tokens[name]) for name in self.sources]
        self.first_shards = dict(zip(self.sources, [0, *accumulate(counts)], strict=False))
        self.stages: list[Stage] = []
        for stage, mixture in zip(document["stages"], mixtures, strict=True):
            self.stages.append(self._next_stage(stage, mixture))

    def _next_stage(self, stage: Mapping[str, Any], mixture: dict[str, int]) -> Stage:
        """Return the stage that begins where the last of `stages` ends."""
        seq_len: int = stage.get("seq_len") or self.window_seq_len
        from_step: int = stage.get("from_step", 0)
        exclude = {name: merged(ranges) for name, ranges in (stage.get("exclude") or {}).items() if ranges}
        positions = dict.fromkeys(self.sources, 0)
        excluded: dict[str, list[Range]] = {name: [] for name in self.sources}
        if self.stages:
            before = self.stages[-1]
            positions, excluded = dict(before.positions), dict(before.excluded)
            rows = (from_step - before.from_step) * (before.global_batch_size // before.parts)
            for name in before.units:
                positions[name] += before.rows_of(name, rows)
        for name, ranges in exclude.items():
            touched = [windows for tokens in ranges for windows in self.rows[name].touched(tokens)]
            excluded[name] = merged([*excluded[name], *touched])
        return Stage(
            version=self.version,
            number=len(self.stages),
            seed=self.seed,
            from_step=from_step,
            global_batch_size=stage["global_batch_size"],
            seq_len=seq_len,
            parts=self.window_seq_len // seq_len,
            units=mixture,
            exclude=exclude,
            positions=positions,
            excluded=excluded,
        )

    def plan_step(self, step: int) -> int:
        """Return the plan step of a training step."""
        for start, stop in self.skip_steps:
            if step < start:
                break
            step += stop - start
        return step

    def stage_at(self, plan_step: int) -> Stage:
        """Return the stage of a plan step."""
        return [stage for stage in self.stages if stage.from_step <= plan_step][-1]

    def stage_of(self, step: int) -> Stage:
        """Return the stage of a training step."""
        return self.stage_at(self.plan_step(step))

    def global_batch_size(self, step: int) -> int:
        """Return the rows of a training step's global batch."""
        return self.stage_of(step).global_batch_size

    def seq_len(self, step: int) -> int:
        """Return L of a training step: its rows hold L + 1 tokens."""
        return self.stage_of(step).seq_len

    def located(self, step: int, row: int) -> tuple[int, int]:
        """Return a row's number of the shard in the plan's shard list, and the row's first token in it."""
        stage, name, position = self.position(self.plan_step(step), row)
        window, _, _ = self.window(stage, name, position)
        shard, start = self.windows[name].place(window)
        return self.first_shards[name] + shard, start + row % stage.parts * stage.seq_len

    def pieces(self, step: int, row: int) -> list[tuple[int, int, int]]:
        """Return the pieces of a row of documents as `located` does, with the tokens of each."""
        stage, name, position = self.position(self.plan_step(step), row)
        source_row, epoch, _ = self._ordered(name, position)
        packed, exclude_key = self.packed[name], key("exclude", self.seed, name)
        held = packed.held(source_row, epoch, stage.excluded[name], exclude_key)
        places = [(*packed.place(piece), piece.tokens) for piece in held]
        return [(self.first_shards[name] + shard, start, tokens) for shard, start, tokens in places]

    def position(self, plan_step: int, row: int) -> tuple[Stage, str, int]:
        """Return the stage of a row of a plan step, the row's source and its position."""
        stage = self.stage_at(plan_step)
        windows_per_step = stage.global_batch_size // stage.parts
        stage_row = (plan_step - stage.from_step) * windows_per_step + row // stage.parts
        name, rank = stage.source_and_rank(stage_row)
        return stage, name, stage.positions[name] + rank

    def window(self, stage: Stage, name: str, position: int) -> tuple[int, int, bool]:
        """Return the window at a position, the epoch, and whether the window is a substitute."""
        window, epoch, groups = self._ordered(name, position)
        excluded = stage.excluded[name]
        if not holds(excluded, window):
            return window, epoch, False
        for nearby in groups.following(window) if groups else ():
            if not holds(excluded, nearby):
                return nearby, epoch, True
        exclude_key = key("exclude", self.seed, name)
        return substitute(window, self.windows[name].n, excluded, exclude_key, epoch), epoch, True

    def _ordered(self, name: str, position: int) -> tuple[int, int, Groups | None]:
        """Return what the order gives at a position: the window (or row), its epoch, the epoch's groups."""
        n = self.rows[name].n
        epoch, offset = divmod(position, n)
        if self.order == "shuffle":
            return permute(offset, n, key("shuffle", self.seed, name), epoch), epoch, None
        if self.order == "sequential":
            return offset, epoch, None
        if self.order == "random":
            return draw(position, n, key("random", self.seed, name)), 0, None
        if isinstance(self.order, str):
            raise ValueError(f"docs/arithmetic.md has no order {self.order!r}")
        groups = Groups(n, self.order["shuffle"], self.seed, name, epoch)
        return groups.window(offset), epoch, groups

    def canonical_json(self, fingerprints: Mapping[str, str]) -> str:
        """Return the canonical document as JSON, for the fingerprints of the sources."""
        stages = []
        for stage in self.stages:
            spelled: dict[str, Any] = {
                "from_step": stage.from_step,
                "global_batch_size": stage.global_batch_size,
                "mixture": {name: share / BLOCK_ROWS for name, share in stage.units.items()},
            }
            if stage.seq_len != self.window_seq_len:
                spelled["seq_len"] = stage.seq_len
            if stage.exclude:
                spelled["exclude"] = stage.exclude
            stages.append(spelled)
        document: dict[str, Any] = {
            "version": self.version,
            "seq_len": self.window_seq_len,
            "stride": self.stride,
            "seed": self.seed,
            "order": self.order,
            "stages": stages,
            "skip_steps": self.skip_steps,
            "fingerprints": {name: fingerprints[name] for name in self.sources},
        }
        if self.block_documents:
            lengths = {name: lengths_digest(self.documents[name]) for name in self.sources}
            document["rows"] = {"documents": {"block_documents": self.block_documents, "lengths": lengths}}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def id(self, fingerprints: Mapping[str, str]) -> str:
        """Return the id of the plan, for the fingerprints of the sources."""
        return hashlib.sha256(self.canonical_json(fingerprints).encode()).hexdigest()
