"""The pure function of the project: (plan, step, rank) -> windows.

One step of a plan with a global batch of 6 over three ranks:

    global row     0  1  |  2  3  |  4  5
    rank           0  0  |  1  1  |  2  2
    stage row      (plan step - from_step) * 6 + global row
    source         by the mixture of the stage, with the position of the source
    window         by the order, from (source, position // n, position % n)

With n windows in a source, position p lies in epoch p // n at offset p % n; the order turns the offset
into a window, and an excluded window is replaced. Windows are numbered through all shards of all sources.
Nothing is stored but a block of the mixture, so step 10^8 costs what step 0 costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.permutation import MAX_SIZE, Grid, invert, permute, round_keys, stream_key, uniform
from corpus_server.plan.document import MAX_STEP, Plan
from corpus_server.plan.exclusion import Exclusion, excluded_windows
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.timeline import PlacedStage, Timeline
from corpus_server.windows import WindowIndex

UInt64Array = NDArray[np.uint64]

_MANY_KEYS = 512
"""Of sources and epochs together, beyond which keys are not kept; of so many they have 32 kB."""


class Sampler:
    """A plan bound to the shapes of its corpora.

    Args:
        plan: a bound plan.
        shard_tokens: for each source of the plan, the token counts of its shards.

    Attributes:
        timeline: steps, stages, positions.
        windows: over all shards of all sources, in the order of `plan.sources`.
        num_windows: `(sources,) uint64`.
        exclusions: for each stage, or None where it excludes nothing.

    Raises:
        InvalidPlan: a source holds no window of `seq_len + 1` tokens, or none that is not excluded.
    """

    def __init__(self, plan: Plan, shard_tokens: Mapping[str, Sequence[int]]) -> None:
        assert plan.stride is not None  # set by Plan itself
        self.plan = plan
        self.timeline = Timeline(plan)
        shards = [len(shard_tokens[name]) for name in plan.sources]
        first_shard = [sum(shards[:k]) for k in range(len(shards) + 1)]
        every = [num_tokens for name in plan.sources for num_tokens in shard_tokens[name]]
        self.windows = WindowIndex(every, seq_len=plan.seq_len, stride=plan.stride)
        if self.windows.num_windows > MAX_SIZE or sum(every) > MAX_SIZE:
            raise InvalidPlan(f"the plan's corpora hold more than {MAX_SIZE} tokens together")
        # first_window[s]: number of source s's first window; one entry more than sources.
        self.first_window = np.array([self.windows.first_window(k) for k in first_shard], dtype=np.uint64)
        self.num_windows = np.diff(self.first_window)
        for name, num_windows in zip(plan.sources, self.num_windows.tolist(), strict=True):
            if num_windows == 0:
                raise _no_window(name, plan.seq_len, max(shard_tokens[name], default=0))
        self._grids = Grid.over(self.num_windows.tolist())
        self._keys = self._source_keys(plan.order)
        self._token_ranges = {
            name: (self.windows.first_token(first), sum(shard_tokens[name]))
            for name, first in zip(plan.sources, first_shard, strict=False)
        }
        self.exclusions = self._exclusions()

    def steps_per_epoch(self, name: str) -> float | None:
        """Return the steps that a pass over a source takes in the last stage that uses it.

        None for order `random`, which has no epochs.
        """
        if self.plan.order == "random":
            return None
        stage = next(stage for stage in reversed(self.plan.stages) if name in stage.mixture)
        num_windows = int(self.num_windows[self.plan.sources.index(name)])
        return num_windows / (stage.global_batch_size * stage.mixture[name])

    def global_batch_size_at(self, step: int) -> int:
        """Return the rows of a training step over all ranks."""
        return self.timeline.stage_at(self.timeline.plan_step(step)).stage.global_batch_size

    def check_part(self, step: int, *, count: int = 1, rank: int = 0, world_size: int = 1) -> int:
        """Check a rank's part of consecutive steps and return its rows per step.

        Raises:
            InvalidParameter: a value is outside its range, or the steps differ in their batch size.
        """
        if count < 1 or not 0 <= step <= step + count - 1 <= MAX_STEP:
            raise InvalidParameter(
                f"steps must lie in [0, {MAX_STEP}], got {step} to {step + count - 1}",
                parameter="step",
                received=step,
                accepted=f"[0, {MAX_STEP}]",
            )
        batch_size = self.global_batch_size_at(step)
        if count > 1 and len(self.plan.stages) > 1:
            self._check_one_size(step, count, batch_size)
        rows, rest = divmod(batch_size, world_size)
        if rest:
            raise _not_divisible(batch_size, world_size)
        if not 0 <= rank < world_size:
            raise InvalidParameter(
                f"rank must be in [0, {world_size}), got {rank}",
                parameter="rank",
                received=rank,
                accepted=f"[0, {world_size})",
            )
        return rows

    def locate(self, step: int, *, count: int = 1, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """Return the windows of a rank over consecutive steps.

        Args:
            step: first training step.
            count: consecutive steps, all of one global batch size.
            rank: in [0, world_size).
            world_size: must divide the global batch.

        Returns:
            `(count, rows, 2) int64`: shard number over the plan's shard list, start token in the shard.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        rows = self.check_part(step, count=count, rank=rank, world_size=world_size)
        return self.locate_rows(step, range(rank * rows, (rank + 1) * rows), count=count)

    def locate_rows(self, step: int, rows: range, *, count: int = 1) -> NDArray[np.int64]:
        """Return the windows of the same rows of consecutive steps.

        Args:
            step, count: as `check_part` has allowed them.
            rows: consecutive ones of the global batch.

        Returns:
            `(count, len(rows), 2) int64`, as `locate` does.
        """
        plan_steps = self.timeline.plan_steps(np.arange(step, step + count, dtype=np.uint64))
        within = np.arange(rows.start, rows.stop, dtype=np.uint64)
        parts = [self._locate_in_stage(*part, within) for part in self.timeline.by_stage(plan_steps)]
        located = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return located.reshape(count, len(rows), 2)

    def windows_at(
        self, source: NDArray[np.intp] | int, positions: UInt64Array
    ) -> tuple[UInt64Array, UInt64Array]:
        """Return the windows that positions hold before any is replaced, and their epochs.

        Args:
            source: `(k,)` source of each position, or one for all.
            positions: `(k,) uint64`, at least one.
        """
        sizes, first = self.num_windows[source], self.first_window[source]
        if self.plan.order == "random":
            return first + uniform(self._keys[source], positions, sizes), np.zeros_like(positions)
        epochs, offsets = np.divmod(positions, sizes)
        if self.plan.order == "shuffle":
            size = int(sizes) if isinstance(source, int) else self._grids.take(source)
            offsets = permute(offsets, size, self._round_keys(source, epochs))
        offsets += first
        return offsets, epochs

    def positions_of(self, source: int, windows: UInt64Array, epoch: int) -> UInt64Array:
        """Return the positions that hold windows of a source in an epoch: the inverse of `windows_at`.

        Raises:
            InvalidParameter: order `random` draws with replacement; there is nothing to invert.
        """
        num_windows = int(self.num_windows[source])
        offsets = windows - self.first_window[source]
        if self.plan.order == "random":
            raise InvalidParameter(
                "a plan with order 'random' cannot be looked up: it draws every row anew, with replacement, "
                "so a token has no place in it",
                parameter="plan",
                accepted="plans with order shuffle or sequential",
            )
        if self.plan.order == "shuffle":
            keys = round_keys(int(self._keys[source]), np.array([epoch], dtype=np.uint64))
            offsets = invert(offsets, num_windows, keys)
        positions: UInt64Array = offsets + np.uint64(epoch * num_windows)
        return positions

    def windows_touching(self, source: int, start: int, stop: int) -> tuple[int, int]:
        """Return the half-open range of windows that hold a token of [start, stop) of a source."""
        first = self._token_ranges[self.plan.sources[source]][0]
        tokens = np.array([[first + start], [first + stop]], dtype=np.uint64)
        low, high = self.windows.touching(tokens[0], tokens[1])[0].tolist()
        return low, high

    def _locate_in_stage(
        self, placed: PlacedStage, plan_steps: UInt64Array, within: UInt64Array
    ) -> NDArray[np.int64]:
        first = (plan_steps - np.uint64(placed.stage.from_step)) * np.uint64(placed.stage.global_batch_size)
        rows = (first[:, None] + within[None, :]).reshape(-1)
        members, given = placed.mixture.place(rows)
        source = int(placed.sources[members]) if isinstance(members, int) else placed.sources[members]
        windows, epochs = self.windows_at(source, given + placed.positions[source])
        exclusion = self.exclusions[placed.number]
        if exclusion is not None:
            windows = exclusion.substitute(source, windows, epochs)
        return self.windows.locate(windows)

    def _round_keys(self, source: NDArray[np.intp] | int, epochs: UInt64Array) -> UInt64Array:
        """Return the round keys of rows: `(NUM_ROUNDS, k)`, or `(NUM_ROUNDS, 1)` where all have the same.

        A step seldom holds more than two epochs of a source, and the next step holds the same.
        """
        lowest, highest = int(epochs.min()), int(epochs.max())
        streams = self._keys[source : source + 1] if isinstance(source, int) else self._keys
        if (highest - lowest + 1) * streams.size > _MANY_KEYS:
            return round_keys(self._keys[source], epochs)
        keys = _epoch_keys(tuple(streams.tolist()), lowest, highest)
        if keys.shape[1] == 1:
            return keys
        stream = 0 if isinstance(source, int) else source
        return keys[:, (epochs - np.uint64(lowest)).astype(np.intp) * streams.size + stream]

    def _exclusions(self) -> list[Exclusion | None]:
        found: list[Exclusion | None] = []
        windows = Ranges()
        for placed in self.timeline.stages:
            tokens = excluded_windows(placed.stage.exclude, self._token_ranges)
            if len(tokens):
                windows = windows.union(Ranges(self.windows.touching(tokens[:, 0], tokens[:, 1])))
            if not windows:
                found.append(None)
                continue
            used = placed.sources.tolist()
            keys = self._exclusion_keys
            found.append(Exclusion(self.plan.sources, windows, self.first_window, keys, used))
        return found

    @cached_property
    def _exclusion_keys(self) -> UInt64Array:
        return self._source_keys("exclude")

    def _source_keys(self, purpose: str) -> UInt64Array:
        keys = [stream_key(purpose, self.plan.seed, name) for name in self.plan.sources]
        return np.array(keys, dtype=np.uint64)

    def _check_one_size(self, step: int, count: int, batch_size: int) -> None:
        """Refuse steps of several batch sizes: an answer is one array."""
        stages = self.plan.stages
        last = self.timeline.plan_step(step + count - 1)
        first = self.timeline.plan_step(step)
        for before, after in pairwise(stages):
            if first < after.from_step <= last and before.global_batch_size != after.global_batch_size:
                until = int(self.timeline.skips.num_outside_below(np.array([after.from_step], np.uint64))[0])
                if until == step:
                    continue
                raise InvalidParameter(
                    f"steps {step} to {step + count - 1} differ in global_batch_size: it changes from "
                    f"{batch_size} at step {until}; ask for at most {until - step} steps from {step}",
                    parameter="count",
                    received=count,
                    accepted=f"at most {until - step}",
                )


@lru_cache(maxsize=128)
def _epoch_keys(streams: tuple[int, ...], lowest: int, highest: int) -> UInt64Array:
    """Return the round keys of epochs [lowest, highest] of some streams: `(NUM_ROUNDS, epochs * streams)`."""
    epochs = np.arange(lowest, highest + 1, dtype=np.uint64)
    keys = round_keys(np.tile(np.array(streams, dtype=np.uint64), epochs.size), epochs.repeat(len(streams)))
    keys.setflags(write=False)  # shared by all that ask
    return keys


def _not_divisible(batch_size: int, world_size: int) -> InvalidParameter:
    # The divisors of a number up to 2^20 are found below its square root.
    small = [d for d in range(1, int(batch_size**0.5) + 1) if batch_size % d == 0]
    divisors = sorted({*small, *(batch_size // d for d in small)})
    return InvalidParameter(
        f"world_size must divide global_batch_size {batch_size}, got {world_size}",
        parameter="world_size",
        received=world_size,
        accepted="one of " + ", ".join(map(str, divisors)),
    )


def _no_window(name: str, seq_len: int, longest: int) -> InvalidPlan:
    return InvalidPlan(
        f"corpus {name!r}: no shard holds a window of seq_len + 1 = {seq_len + 1} tokens; "
        f"the longest has {longest}",
        parameter="seq_len",
        received=seq_len,
        accepted=f"at most {longest - 1}" if longest > 1 else "no value fits this corpus",
    )
