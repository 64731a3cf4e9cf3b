"""The pure function of the project: (plan, step, rank) -> windows.

One step of a plan with a global batch of 6 over three ranks:

    global row     0  1  |  2  3  |  4  5
    rank           0  0  |  1  1  |  2  2
    position    step * 6 + global row

A position counts the rows a source has given since step 0. With n windows, position p lies in
epoch p // n at offset p % n; the order turns the offset into a sample id, and the window index
turns that into a shard and a start. Nothing is stored, so step 10^8 costs what step 0 costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.permutation import permute, round_keys, stream_key, uniform
from corpus_server.plan.document import MAX_STEP, Order, Plan
from corpus_server.windows import WindowIndex


@dataclass(frozen=True, kw_only=True)
class Source:
    """One corpus as a plan reads it: its windows in an order.

    Args:
        name: corpus name.
        windows: the windows of its shards.
        order: how positions become sample ids.
        seed: the plan's seed.
    """

    name: str
    windows: WindowIndex
    order: Order
    seed: int

    @cached_property
    def _key(self) -> int:
        return stream_key(self.order, self.seed, self.name)

    def sample_ids(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return which window each position holds: `(k,) uint64` to `(k,) uint64`."""
        num_windows = self.windows.num_windows
        if self.order == "random":
            return uniform(self._key, positions, num_windows)
        first, last = int(positions.min()) // num_windows, int(positions.max()) // num_windows
        if first == last:
            epochs = np.full(1, first, dtype=np.uint64)
            offsets = positions - np.uint64(first * num_windows)
        else:
            epochs, offsets = np.divmod(positions, np.uint64(num_windows))
        if self.order == "sequential":
            return offsets
        # A step seldom holds more than two epochs: derive each one's keys once.
        used, which = np.unique(epochs, return_inverse=True)
        keys = round_keys(self._key, used)
        return permute(offsets, num_windows, keys if used.size == 1 else keys[:, which])


class Sampler:
    """A plan bound to the shapes of its corpora.

    Args:
        plan: a bound plan.
        shard_tokens: for each source of the plan, the token counts of its shards.

    Raises:
        InvalidPlan: a source holds no window of `seq_len + 1` tokens.
    """

    def __init__(self, plan: Plan, shard_tokens: Mapping[str, Sequence[int]]) -> None:
        assert plan.stride is not None  # set by Plan itself
        self.plan = plan
        self.sources = {}
        for name in plan.sources:
            windows = WindowIndex(shard_tokens[name], seq_len=plan.seq_len, stride=plan.stride)
            if windows.num_windows == 0:
                longest = max(shard_tokens[name], default=0)
                raise InvalidPlan(
                    f"corpus {name!r}: no shard holds a window of seq_len + 1 = {plan.seq_len + 1} tokens; "
                    f"the longest has {longest}",
                    parameter="seq_len",
                    received=plan.seq_len,
                    accepted=f"at most {longest - 1}" if longest > 1 else "no value fits this corpus",
                )
            self.sources[name] = Source(name=name, windows=windows, order=plan.order, seed=plan.seed)

    @property
    def global_batch_size(self) -> int:
        """Rows of a step over all ranks."""
        return self.plan.stages[0].global_batch_size

    def steps_per_epoch(self, name: str) -> float | None:
        """Return the steps that one pass over a source takes; None for order `random`."""
        if self.plan.order == "random":
            return None
        return self.sources[name].windows.num_windows / self.global_batch_size

    def rows_per_rank(self, world_size: int) -> int:
        """Return the rows of a rank batch.

        Raises:
            InvalidParameter: the global batch cannot be divided evenly; names the divisors.
        """
        rows, rest = divmod(self.global_batch_size, world_size)
        if rest:
            size = self.global_batch_size
            # The divisors of a number up to 2^20 are found below its square root.
            small = [d for d in range(1, int(size**0.5) + 1) if size % d == 0]
            divisors = sorted({*small, *(size // d for d in small)})
            raise InvalidParameter(
                f"world_size must divide global_batch_size {size}, got {world_size}",
                parameter="world_size",
                received=world_size,
                accepted="one of " + ", ".join(map(str, divisors)),
            )
        return rows

    def check_part(self, step: int, *, count: int = 1, rank: int = 0, world_size: int = 1) -> int:
        """Check a rank's part of consecutive steps and return its rows per step.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        rows = self.rows_per_rank(world_size)
        if not 0 <= rank < world_size:
            raise InvalidParameter(
                f"rank must be in [0, {world_size}), got {rank}",
                parameter="rank",
                received=rank,
                accepted=f"[0, {world_size})",
            )
        if count < 1 or not 0 <= step <= step + count - 1 <= MAX_STEP:
            raise InvalidParameter(
                f"steps must lie in [0, {MAX_STEP}], got {step} to {step + count - 1}",
                parameter="step",
                received=step,
                accepted=f"[0, {MAX_STEP}]",
            )
        return rows

    def locate(self, step: int, *, count: int = 1, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """Return the windows of a rank over consecutive steps.

        Args:
            step: first training step.
            count: consecutive steps.
            rank: in [0, world_size).
            world_size: must divide the global batch.

        Returns:
            `(count, rows, 2) int64`: shard number over the plan's shard list, start token in the shard.

        Raises:
            InvalidParameter: a value is outside its range.
        """
        rows = self.check_part(step, count=count, rank=rank, world_size=world_size)
        first = np.arange(step, step + count, dtype=np.uint64) * np.uint64(self.global_batch_size)
        within = np.arange(rank * rows, (rank + 1) * rows, dtype=np.uint64)
        positions = (first[:, None] + within[None, :]).reshape(-1)
        (source,) = self.sources.values()
        return source.windows.locate(source.sample_ids(positions)).reshape(count, rows, 2)
