"""The second implementation of versions 1 and 2, written from docs/arithmetic.md alone, not from the code.

It proves that the page is complete: tests of `tests/server/plan` (the page, and random plans)
compare it with the page's vectors, with the golden rows and, over random plans, with the server. Its sections
are those of the page, and so are its names. Each row is computed by itself, in Python's integers. Caches hold
what rows share.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np
import xxhash

GOLDEN: Final = 0x9E3779B97F4A7C15
M1: Final = 0xBF58476D1CE4E5B9
M2: Final = 0x94D049BB133111EB
U64: Final = 2**64 - 1
BLOCK_ROWS: Final = 65536
"""Rows in a block of a mixture of version 1, and units in a stage's weights."""
CIRCLE_PLACES: Final = 32
"""How many places of a group's circle are looked at for a substitute."""

CLASS_PLACES: Final = 256
"""How many places of a class's circle are looked at for a substitute of a piece that is left out."""

CLOSING_PLACES: Final = 256
"""How many places of a source's or a class's circle are looked at for what closes a parenthesis."""

BLOCK_DOCUMENTS: Final = 262_144
CLASS_PIECES: Final = 128
"""A class with so many pieces takes no further length."""

Range = tuple[int, int]
"""A half-open range, as (start, stop)."""
Document = tuple[int, int]
"""A document, as (first token, tokens); tokens are counted through the source's shards."""
Place = tuple[int, int, int]
"""Consecutive tokens of a shard, as (number of the shard in its source, first token, tokens)."""
Laid = tuple[str, int]
"""Rows of a source, as (its name, seq_len that they are made for)."""
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


# Rows


@dataclass(frozen=True)
class Source:
    """A source of a plan; `fields` are those of the plan's `rows`."""

    name: str
    seed: int
    seq_len: int
    stride: int
    fields: Mapping[str, Any]
    shard_tokens: Sequence[int]
    documents: Sequence[Document]
    opened: Collection[int] = ()
    eot_first: bool = False
    values: Sequence[Any] = ()  # of the documents, in the column of a family


class Rows:
    """Rows of a source that hold one unit each: `n`, and what else a class of `ROWS` must say.

    Rows that hold several units have another `held`.
    """

    n: int
    own_lengths = False  # whether a stage of another seq_len has rows made for it, and not parts of windows

    def __init__(self, source: Source) -> None:
        raise NotImplementedError

    def places(self, unit: int) -> list[Place]:
        """Return the tokens that a unit stands for."""
        raise NotImplementedError

    def tokens_of(self, unit: int) -> Range:
        """Return the tokens of the source that a unit holds; they lie one after another."""
        raise NotImplementedError

    def touched(self, tokens: Range) -> Iterable[Range]:
        """Yield the units that hold a token of a range of the source's tokens, as ranges of units."""
        raise NotImplementedError

    def held(
        self,
        row: int,
        epoch: int,
        excluded: Sequence[Range] | LeftOut,
        exclude_key: int,
        groups: Groups | None,
    ) -> list[Place]:
        """Return what a row holds in an epoch of the source; `excluded` are sorted ranges of units."""
        unit, _ = unless_excluded(row, self.n, epoch, excluded, exclude_key, groups)
        return self.places(unit)

    @staticmethod
    def spelled(sources: Iterable[Source]) -> dict[str, Any]:
        """Return the fields of the canonical document."""
        return dict(next(iter(sources)).fields)


class Windows(Rows):
    """The windows of a source: those of its shards, one shard after the other."""

    def __init__(self, source: Source) -> None:
        self.seq_len, self.stride = source.seq_len, source.stride
        self.counts = [
            max(0, (tokens - self.seq_len - 1) // self.stride + 1) for tokens in source.shard_tokens
        ]
        self.first_windows = [0, *accumulate(self.counts)]
        self.first_tokens = [0, *accumulate(source.shard_tokens)]
        self.n = sum(self.counts)
        if self.n == 0:
            raise ValueError("a source needs at least one window")

    def place(self, window: int) -> tuple[int, int]:
        """Return the shard of a window and the window's first token in it."""
        shard = bisect_right(self.first_windows, window) - 1  # the last, and so never a shard without windows
        return shard, (window - self.first_windows[shard]) * self.stride

    def places(self, unit: int) -> list[Place]:
        """See `Rows.places`."""
        return [(*self.place(unit), self.seq_len + 1)]

    def tokens_of(self, unit: int) -> Range:
        """See `Rows.tokens_of`."""
        shard, start = self.place(unit)
        first = self.first_tokens[shard] + start
        return first, first + self.seq_len + 1

    def touched(self, tokens: Range) -> Iterable[Range]:
        """See `Rows.touched`; shard by shard."""
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
    excluded: dict[Laid, list[Range]]  # windows or pieces, by the ranges of this and all earlier stages

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

    def following(self, window: int, circle_key: int) -> Iterable[int]:
        """Yield the windows after `window` on its group's circle that are looked at for a substitute."""
        group, index = self.index_of(window)
        size, epoch = self.size(group), self.epoch * self.groups + group
        place = invert(index, size, circle_key, epoch)
        for distance in range(1, CIRCLE_PLACES + 1):
            yield self.laid(group, permute((place + distance) % size, size, circle_key, epoch))


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


def unless_excluded(
    unit: int,
    n: int,
    epoch: int,
    excluded: Sequence[Range] | LeftOut,
    exclude_key: int,
    groups: Groups | None,
) -> tuple[int, bool]:
    """Return a row's unit, or its substitute if the unit is excluded or left out, and whether it is one."""
    if isinstance(excluded, LeftOut):
        return excluded.unless_left_out(unit, n, epoch, groups)
    if not holds(excluded, unit):
        return unit, False
    for nearby in groups.following(unit, groups.circle_key) if groups else ():
        if not holds(excluded, nearby):
            return nearby, True
    return substitute(unit, n, excluded, exclude_key, epoch), True


# Families


def numbers_by(values: Sequence[Any]) -> list[int]:
    """Return what stands for each document in a family with `by`."""
    found = []
    for document, value in enumerate(values):
        text = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
        found.append(document if value is None else xxhash.xxh3_64_intdigest(text.encode()))
    return found


class LeftOut:
    """What a member of a family leaves out of a source; `place` says which tokens a unit stands for."""

    def __init__(self, family: Mapping[str, Any], source: Source, places: Callable[[int], Range]) -> None:
        self.documents, self.places = source.documents, places
        family_key = key("family", family.get("seed", 0), source.name)
        self.member_key = mix((family_key + (family["member"] + 1) * GOLDEN) & U64)
        self.circle_key = mix(self.member_key)
        self.bound = math.floor(Fraction(family["leave_out"]) * 2**53)
        self.doubled = math.floor(Fraction(family.get("double") or 0) * 2**53)
        self.numbers = numbers_by(source.values) if "by" in family else None
        self.known: dict[int, str] = {}  # units

    def what(self, document: int) -> str:
        """Return what happens to a document: "out", "doubled" or "plain"."""
        number = document if self.numbers is None else self.numbers[document]
        hashed = mix((self.member_key + (number + 1) * GOLDEN) & U64) >> 11
        return "out" if hashed < self.bound else "doubled" if hashed >= 2**53 - self.doubled else "plain"

    def leaves_out(self, document: int) -> bool:
        """Return whether a document is left out."""
        return self.what(document) == "out"

    def what_of(self, unit: int) -> str:
        """Return what happens to a unit."""
        if unit not in self.known:
            begin, end = self.places(unit)
            its = {
                self.what(document)
                for document, (start, tokens) in enumerate(self.documents)
                if max(start, begin) < min(start + tokens, end)
            }
            self.known[unit] = next((what for what in ("out", "doubled") if what in its), "plain")
        return self.known[unit]

    def closing(self, units: Iterable[int]) -> int | None:
        """Return the unit that closes the parenthesis before units; None if none does."""
        depth = 1
        for unit in units if self.doubled else ():
            depth += {"out": 1, "doubled": -1, "plain": 0}[self.what_of(unit)]
            if depth == 0:
                return unit
        return None

    def first_plain(self, units: Iterable[int]) -> int | None:
        """Return the first of some units that is plain."""
        return next((unit for unit in units if self.what_of(unit) == "plain"), None)

    def unless_left_out(self, window: int, n: int, epoch: int, groups: Groups | None) -> tuple[int, bool]:
        """Return a row's window, or its substitute, and whether it is one."""
        if self.what_of(window) != "out":
            return window, False
        near = list(groups.following(window, self.circle_key)) if groups else []
        found = self.closing(near or self.circle(0, window, n, epoch, CLOSING_PLACES))
        if found is None:
            found = self.first_plain(chain(near, self.circle(0, window, n, epoch, n)))
        if found is None:
            raise ValueError("at least one window of each source is plain")
        return found, True

    def piece(self, first: int, place: int, size: int, class_epoch: int) -> int | None:
        """Return a piece of a class, by its place in it, or its substitute; None: the slot stays empty."""
        if self.what_of(first + place) != "out":
            return place
        found = self.closing(self.circle(first, place, size, class_epoch, CLOSING_PLACES))
        if found is None:
            found = self.first_plain(self.circle(first, place, size, class_epoch, CLASS_PLACES))
        return None if found is None else found - first

    def circle(self, first: int, place: int, size: int, epoch: int, most: int) -> Iterable[int]:
        """Yield the other units of a pool, as they come after one on the circle; at most so many."""
        at = invert(place, size, self.circle_key, epoch)
        for distance in range(1, min(most, size - 1) + 1):
            yield first + permute((at + distance) % size, size, self.circle_key, epoch)


# Rows of documents


BODY, TAIL, WHOLE, FULL = range(4)
"""Kinds of pieces, in the order in which their classes are numbered."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a document that stay together."""

    document: int
    start: int  # counted through the source's shards
    tokens: int
    length: int  # with the end-of-text token behind the document, where one is counted
    kind: int
    is_followed: bool  # by an end-of-text token of its own


def cuts(number: int, source: Source) -> list[Piece]:
    """Return the pieces of document `number` of a source."""
    (start, tokens), seq_len = source.documents[number], source.seq_len
    is_open, eot_first, begin = number in source.opened, source.eot_first, source.fields.get("begin")
    predictions = tokens if eot_first else tokens + is_open - 1
    if predictions < 1 or (eot_first and tokens == 1 and not is_open):
        return []
    first = 0  # predictions of cut 0, if it is no longer than another
    each = seq_len
    if begin:
        first = 0 if eot_first and is_open else seq_len
        most = max(1, seq_len - max(1, seq_len // 16))
        rest = predictions - first
        each = -(-rest // -(-rest // most)) if rest > 0 else seq_len
    borders = [0] + [first] * (0 < first < predictions)
    while borders[-1] + each < predictions and predictions > first:
        borders.append(borders[-1] + each)
    found = []
    for cut, (begins, ends) in enumerate(zip(borders, [*borders[1:], predictions], strict=True)):
        is_last, length = ends == predictions, ends - begins + 1
        if length == seq_len + 1:
            kind = FULL
        elif begin:
            kind = WHOLE if cut == 0 and first else TAIL if is_last else BODY
        else:
            kind = TAIL if eot_first and (cut or is_open) else WHOLE
        own = min(ends, tokens - 1) - begins + 1
        is_followed = is_open and is_last and not eot_first
        found.append(Piece(number, start + begins, own, length, kind, is_followed))
    return found


def rooms(tails: Mapping[int, int]) -> dict[int, int]:
    """Return for each length of a block's tails the longest of its class; `tails` counts them by length."""
    found: dict[int, int] = {}
    room = size = 0
    for length in sorted(tails, reverse=True):
        if not found or size >= CLASS_PIECES or (room - length) * 512 > room:
            room, size = length, 0
        size += tails[length]
        found[length] = room
    return found


BySpace = dict[int, deque[tuple[int, ...]]]
"""Lists of classes by the space of their rows; those that are at this space for the longest time first."""


def spread(
    classes: Sequence[tuple[int, int]], row_tokens: int, opened: BySpace | None = None
) -> list[Pattern]:
    """Return the patterns of a block's tails, sorted; `classes` are (room, size) by number.

    opened: rows that are there already; then none are opened in advance.
    """
    by_space: BySpace = defaultdict(deque) if opened is None else opened
    if opened is None:
        by_space[row_tokens].extend([()] * -(-sum(room * size for room, size in classes) // row_tokens))
    for room, number, size in sorted(
        ((room, number, size) for number, (room, size) in enumerate(classes)), reverse=True
    ):
        for waiting in range(size, 0, -1):
            spaces = [space for space, rows in by_space.items() if rows and space >= room]
            if not spaces:
                by_space[row_tokens].extend([()] * -(-waiting // (row_tokens // room)))
                spaces = [row_tokens]
            space = max(spaces) if max(spaces) >= 2 * room else min(spaces)
            by_space[space - room].append((*by_space[space].popleft(), number))
    lists = (tuple(sorted(row, reverse=True)) for rows in by_space.values() for row in rows if row)
    return sorted(Counter(lists).items())


def begun(
    classes: Sequence[tuple[int, int]], kinds: Sequence[int], row_tokens: int
) -> tuple[list[Pattern], list[int]]:
    """Return the patterns of rows that begin with a document, and the slots of each class."""
    by_space: BySpace = defaultdict(deque)
    left = [size for _, size in classes]
    slots = list(left)
    num_rows = 0
    for kind in (BODY, TAIL):
        for number in reversed([each for each, its in enumerate(kinds) if its == kind]):
            room = classes[number][0]
            while left[number]:
                fitting = [
                    (classes[each][0], each)
                    for each, its in enumerate(kinds)
                    if its == WHOLE and left[each] and classes[each][0] + room <= row_tokens
                ]
                w = max(fitting, default=None)
                spaces = [space for space, rows in by_space.items() if rows and space >= room]
                if kind == TAIL and spaces and (w is None or min(spaces) <= row_tokens - w[0]):
                    space = min(spaces)
                    for _ in range(min(left[number], len(by_space[space]))):
                        by_space[space - room].append((*by_space[space].popleft(), number))
                        left[number] -= 1
                elif w is None:
                    slots[number] -= left[number]
                    break
                else:
                    opened = min(left[number], left[w[1]])
                    by_space[row_tokens - room - w[0]].extend([(w[1], number)] * opened)
                    left[number] -= opened
                    left[w[1]] -= opened
                    num_rows += opened
    total = sum(room * size for (room, _), size in zip(classes, slots, strict=True))
    by_space[row_tokens].extend([()] * max(0, -(-total // row_tokens) - num_rows))
    wholes = [
        (room, waiting if kind == WHOLE else 0)
        for (room, _), waiting, kind in zip(classes, left, kinds, strict=True)
    ]
    return spread(wholes, row_tokens, by_space), slots


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


class DocumentRows(Rows):
    """The rows of a source whose documents are packed; their units are pieces."""

    own_lengths = True

    def __init__(self, source: Source) -> None:
        shard_tokens, documents = source.shard_tokens, source.documents
        self.row_tokens, self.eot_first = source.seq_len + 1, source.eot_first
        self.begin = bool(source.fields.get("begin"))
        block_documents = source.fields.get("block_documents", BLOCK_DOCUMENTS)
        self.key = key("documents", source.seed, source.name)
        self.pieces: list[Piece] = []
        self.first: list[int] = []  # of each class: its first piece and first slot
        self.size: list[int] = []
        self.kinds: list[int] = []
        self.slots: list[list[int]] = []  # of each row, in descending order
        self.costs: list[int] = []  # of each row
        self.first_tokens = [0, *accumulate(shard_tokens)]
        blocks: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        documents_of = [0] * len(shard_tokens)
        for number, document in enumerate(documents):
            shard = self._shard(document[0])
            block = shard, documents_of[shard] // block_documents
            blocks[block] += cuts(number, source)
            documents_of[shard] += 1
        for pieces in filter(None, blocks.values()):
            self._add_block(pieces)
        self.n = len(self.slots)
        if self.n == 0:
            raise ValueError("a source needs at least one row")

    def _shard(self, token: int) -> int:
        """Return the first shard that ends after a token, or the last one."""
        return min(bisect_right(self.first_tokens[1:], token), len(self.first_tokens) - 2)

    def _room(self, kind: int, longest: int) -> int:
        """Return the room of a class."""
        seq_len = self.row_tokens - 1
        if not self.eot_first:
            return longest
        return longest - 1 if kind == WHOLE else min(longest + 1, seq_len)

    def _add_block(self, pieces: Sequence[Piece]) -> None:
        """Add the classes, patterns and rows of a block's pieces."""
        longest: dict[tuple[int, int], int] = {}  # of the class, by kind and length
        for kind in range(4):
            found = rooms(Counter(piece.length for piece in pieces if piece.kind == kind))
            longest.update({(kind, length): its for length, its in found.items()})
        class_of = {piece: (piece.kind, longest[piece.kind, piece.length]) for piece in pieces}
        every = sorted(set(class_of.values()))
        members = {each: [piece for piece in pieces if class_of[piece] == each] for each in every}
        for each in every:
            members[each].sort(key=lambda piece: (piece.document, piece.start))
        kinds = [kind for kind, _ in every]
        classes = [(self._room(*each), len(members[each])) for each in every]
        tails = [each for each, kind in zip(classes, kinds, strict=True) if kind != FULL]
        row_tokens = self.row_tokens - self.eot_first
        if self.begin:
            patterns, slots = begun(tails, kinds[: len(tails)], row_tokens)
        else:
            patterns, slots = spread(tails, row_tokens), [size for _, size in tails]
        if tails != classes:
            patterns.append(((len(tails),), classes[-1][1]))  # the highest number, so this is sorted
            slots.append(classes[-1][1])
        next_slots = list(accumulate(slots[:-1], initial=len(self.pieces)))
        kept = [number for number, size in enumerate(slots) if size]
        self.first += [next_slots[number] for number in kept]
        self.size += [slots[number] for number in kept]
        self.kinds += [kinds[number] for number in kept]
        for number in kept:
            self.pieces += members[every[number]][: slots[number]]
        for numbers, height in patterns:
            rows: list[list[int]] = [[] for _ in range(height)]
            for number in numbers:
                for row in rows:
                    row.append(next_slots[number])
                    next_slots[number] += 1
            self.slots += [sorted(row, reverse=True) for row in rows]
            self.costs += [sum(classes[number][0] ** 2 for number in numbers)] * height

    def held(
        self,
        row: int,
        epoch: int,
        excluded: Sequence[Range] | LeftOut,
        exclude_key: int,
        groups: Groups | None,
    ) -> list[Place]:
        """See `Rows.held`; of shard -1 are end-of-text tokens before or between pieces."""
        pieces = self.pieces_of(row, epoch, excluded, exclude_key)
        found: list[Place] = []
        for piece in pieces:
            if piece.kind == TAIL and self.eot_first and found:
                found.append((-1, 0, 2))
            if (
                piece.kind == BODY
                and piece.tokens
                and (rest := self.row_tokens - sum(each[2] for each in found) - piece.tokens)
            ):
                found.append((-1, 0, rest))
            found.append(self.place(piece))
            if piece.is_followed and piece.tokens:
                found.append((-1, 0, 1))
        return found

    def pieces_of(
        self, row: int, epoch: int, excluded: Sequence[Range] | LeftOut, exclude_key: int
    ) -> list[Piece]:
        """Return the pieces of a row; one of which everything is excluded has one piece, of no token."""
        slots = self.slots[row]
        turned = len(slots)
        if self.begin:
            turned = sum(self.kinds[bisect_right(self.first, slot) - 1] >= WHOLE for slot in slots)
        turn = draw((epoch * self.n + row) & U64, turned, mix(self.key))
        found = []
        for slot in slots[turn:turned] + slots[:turn] + slots[turned:]:
            number = bisect_right(self.first, slot) - 1
            first, size = self.first[number], self.size[number]
            class_epoch = (epoch * len(self.first) + number) & U64
            piece = permute(slot - first, size, self.key, class_epoch)
            if isinstance(excluded, LeftOut):
                other = excluded.piece(first, piece, size, class_epoch)
                its = self.pieces[first + (piece if other is None else other)]
                found.append(replace(its, tokens=0) if other is None else its)
                continue
            of_class = [(max(0, start - first), min(size, stop - first)) for start, stop in excluded]
            of_class = [(start, stop) for start, stop in of_class if start < stop]
            if holds(of_class, piece):
                if of_class == [(0, size)]:
                    found.append(replace(self.pieces[first + piece], tokens=0))  # an empty slot
                    continue
                piece = substitute(piece, size, of_class, exclude_key, class_epoch)
            found.append(self.pieces[first + piece])
        return [piece for piece in found if piece.tokens] or found[:1]

    def place(self, piece: Piece) -> Place:
        """Return where a piece lies."""
        shard = self._shard(piece.start)
        return shard, piece.start - self.first_tokens[shard], piece.tokens

    @staticmethod
    def spelled(sources: Iterable[Source]) -> dict[str, Any]:
        """See `Rows.spelled`."""
        every = list(sources)
        lengths = {source.name: lengths_digest(source) for source in every}
        fields = {name: value for name, value in every[0].fields.items() if value is not False}
        return {"block_documents": BLOCK_DOCUMENTS, **fields, "lengths": lengths}

    def tokens_of(self, unit: int) -> Range:
        """See `Rows.tokens_of`."""
        piece = self.pieces[unit]
        return piece.start, piece.start + piece.tokens

    def touched(self, tokens: Range) -> Iterable[Range]:
        """See `Rows.touched`."""
        for number, piece in enumerate(self.pieces):
            if max(piece.start, tokens[0]) < min(piece.start + piece.tokens, tokens[1]):
                yield number, number + 1


def lengths_digest(source: Source) -> str:
    """Return the digest of a source's documents in the canonical document."""
    documents = source.documents
    values = [*(start for start, _ in documents), *(length for _, length in documents)]
    if source.eot_first or source.opened:
        values += [2 * source.eot_first + (number in source.opened) for number in range(len(documents))]
    return f"xxh3-{xxhash.xxh3_128_hexdigest(struct.pack(f'<{len(values)}q', *values))}"


def ends_digest(source: Source) -> str:
    """Return the digest of where a source's documents end in the canonical document."""
    ends = [start + tokens for start, tokens in source.documents]
    return f"xxh3-{xxhash.xxh3_128_hexdigest(struct.pack(f'<{len(ends)}q', *ends))}"


def values_digest(source: Source) -> str:
    """Return the digest of a source's values in the canonical document."""
    numbers = numbers_by(source.values)
    return f"xxh3-{xxhash.xxh3_128_hexdigest(struct.pack(f'<{len(numbers)}Q', *numbers))}"


# The row, put together, and the id of the plan

ROWS: Final[Mapping[str, type[Rows]]] = {"windows": Windows, "documents": DocumentRows}
"""What rows consist of, by the name in a plan."""


class SecondPlan:
    """A plan over sources whose shards have the given numbers of tokens.

    `documents` are those of each source; only rows of documents need them.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        shard_tokens: Mapping[str, Sequence[int]],
        documents: Mapping[str, Sequence[Document]] | None = None,
        *,
        opened: Mapping[str, Collection[int]] | None = None,
        eot_first: bool = False,
        values: Mapping[str, Sequence[Any]] | None = None,
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
        rows = document.get("rows", "windows")
        self.kind, fields = (rows, {}) if isinstance(rows, str) else next(iter(rows.items()))
        if self.kind not in ROWS:
            raise ValueError(f"docs/arithmetic.md has no rows {self.kind!r}")
        lengths = {self.window_seq_len}
        if ROWS[self.kind].own_lengths:
            lengths.update(stage.get("seq_len") or self.window_seq_len for stage in document["stages"])
        self.of = {
            (name, seq_len): Source(
                name,
                self.seed,
                seq_len,
                self.stride,
                fields,
                shard_tokens[name],
                (documents or {}).get(name, ()),
                (opened or {}).get(name, ()),
                eot_first,
                (values or {}).get(name, ()),
            )
            for name in self.sources
            for seq_len in sorted(lengths)
        }
        self.rows = {laid: ROWS[self.kind](source) for laid, source in self.of.items()}
        self.family: Mapping[str, Any] | None = document.get("family")
        self.left_out = {
            laid: LeftOut(self.family, self.of[laid], rows.tokens_of)
            for laid, rows in (self.rows.items() if self.family else ())
        }
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
        excluded: dict[Laid, list[Range]] = {laid: [] for laid in self.rows}
        if self.stages:
            before = self.stages[-1]
            positions, excluded = dict(before.positions), dict(before.excluded)
            rows = (from_step - before.from_step) * (before.global_batch_size // before.parts)
            for name in before.units:
                positions[name] += before.rows_of(name, rows)
        for laid, rows_of in self.rows.items():
            touched = [units for tokens in exclude.get(laid[0], ()) for units in rows_of.touched(tokens)]
            excluded[laid] = merged([*excluded[laid], *touched])
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
        """Return the shard of a row, numbered as in the plan's shard list, and its first token there."""
        shard, start, _ = self.pieces(step, row)[0]
        return shard, start

    def pieces(self, step: int, row: int) -> list[Place]:
        """Return the pieces of a row; their shards are numbered as in the plan's shard list."""
        return self.pieces_of(self.plan_step(step), row)

    def pieces_of(self, plan_step: int, row: int) -> list[Place]:
        """Return the pieces of a row of a plan step, which training may skip."""
        stage, name, position = self.position(plan_step, row)
        laid, parts = self.laid(stage, name)
        source_row, epoch, groups = self._ordered(laid, position * parts + row % parts, parts)
        exclude_key = key("exclude", self.seed, name)
        excluded = self.left_out.get(laid, stage.excluded[laid])
        places = self.rows[laid].held(source_row, epoch, excluded, exclude_key, groups)
        if stage.parts > parts:
            ((shard, start, _),) = places
            places = [(shard, start + row % stage.parts * stage.seq_len, stage.seq_len + 1)]
        first = self.first_shards[name]
        return [(first + shard if shard >= 0 else -1, start, tokens) for shard, start, tokens in places]

    def position(self, plan_step: int, row: int) -> tuple[Stage, str, int]:
        """Return the stage of a row of a plan step, the row's source and its position."""
        stage = self.stage_at(plan_step)
        windows_per_step = stage.global_batch_size // stage.parts
        stage_row = (plan_step - stage.from_step) * windows_per_step + row // stage.parts
        name, rank = stage.source_and_rank(stage_row)
        return stage, name, stage.positions[name] + rank

    def laid(self, stage: Stage, name: str) -> tuple[Laid, int]:
        """Return the rows that a stage has of a source, and how many of them a position stands for."""
        its = ROWS[self.kind].own_lengths
        return (name, stage.seq_len if its else self.window_seq_len), stage.parts if its else 1

    def window(self, stage: Stage, name: str, position: int) -> tuple[int, int, bool]:
        """Return the window at a position, the epoch, and whether the window is a substitute."""
        laid = name, self.window_seq_len
        window, epoch, groups = self._ordered(laid, position, 1)
        exclude_key, excluded = key("exclude", self.seed, name), self.left_out.get(laid, stage.excluded[laid])
        window, replaced = unless_excluded(window, self.rows[laid].n, epoch, excluded, exclude_key, groups)
        return window, epoch, replaced

    def epoch(self, plan_step: int, row: int) -> tuple[str, int]:
        """Return the source of a row of a plan step, and the row's epoch."""
        stage, name, position = self.position(plan_step, row)
        laid, parts = self.laid(stage, name)
        return name, self._ordered(laid, position * parts + row % parts, parts)[1]

    def _ordered(self, laid: Laid, position: int, parts: int) -> tuple[int, int, Groups | None]:
        """Return what the order gives at a position: the window (or row), its epoch, the epoch's groups.

        Positions count these rows, of which `parts` stand for one of the plan's `seq_len`.
        """
        n, name = self.rows[laid].n, laid[0]
        epoch, offset = divmod(position, n)
        if self.order == "shuffle":
            return permute(offset, n, key("shuffle", self.seed, name), epoch), epoch, None
        if self.order == "sequential":
            return offset, epoch, None
        if self.order == "random":
            return draw(position, n, key("random", self.seed, name)), 0, None
        if isinstance(self.order, str):
            raise ValueError(f"docs/arithmetic.md has no order {self.order!r}")
        blocks = dict(self.order["shuffle"])
        blocks["block_windows"] = min(blocks["block_windows"] * parts, 2**40)
        groups = Groups(n, blocks, self.seed, name, epoch)
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
        if self.family:
            digests = {source.name: ends_digest(source) for source in self.of.values()}
            document["family"] = {"seed": 0, **self.family, "documents": digests}
            if "by" in self.family:
                document["family"]["values"] = {s.name: values_digest(s) for s in self.of.values()}
        if self.kind != "windows":
            fields = ROWS[self.kind].spelled(self.of.values())
            document["rows"] = {self.kind: fields} if fields else self.kind
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def id(self, fingerprints: Mapping[str, str]) -> str:
        """Return the id of the plan, for the fingerprints of the sources."""
        return hashlib.sha256(self.canonical_json(fingerprints).encode()).hexdigest()


# Order neox


@dataclass(frozen=True)
class NeoxSource:
    """The stream of a source, as (document, token in it) for each token, and the order of its samples."""

    stream: list[tuple[int, int]]
    samples: list[int]

    @classmethod
    def drawn(cls, lengths: Sequence[int], asked: int, seq_len: int, seed: int) -> NeoxSource:
        """Draw the samples of documents, at least as many as are asked for."""
        total, epochs = sum(lengths), 1
        while (epochs * total - 1) // seq_len < asked:
            epochs += 1
        state = np.random.RandomState(seed)
        documents = np.array([*range(len(lengths))] * epochs)
        state.shuffle(documents)
        samples = np.arange((epochs * total - 1) // seq_len)
        state.shuffle(samples)
        stream = [(each, token) for each in documents.tolist() for token in range(lengths[each])]
        return cls(stream, samples.tolist())

    def row(self, number: int, seq_len: int) -> list[tuple[int, int]]:
        """Return the tokens of a row."""
        first = self.samples[number] * seq_len
        return self.stream[first : first + seq_len + 1]


def neox_rows(
    lengths: Sequence[Sequence[int]],
    weights: Sequence[float] | None,
    *,
    num_samples: int,
    seq_len: int,
    seed: int,
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return all rows of a run: the source of each, and its tokens as (document, token in it)."""
    if weights is None:
        source = NeoxSource.drawn(lengths[0], num_samples, seq_len, seed)
        count = min(num_samples, len(source.samples) - 1)
        return [(0, source.row(number, seq_len)) for number in range(count)]
    total = 0.0
    for weight in weights:
        total += weight
    shares = [weight / total for weight in weights]
    asked = [math.ceil(num_samples * share * 1.005) for share in shares]
    sources = [
        NeoxSource.drawn(own, wanted, seq_len, seed) for own, wanted in zip(lengths, asked, strict=True)
    ]
    again = [share / float(np.sum(np.array(shares))) for share in shares]
    counts, found = [0] * len(sources), []
    for row in range(min(num_samples, sum(len(source.samples) - 1 for source in sources))):
        lags = [share * max(row, 1) - count for share, count in zip(again, counts, strict=True)]
        chosen = lags.index(max(lags))
        found.append((chosen, sources[chosen].row(counts[chosen], seq_len)))
        counts[chosen] += 1
    return found


def neox_part(split: Sequence[float], part: int, num_documents: int) -> range:
    """Return the documents of a part of a split."""
    shares = [*split, 0.0, 0.0][:3]
    total = shares[0] + shares[1] + shares[2]
    ends = list(accumulate(round(share / total * num_documents) for share in shares))
    moved = [0, *(end - (ends[2] - num_documents) for end in ends)]
    return range(moved[part], moved[part + 1])


# Order olmo


def olmo_steps(
    shard_tokens: Sequence[int],
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    num_epochs: int = 1,
    first_epoch: int = 1,
    target: int | None = None,
    shards: Sequence[int] = (),
) -> list[list[tuple[int, int]]]:
    """Return all steps of a run, each row as (shard, first token)."""
    length = seq_len + 1
    together = 1 if target is None else target // length
    instances = [
        (shard, number * length)
        for shard in shards or range(len(shard_tokens))
        for number in range(shard_tokens[shard] // (length * together) * together)
    ]
    steps = []
    for epoch in range(num_epochs):
        numbers = np.arange(len(instances) // together)
        np.random.Generator(np.random.PCG64(seed + first_epoch + epoch)).shuffle(numbers)
        rows = [instances[each * together + k] for each in numbers.tolist() for k in range(together)]
        whole = len(instances) // batch_size * batch_size
        steps += [rows[first : first + batch_size] for first in range(0, whole, batch_size)]
    return steps
