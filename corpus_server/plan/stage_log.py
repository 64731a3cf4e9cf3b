"""The stages of a plan as arrays, which a plan and all that continue it share.

A run that follows its losses may have 100,000 stages. As objects they would take a gigabyte; here a stage of
64 sources takes 800 bytes, and a plan that continues another one adds its own stages behind those of its
parent. A plan sees the first `num_stages` of its log. Two plans that go on differently from one parent need
two logs: the second one copies what both have.

    log      stage 0  1  2  3  4
    plan A         0  1  2            the parent
    plan B         0  1  2  3         continues A
    plan C         0  1  2  3  4      continues B
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Int64Array
from corpus_server.plan.mixture import BLOCK_ROWS
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.stage import Stage

S = TypeVar("S")
T = TypeVar("T", bound=np.generic)

_MORE: Final = 1.5
"""By which arrays grow, so that appending takes constant time on average."""


class StageLog:
    """Stages, and where each source stands when they begin; safe to use from several threads.

    What was appended never changes. Arrays may be longer than `num_stages`, and have more columns than a plan
    has sources: a plan takes the part that is its own. They are replaced when they grow, so none is kept.

    Args:
        stages: the first ones.
        seq_len: of the plan.

    Attributes:
        names: of the sources, in order of first use, which number the columns.
        num_stages: appended so far.
        num_placed: the first stages whose positions are known.
        from_steps, sizes, seq_lens: `(n,) int64`; seq_lens are those of rows.
        units: `(n, sources) uint32`, of 65,536; 0 where the stage does not use the source.
        positions: `(n, sources) uint64`, of all sources at the stage's first row.
        rows: the same of the rows that each source gave before the stage; `positions` itself as long as every
            row is a window.
        exclude: of the stages that exclude something, by number.
    """

    def __init__(self, stages: Sequence[Stage], *, seq_len: int) -> None:
        self.seq_len = seq_len
        self.names: list[str] = []
        self.num_stages = self.num_placed = 0
        self.exclude: dict[int, Mapping[str, Ranges]] = {}
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self.from_steps, self.sizes, self.seq_lens = (np.zeros(0, np.int64) for _ in range(3))
        self.units = np.zeros((0, 0), np.uint32)
        self.positions = self.rows = np.zeros((0, 0), np.uint64)
        self._allocate(len(stages), len({name for stage in stages for name in stage.mixture}))
        self._append(stages)

    @property
    def num_bytes(self) -> int:
        """Memory of what is used of the arrays; the rest was never written."""
        share = self.num_stages / max(1, len(self.from_steps))
        arrays = sum(each.nbytes for each in (self.from_steps, self.sizes, self.seq_lens))
        arrays += self.units.nbytes + self.positions.nbytes
        arrays += 0 if self.rows is self.positions else self.rows.nbytes
        ranges = (its for exclude in tuple(self.exclude.values()) for its in exclude.values())
        return int(share * arrays) + sum(each.num_bytes for each in ranges)

    def continued(
        self, num_stages: int, num_sources: int, stages: Sequence[Stage], *, is_shared: bool = True
    ) -> StageLog:
        """Return a log with the first stages of this one, then some more.

        Args:
            num_stages, num_sources: of the plan that is continued.
            is_shared: else stages that this log does not hold are appended to a copy.
        """
        with self._lock:
            log = self
            appended = zip(range(num_stages, self.num_stages), stages, strict=False)
            is_other = not all(self._holds(number, stage) for number, stage in appended)
            if is_other or (not is_shared and self.num_stages < num_stages + len(stages)):
                log = self._copy(num_stages, num_sources)
            log._append(stages[log.num_stages - num_stages :])
        return log

    def place(
        self, number: int, positions: NDArray[np.uint64], rows: NDArray[np.uint64] | None = None
    ) -> None:
        """Note positions and rows of the first sources, `(k,)`, when a stage begins; others have none."""
        with self._lock:
            if number == self.num_placed:  # else another thread has noted the same
                self.positions[number, : positions.size] = positions
                if self.rows is not self.positions:
                    self.rows[number, : positions.size] = positions if rows is None else rows
                self.num_placed += 1

    def shares(self, number: int) -> dict[str, int]:
        """Return the units of a stage's sources by name, sorted by name."""
        units = self.units[number]
        used = np.flatnonzero(units)
        return dict(sorted(zip((self.names[k] for k in used.tolist()), units[used].tolist(), strict=True)))

    def first_difference(self, num_stages: int, other: StageLog, num_others: int) -> int:
        """Return the number of the first stage in which the first stages of two logs differ.

        Where one has only the first stages of the other, it is their number.
        """
        count = min(num_stages, num_others)
        if other is self:
            return count
        differs = np.zeros(count, dtype=bool)
        for column, others in zip(self._shapes, other._shapes, strict=True):
            differs |= column[:count] != others[:count]
        for source in {*self.names, *other.names}:
            differs |= self._column(source, count) != other._column(source, count)
        for number in {*self.exclude, *other.exclude}:
            if number < count:
                differs[number] |= self.exclude.get(number) != other.exclude.get(number)
        return int(differs.argmax()) if differs.any() else count

    def first_use(self, source: str) -> int:
        """Return the number of the first stage that uses a source."""
        return int((self.units[: self.num_stages, self._numbers[source]] > 0).argmax())

    def stage(self, number: int) -> Stage:
        """Return a stage."""
        seq_len = int(self.seq_lens[number])
        return Stage.kept(
            from_step=int(self.from_steps[number]),
            global_batch_size=int(self.sizes[number]),
            mixture={name: units / BLOCK_ROWS for name, units in self.shares(number).items()},
            seq_len=None if seq_len == self.seq_len else seq_len,
            exclude=self.exclude.get(number, {}),
        )

    def _column(self, source: str, count: int) -> NDArray[np.uint32] | int:
        number = self._numbers.get(source)
        return 0 if number is None else self.units[:count, number]

    def _holds(self, number: int, stage: Stage) -> bool:
        shape = stage.from_step, stage.global_batch_size, stage.seq_len or self.seq_len
        return (
            shape == (self.from_steps[number], self.sizes[number], self.seq_lens[number])
            and self.shares(number) == stage.units
            and self.exclude.get(number, {}) == stage.exclude
        )

    def _append(self, stages: Sequence[Stage]) -> None:
        new = dict.fromkeys(name for stage in stages for name in stage.mixture if name not in self._numbers)
        for name in new:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        num_stages, num_sources = self.num_stages + len(stages), len(self.names)
        if num_stages > len(self.from_steps) or num_sources > self.units.shape[1]:
            # Columns are spare only where sources came later: most plans know theirs from the start.
            width = self.units.shape[1]
            columns = max(width, int(_MORE * num_sources) if 0 < width < num_sources else num_sources)
            self._allocate(max(len(self.from_steps), int(_MORE * num_stages)), columns)
        for number, stage in enumerate(stages, self.num_stages):
            self.from_steps[number], self.sizes[number] = stage.from_step, stage.global_batch_size
            self.seq_lens[number] = stage.seq_len or self.seq_len
            units = stage.units
            self.units[number, [self._numbers[name] for name in units]] = list(units.values())
            if stage.exclude:
                self.exclude[number] = stage.exclude
            if stage.seq_len is not None and self.rows is self.positions:
                self.rows = self.positions.copy()
        self.num_stages = num_stages

    @property
    def _shapes(self) -> tuple[Int64Array, ...]:
        return self.from_steps, self.sizes, self.seq_lens

    def _allocate(self, num_stages: int, num_sources: int) -> None:
        """Make arrays with room for so many and copy what there is, before any thread can see them."""
        used, table = self.num_stages, (num_stages, num_sources)
        has_rows = self.rows is not self.positions
        self.from_steps, self.sizes, self.seq_lens = (
            _larger(column, (num_stages,), used) for column in self._shapes
        )
        self.units = _larger(self.units, table, used)
        rows = _larger(self.rows, table, used)
        self.rows, self.positions = rows, _larger(self.positions, table, used) if has_rows else rows

    def _copy(self, num_stages: int, num_sources: int) -> StageLog:
        copy = StageLog((), seq_len=self.seq_len)
        copy.names = self.names[:num_sources]
        copy._numbers = {name: number for number, name in enumerate(copy.names)}
        copy.from_steps, copy.sizes, copy.seq_lens = self._shapes
        copy.units = self.units[:, :num_sources]
        copy.rows = copy.positions = self.positions[:, :num_sources]
        if self.rows is not self.positions:
            copy.rows = self.rows[:, :num_sources]
        copy.exclude = {number: exclude for number, exclude in self.exclude.items() if number < num_stages}
        copy.num_stages, copy.num_placed = num_stages, min(num_stages, self.num_placed)
        copy._allocate(int(_MORE * num_stages), num_sources)
        return copy


def _larger(array: NDArray[T], shape: tuple[int, ...], used: int) -> NDArray[T]:
    """Return an array of this shape with the first rows of another; what nobody writes takes no memory."""
    larger = np.zeros(shape, dtype=array.dtype)
    larger[(slice(used), *map(slice, array.shape[1:]))] = array[:used]
    return larger


class Made(Sequence[S]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, size: int, make: Callable[[int], S]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, number: int) -> S: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[S]: ...
    def __getitem__(self, number: int | slice) -> S | Sequence[S]:
        its = range(self._size)[number]
        return self._make(its) if isinstance(its, int) else list(map(self._make, its))
