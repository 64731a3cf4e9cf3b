"""The pure function at the project's heart: (plan, step, rank) -> windows.

One step of a plan with a global batch of 6 over three ranks:

    global row     0  1  |  2  3  |  4  5
    rank           0  0  |  1  1  |  2  2   (unless the plan balances ranks, see dealing.py)
    stage row      (plan step - from_step) * 6 + global row
    source         from the mixture of the stage, with the position in the source
                   (of a window; a stage with a shorter seq_len has several rows in one, see timeline.py)
    window         from the order, given (source, position // n, position % n)

In a source of n windows, position p lies in epoch p // n at offset p % n. The order maps the offset to a
window, and an excluded window is replaced. Windows are numbered through all shards of all sources.
Only a block of the mixture is stored, so step 10^8 costs what step 0 costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Int64Array, Pieces, UInt64Array
from corpus_server.plan.dealing import DealtSteps
from corpus_server.plan.document import Plan
from corpus_server.plan.exclusion import Exclusion, Replacing
from corpus_server.plan.laid import Laid
from corpus_server.plan.left_out import LeftOut
from corpus_server.plan.mixture import BLOCK_ROWS, grouped
from corpus_server.plan.numbers import BatchRows, Epochs, Positions, RowNumbers, SourceNumbers
from corpus_server.plan.orders import Order
from corpus_server.plan.origins import Origins, Source
from corpus_server.plan.permutation import MAX_SIZE
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows.rows import Rows, Sources
from corpus_server.plan.tables import Table
from corpus_server.plan.timeline import PlacedStage, Timeline
from corpus_server.plan.windows import Windows
from corpus_server.work import Budget

VIEW_COST = 32
"""What a piece of a view costs, in pieces of a corpus."""


class _Chosen(NamedTuple):
    """Rows of one stage: number and epoch of each, and what the stage excludes."""

    placed: PlacedStage
    laid: Laid
    sources: SourceNumbers
    rows: RowNumbers
    epochs: Epochs
    exclusion: Replacing | None


class Sampler:
    """A plan bound to the shapes of its corpora: the token counts of each source's shards.

    Args:
        shard_tokens: by source; not needed with `windows`.
        tables: of the rows or the order, if they follow from some; those of each of `plan.row_lengths`.
        windows: those of the sources, made for another plan with the same sources, `seq_len` and `stride`.
        origins: of the sources, if some are views; then shards are numbered as those of their corpora.
        contents: of each source, the fingerprint of the corpus that holds its tokens; by default its name.
        parent: of a plan that this one continues; what follows from the sources alone is shared.
        corpora: the sources, which know their documents; only a member of a family needs them.
        values: of each source, what stands for its documents in a family with `by`, see `LeftOut`.

    Attributes:
        timeline: steps, stages, positions.
        windows: of all shards of all sources, in the order of `plan.sources`.
        laid: rows and order over the sources, for each of `plan.row_lengths`.
        rows, order: of the plan's `seq_len`, the first of `laid`.
        is_window: whether each row is one piece of a shard.
        num_windows: `(sources,) uint64`, rows of an epoch of each source.
        exclusions, left_out: of the first of `laid`.
        num_steps, check_part: see `Timeline`.

    Raises:
        InvalidPlan: a source has no row, all that its rows hold is excluded, an exclusion reaches beyond its
            end, or the corpora hold more than `MAX_SIZE` tokens together.
    """

    def __init__(
        self,
        plan: Plan,
        shard_tokens: Mapping[str, Sequence[int]] | None = None,
        *,
        tables: Sequence[Table] = (),
        windows: Windows | None = None,
        origins: Origins | None = None,
        contents: tuple[str, ...] | None = None,
        parent: Sampler | None = None,
        corpora: Sequence[Source] = (),
        values: Sequence[UInt64Array] = (),
    ) -> None:
        assert plan.stride is not None  # set by Plan itself
        self.plan = plan
        self.rows: Rows
        self.order: Order
        if parent is not None and parent.plan.sources != plan.sources:
            parent = None
        if windows is None:
            shapes = [(shard_tokens or {})[name] for name in plan.sources]
            windows = Windows(shapes, seq_len=plan.seq_len, stride=plan.stride)
        self.windows = windows
        if int(windows.first_token[-1]) > MAX_SIZE:
            raise InvalidPlan(f"the plan's corpora hold more than {MAX_SIZE} tokens together")
        self.origins = origins
        self.contents = contents or plan.sources
        self.laid = [
            self._laid_over(number, seq_len, tables, parent, corpora, values)
            for number, seq_len in enumerate(plan.row_lengths)
        ]
        self._by_length = {laid.seq_len: laid for laid in self.laid}
        first = self.laid[0]
        self.rows, self.order = first.rows, first.order
        self.exclusions, self.left_out = first.exclusions, first.left_out
        self.is_window = self.rows.is_window and origins is None
        used = self.order.num_used
        self.timeline = Timeline(plan, self.order.chooser, None if used is None else int(used.sum()))
        self.num_windows = self.rows.epoch_rows
        self.num_steps, self.check_part = self.timeline.num_steps, self.timeline.check_part
        self._dealt = DealtSteps()

    def _laid_over(
        self,
        number: int,
        seq_len: int,
        tables: Sequence[Table],
        parent: Sampler | None,
        corpora: Sequence[Source],
        values: Sequence[UInt64Array],
    ) -> Laid:
        """Return the rows of one of the plan's lengths over its sources."""
        plan, of_parent = self.plan, None
        if parent is not None:
            of_parent = next((each for each in parent.laid if each.seq_len == seq_len), None)
        if of_parent is not None:
            rows, order = of_parent.rows, of_parent.order
        else:
            its = len(tables) // len(plan.row_lengths)
            own = tables[number * its : (number + 1) * its]
            num_parts = plan.seq_len // seq_len
            rows, order = plan.order.of_parts(num_parts).over(
                plan.rows.over(Sources(plan.sources, self.windows, plan.seed, own))
            )
        since = 0 if of_parent is None or parent is None else len(parent.plan.stages)
        return Laid(
            seq_len=seq_len,
            num_parts=plan.seq_len // seq_len,
            rows=rows,
            order=order,
            exclusions=self._exclusions(
                seq_len, rows, order, [] if of_parent is None else of_parent.exclusions, since
            ),
            left_out=None if plan.family is None else LeftOut(plan.family, rows, order, corpora, values),
            num_stages=len(plan.stages),
        )

    def laid_of(self, seq_len: int) -> Laid:
        """Return the rows of a stage with this `seq_len`; it may read them in parts."""
        return self._by_length.get(seq_len, self.laid[0])

    def has_at(self, laid: Laid, source: int, positions: Positions) -> NDArray[np.bool_]:
        """Return at which positions of a source, those of the timeline, the stage has rows of this length."""
        if len(self.laid) == 1:
            return np.ones(positions.shape, dtype=bool)
        numbers = self.timeline.stage_numbers(source, positions)
        found: NDArray[np.bool_] = self.timeline.seq_lens[numbers] == laid.seq_len
        return found

    @property
    def row_cost(self) -> int:
        """What computing a row costs a budget, in windows: its pieces, and those of a view are looked for."""
        its = max(each.rows.row_pieces for each in self.laid) * (1 if self.origins is None else VIEW_COST)
        return its if self.left_out is None else its * self.left_out.cost

    @property
    def num_bytes(self) -> int:
        """Memory of the plan and of what follows from it, without small objects and what plans share."""
        rows = sum(each.rows.num_bytes for each in self.laid)
        return len(self.plan.canonical_json) + rows + self.plan.skip_steps.num_bytes

    def steps_per_epoch(self, name: str) -> float | None:
        """Return how many steps an epoch of a source takes at the rate of the last stage that uses it.

        None, if the order has no epochs.
        """
        if not self.plan.order.has_epochs:
            return None
        source = self.plan.sources.index(name)
        last = int(np.flatnonzero(self.timeline.uses(source))[-1])
        step_windows = self.timeline.sizes[last] * self.timeline.seq_lens[last] / self.plan.seq_len
        share = int(self.plan.log.units[last, source]) / BLOCK_ROWS
        return float(self.num_windows[source] / (step_windows * share))

    def seq_len(self, step: int) -> int:
        """Return the inputs of a training step's rows."""
        return self.timeline.stage_of(step).seq_len

    def locate(self, step: int, *, count: int = 1, rank: int = 0, world_size: int = 1) -> Int64Array:
        """Return where the windows of a rank slice, checked by `check_part`, of consecutive steps lie.

        `(count, rows, 2) int64`: shard number over the plan's shard list, start token in the shard.
        """
        rows = self.check_part(step, count=count, rank=rank, world_size=world_size)
        pieces = self.pieces(step, range(rank * rows, (rank + 1) * rows), count=count)
        return pieces.places[:, :2].reshape(count, rows, 2)

    def row_numbers(self, step: int, places: range, *, count: int = 1, world_size: int = 1) -> BatchRows:
        """Return the rows of the global batch at places, the same places of each of some steps.

        Rank k has the places [k * rows, (k + 1) * rows). The row at a place has the place's number, unless
        the plan balances ranks.

        Returns:
            `(count, len(places))`, or `(1, len(places))` if they are the same in all steps.
        """
        if world_size == 1 or not self.plan.rows.balance_ranks:
            return np.arange(places.start, places.stop, dtype=np.uint64)[None]
        return np.stack(
            [
                self._dealt.rows(each, world_size, partial(self._costs, each))[places.start : places.stop]
                for each in range(step, step + count)
            ]
        )

    def num_located(self, rows: int, world_size: int) -> int:
        """Return how many rows of a step are looked at to find the `rows` of a rank."""
        return rows * world_size if self.plan.rows.balance_ranks else rows

    def pieces(self, step: int, places: range, *, count: int = 1, world_size: int = 1) -> Pieces:
        """Return what rows of the global batch are made of, at the same places of each of some steps.

        Args:
            places: rows of the global batch, unless `world_size` is given; see `row_numbers`.

        In most plans each row is one piece, its window.
        """
        found = []
        for placed, laid, sources, rows, epochs, exclusion in self._rows(step, places, count, world_size):
            pieces = laid.rows.pieces(sources, rows, epochs, exclusion)
            if laid.seq_len != placed.seq_len:  # so each row is a part of a window
                parts = np.arange(places.start, places.stop) % placed.num_parts
                pieces.places[:, 1] += np.resize(parts * placed.seq_len, len(pieces.places))
                pieces.places[:, 2] = placed.seq_len + 1
            found.append(pieces)
        return self.resolved(Pieces.joined(found))

    def shards(
        self, step: int, places: range, *, count: int = 1
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which shards rows of the global batch read, the same rows of each of some steps.

        `(m,)` each, by row: the row, numbered through the steps, and a shard of it, each pair once.
        """
        pairs, first = [], 0
        for _, laid, sources, rows, epochs, exclusion in self._rows(step, places, count):
            shards, which = laid.rows.shards(sources, rows, epochs, exclusion)
            pairs.append((which + first, shards))
            first += rows.size
        return tuple(map(np.concatenate, zip(*pairs, strict=True)))  # type: ignore[return-value]

    def resolved(self, pieces: Pieces) -> Pieces:
        """Return rows of pieces of the sources as pieces of shards, which they are unless of a view."""
        return pieces if self.origins is None else self.origins.resolve(pieces)

    def reach(self, source: int, num_groups: int) -> int:
        """Return about how many tokens of its corpus so many groups of a source lie among, at most."""
        own = self.windows.num_tokens(source)
        most = max(
            its.rows.reach(
                source, min(num_groups * its.order.largest_group(source), int(its.rows.num_rows[source]))
            )
            for its in self.laid
        )
        return -(-most * max(own, self.base_tokens(source)) // own)

    def own_ranges(self, source: int, given: Ranges) -> Ranges:
        """Return the tokens of a source that are those of ranges of its corpus: the same unless of a view."""
        return given if self.origins is None else self.origins.ranges(source, given)

    def base_tokens(self, source: int) -> int:
        """Return how many tokens the corpus of a source has."""
        own = self.windows.num_tokens(source)
        return own if self.origins is None else self.origins.num_tokens[source]

    def pieces_at(self, source: int, positions: Positions, parts: Int64Array) -> Pieces:
        """Return what the rows at ascending positions of a source are made of, as the stages exclude.

        Of windows that a stage reads in parts, whole ones. Shards and tokens are those of the sources, see
        `resolved`.

        Args:
            parts: of rows that have several lengths, which row of each position; see `Laid`.
        """
        found = []
        for number, which in grouped(self.timeline.stage_numbers(source, positions)):
            laid = self.laid_of(int(self.timeline.seq_lens[number]))
            rows, epochs = laid.rows_at(source, laid.positions(positions[which], parts[which]))
            found.append(laid.rows.pieces(source, rows, epochs, laid.exclusion_at(number)))
        return Pieces.joined(found)

    def group_numbers(self, step: int) -> dict[int, int]:
        """Return the group of a bounded shuffle that each source of a training step's stage has reached.

        By source, and of stages of another length by a number of their own; the next group has the next
        number.
        """
        plan_step = self.timeline.plan_step(step)
        positions, _ = self.timeline.given_before(plan_step)
        placed = self.timeline.stage_at(plan_step)
        laid = self.laid_of(placed.seq_len)
        first = self.laid.index(laid) * len(self.plan.sources)
        return {
            first + source: laid.order.group_at(source, int(positions[source]) * laid.num_parts)
            for source in placed.sources.tolist()
        }

    def group_extents(self, source: int, number: int) -> list[tuple[int, int, int]]:
        """Return where a group lies, block by block: shard number, tokens [start, stop) in it.

        Args:
            source, number: of a group, as `group_numbers` numbers them.
        """
        which, source = divmod(source, len(self.plan.sources))
        rows, order = self.laid[which].rows, self.laid[which].order
        ranges = (order.group_rows(source, number) + rows.first_row[source]).tolist()
        # Neighbouring rows may lie in one block of documents.
        found = dict.fromkeys(each for start, stop in ranges for each in rows.extents(start, stop))
        if self.origins is None or not found:
            return list(found)
        shards, starts, stops = np.array(list(found), dtype=np.int64).T
        extents = self.origins.extents(np.stack((shards, starts, stops - starts), axis=1))
        return list(zip(shards.tolist(), *extents.T.tolist(), strict=True))

    def _rows(self, step: int, places: range, count: int, world_size: int = 1) -> list[_Chosen]:
        """Return the rows at the same places of some steps, those of each stage together."""
        plan_steps = self.timeline.plan_steps(np.arange(step, step + count, dtype=np.uint64))
        every, chosen, at = self.row_numbers(step, places, count=count, world_size=world_size), [], 0
        for placed, stage_steps in self.timeline.by_stage(plan_steps):
            within = every if len(every) == 1 else every[at : at + stage_steps.size]
            at += stage_steps.size
            first = (stage_steps - np.uint64(placed.from_step)) * np.uint64(placed.step_windows)
            windows = within if placed.num_parts == 1 else within // np.uint64(placed.num_parts)
            members, given = placed.mixture.place((first[:, None] + windows).reshape(-1))
            source = int(placed.sources[members]) if isinstance(members, int) else placed.sources[members]
            laid, positions = self.laid_of(placed.seq_len), given + placed.positions[source]
            if laid.num_parts > 1:
                parts = np.broadcast_to(within % np.uint64(laid.num_parts), (stage_steps.size, len(places)))
                positions = laid.positions(positions, parts.reshape(-1))
            rows, epochs = laid.rows_at(source, positions)
            chosen.append(_Chosen(placed, laid, source, rows, epochs, laid.exclusion_at(placed.number)))
        return chosen

    def _costs(self, step: int) -> Int64Array:
        """Return the costs of the rows of a step's global batch, see `Rows.costs`."""
        size = self.timeline.stage_of(step).global_batch_size
        (chosen,) = self._rows(step, range(size), 1)
        return chosen.laid.rows.costs(chosen.sources, chosen.rows)

    def _exclusions(
        self, seq_len: int, rows: Rows, order: Order, known: Sequence[tuple[range, Exclusion]], since: int
    ) -> list[tuple[range, Exclusion]]:
        """Return what is excluded of the rows of a length, with the stages in which it is.

        Args:
            known: of the stages before `since`, which a plan that this one continues has.
        """
        log, num_stages = self.plan.log, len(self.plan.stages)
        found = [(its.start, exclusion) for its, exclusion in known]
        beside = order.beside if order.has_groups else None
        numbers = {name: number for number, name in enumerate(self.plan.sources)}
        for first in sorted(number for number in tuple(log.exclude) if since <= number < num_stages):
            touching = []
            for name, ranges in log.exclude[first].items():
                source = numbers[name]
                if (last := int(ranges.stops[-1])) > (most := self.base_tokens(source)):
                    raise InvalidPlan(
                        f"stages[].exclude.{name} reaches to token {last}, the corpus has {most}",
                        parameter=f"stages[].exclude.{name}",
                        received=last,
                        accepted=f"at most {most}",
                    )
                if (own := self.own_ranges(source, ranges)).total:
                    touching.append(rows.within(source, own, Budget()))
            before = found[-1][1].units if found else Ranges()
            if touching and (units := before.union(Ranges(np.concatenate(touching)))):
                found.append((first, rows.exclusion(units, beside)))
        borders = pairwise([*(first for first, _ in found), num_stages])
        exclusions = [(range(*its), exclusion) for its, (_, exclusion) in zip(borders, found, strict=True)]
        for stages, exclusion in exclusions:
            emptied = np.flatnonzero(exclusion.num_left == 0)
            its = np.arange(max(stages.start, since), stages.stop)
            its = its[(log.seq_lens[its] == seq_len) | (not rows.own_lengths)]
            used = log.units[np.ix_(its, emptied)].any(axis=0)
            for source in emptied[used].tolist():
                name = self.plan.sources[source]
                raise InvalidPlan(
                    f"exclude leaves none of the {int(exclusion.num_excluded[source])} "
                    f"{rows.unit}s of {name!r}; leave the source out of the mixture instead",
                    parameter=f"stages[].exclude.{name}",
                )
        return exclusions
