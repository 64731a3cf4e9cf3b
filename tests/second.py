"""The second implementation of version 1, written from docs/arithmetic.md alone, without a look at the code.

It proves that the page is complete: `tests/server/plan/test_arithmetic_page.py` compares it with the page's
vectors, with the golden rows and, over random plans, with the server. Its sections are those of the page, and
so are its names. Each row is computed by itself, in Python's integers. Caches hold what rows share.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Final

GOLDEN: Final = 0x9E3779B97F4A7C15
M1: Final = 0xBF58476D1CE4E5B9
M2: Final = 0x94D049BB133111EB
U64: Final = 2**64 - 1
BLOCK_ROWS: Final = 65536
"""Rows in a block of a mixture, and units in a stage's weights."""
CIRCLE_PLACES: Final = 32
"""How many places of a group's circle are looked at for a substitute."""

Range = tuple[int, int]
"""A half-open range, as (start, stop)."""
Order = str | Mapping[str, Any]
"""As a plan's document has it."""


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


def joined(ranges: Iterable[Sequence[int]]) -> list[Range]:
    """Return ranges sorted, and joined where they touch or overlap."""
    found: list[Range] = []
    for start, stop in sorted((start, stop) for start, stop in ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


# Mixtures


def units(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the units of each source, sorted by name."""
    total = sum(Fraction(weight) for weight in weights.values())
    shares = {name: BLOCK_ROWS * Fraction(weights[name]) / total for name in sorted(weights)}
    whole = {name: math.floor(share) for name, share in shares.items()}
    remaining = BLOCK_ROWS - sum(whole.values())
    by_fraction = sorted(shares, key=lambda name: (whole[name] - shares[name], name))
    for name in by_fraction[:remaining]:
        whole[name] += 1
    if 0 in whole.values():
        raise ValueError("a source has no unit")
    return whole


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


# Steps, stages and positions


@dataclass
class Stage:
    """A stage, and what holds at its start."""

    number: int
    seed: int
    from_step: int
    global_batch_size: int
    seq_len: int
    parts: int  # rows that read one window
    units: dict[str, int]
    exclude: dict[str, list[Range]]  # of this stage alone
    positions: dict[str, int]  # of all sources, at the stage's start
    excluded: dict[str, list[Range]]  # windows, by the ranges of this and all earlier stages

    def source_and_rank(self, row: int) -> tuple[str, int]:
        """Return the source of a row of the stage, and the row's rank among those of the source."""
        names = list(self.units)
        if len(names) == 1:
            return names[0], row
        block, offset = divmod(row, BLOCK_ROWS)
        sources, earlier = block_rows(block, self.seed, self.number, tuple(self.units.values()))
        name = names[sources[offset]]
        return name, block * self.units[name] + earlier[offset]

    def rows_of(self, name: str, rows: int) -> int:
        """Return how many of the stage's first `rows` rows belong to a source of its mixture."""
        if len(self.units) == 1:
            return rows
        block, offset = divmod(rows, BLOCK_ROWS)
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


# Orders


def chosen(order: Order, position: int, n: int, seed: int, name: str) -> tuple[int, int]:
    """Return the epoch of a position of a source with n windows, and the window there."""
    epoch, offset = divmod(position, n)
    if order == "shuffle":
        return epoch, permute(offset, n, key("shuffle", seed, name), epoch)
    if order == "sequential":
        return epoch, offset
    if order == "random":
        return 0, draw(position, n, key("random", seed, name))
    if isinstance(order, str):
        raise ValueError(f"docs/arithmetic.md has no order {order!r}")
    return epoch, Groups(n, order["shuffle"], seed, name, epoch).window(offset)


# Exclusions


def holds(ranges: Sequence[Range], window: int) -> bool:
    """Return whether a window lies in one of sorted ranges of windows."""
    return any(start <= window < stop for start, stop in ranges)


def substitute(window: int, n: int, excluded: Sequence[Range], exclude_key: int, epoch: int) -> int:
    """Return the substitute of an excluded window by the rule without groups."""
    left = n - sum(stop - start for start, stop in excluded)
    rank = sum(min(stop, window) - start for start, stop in excluded if start < window)
    lap, place = divmod(rank, left)
    found = permute(place, left, exclude_key, (epoch + lap * GOLDEN) & U64)
    for start, stop in excluded:  # `found` counts the windows left; add the excluded ones before it
        if start > found:
            break
        found += stop - start
    return found


def stand_in(
    order: Order, window: int, n: int, excluded: Sequence[Range], seed: int, name: str, epoch: int
) -> int:
    """Return the substitute of an excluded window of a source."""
    groups = (
        () if isinstance(order, str) else Groups(n, order["shuffle"], seed, name, epoch).following(window)
    )
    for nearby in groups:
        if not holds(excluded, nearby):
            return nearby
    return substitute(window, n, excluded, key("exclude", seed, name), epoch)


# The row, put together, and the id of the plan


class SecondPlan:
    """A plan over sources whose shards have the given numbers of tokens."""

    def __init__(self, document: Mapping[str, Any], shard_tokens: Mapping[str, Sequence[int]]) -> None:
        self.version: int = document.get("version", 1)
        self.window_seq_len: int = document["seq_len"]
        self.seed: int = document.get("seed", 0)
        self.order: Order = document.get("order", "shuffle")
        self.stride: int = document.get("stride") or (1 if self.order == "random" else self.window_seq_len)
        self.skip_steps = joined(document.get("skip_steps", []))
        mixtures = [units(stage["mixture"]) for stage in document["stages"]]
        self.sources = list(dict.fromkeys(name for mixture in mixtures for name in mixture))
        self.windows = {
            name: Windows(shard_tokens[name], self.window_seq_len, self.stride) for name in self.sources
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
        exclude = {name: joined(ranges) for name, ranges in (stage.get("exclude") or {}).items() if ranges}
        positions = dict.fromkeys(self.sources, 0)
        excluded: dict[str, list[Range]] = {name: [] for name in self.sources}
        if self.stages:
            before = self.stages[-1]
            positions, excluded = dict(before.positions), dict(before.excluded)
            rows = (from_step - before.from_step) * (before.global_batch_size // before.parts)
            for name in before.units:
                positions[name] += before.rows_of(name, rows)
        for name, ranges in exclude.items():
            touched = [windows for tokens in ranges for windows in self.windows[name].touched(tokens)]
            excluded[name] = joined([*excluded[name], *touched])
        return Stage(
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

    def stage_of(self, step: int) -> Stage:
        """Return the stage of a training step."""
        plan_step = self.plan_step(step)
        return [stage for stage in self.stages if stage.from_step <= plan_step][-1]

    def global_batch_size(self, step: int) -> int:
        """Return the rows of a training step's global batch."""
        return self.stage_of(step).global_batch_size

    def seq_len(self, step: int) -> int:
        """Return L of a training step: its rows hold L + 1 tokens."""
        return self.stage_of(step).seq_len

    def located(self, step: int, row: int) -> tuple[int, int]:
        """Return a row's number of the shard in the plan's shard list, and the row's first token in it."""
        stage = self.stage_of(step)
        windows_per_step = stage.global_batch_size // stage.parts
        stage_row = (self.plan_step(step) - stage.from_step) * windows_per_step + row // stage.parts
        name, rank = stage.source_and_rank(stage_row)
        window = self._window(name, stage.positions[name] + rank, stage.excluded[name])
        shard, start = self.windows[name].place(window)
        return self.first_shards[name] + shard, start + row % stage.parts * stage.seq_len

    def _window(self, name: str, position: int, excluded: Sequence[Range]) -> int:
        """Return the window of a source at a position, or its substitute."""
        n = self.windows[name].n
        epoch, window = chosen(self.order, position, n, self.seed, name)
        if not holds(excluded, window):
            return window
        return stand_in(self.order, window, n, excluded, self.seed, name, epoch)

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
        document = {
            "version": self.version,
            "seq_len": self.window_seq_len,
            "stride": self.stride,
            "seed": self.seed,
            "order": self.order,
            "stages": stages,
            "skip_steps": self.skip_steps,
            "fingerprints": {name: fingerprints[name] for name in self.sources},
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def id(self, fingerprints: Mapping[str, str]) -> str:
        """Return the id of the plan, for the fingerprints of the sources."""
        return hashlib.sha256(self.canonical_json(fingerprints).encode()).hexdigest()
