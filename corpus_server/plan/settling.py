"""What a draft comes to over its corpora: a plan of plain stages.

A stage ends before the step that would pass what it says. Where weights in units of 1/65536 would miss an
amount by more than `_CLOSE_ROWS`, the stage becomes several, in which a source has one of the two numbers of
units next to its share:

    share of the source     1.25 units
    stages                  2 units for a quarter of the steps, 1 unit for the others

So a source gets what it should to within its rows of one step, `_STAGE_ROWS` for each of these stages, and
`_CLOSE_ROWS` if there is only one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise, zip_longest
from math import floor
from typing import Any, Final, NamedTuple

import numpy as np

from corpus_server.errors import InvalidPlan
from corpus_server.plan.document import MAX_STAGES, Plan
from corpus_server.plan.draft import Draft, DraftStage, Until
from corpus_server.plan.mixture import BLOCK_ROWS, Mixture, quantise
from corpus_server.plan.orders import ORDERS
from corpus_server.plan.permutation import stream_key
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.stage import MAX_GLOBAL_BATCH_SIZE, MAX_STEP, Stage
from corpus_server.plan.stratified import MIXTURES

_STAGE_ROWS: Final = 4
"""By which version 2 of the arithmetic may miss a share at the end of a stage, see docs/arithmetic.md."""
_CLOSE_ROWS: Final = 4
_MAX_PARTS: Final = 64
"""Stages that one may become. With more sources, each misses its amount by at most 1/64 of a unit."""
_MAX_POSITION: Final = MAX_STEP * MAX_GLOBAL_BATCH_SIZE


class Settled(NamedTuple):
    """The plan of a draft, and the step at which its run ends, if that follows from the draft."""

    plan: Plan
    num_steps: int | None


def settle(draft: Draft, bind: Callable[[Plan], Sampler]) -> Settled:
    """Return the plan that a draft comes to.

    Args:
        bind: lays a plan over its corpora, or refuses it.

    Raises:
        InvalidPlan: it comes to none, or passes `max_epochs`.
    """
    return _Settling(draft, bind).settled()


class _Made(NamedTuple):
    """A stage of the plan; what each source has given before it."""

    stage: Stage
    step_rows: int
    mixture: Mixture
    given: Counter[str]


class _Settling:
    """A draft over its corpora, on its way to a plan: the stages made so far, and where the last one ends."""

    def __init__(self, draft: Draft, bind: Callable[[Plan], Sampler]) -> None:
        self._draft, stages = draft, draft.stages
        if not stages:
            raise InvalidPlan.expected("stages", "a list of at least one stage", [])
        others = dict(draft.others)
        if skipped := others.get("skip_steps"):
            accepted = "left out where stages say epochs, tokens or until"
            remedy = "post the plan without them, and add them to the document that comes back"
            raise InvalidPlan.expected("skip_steps", accepted, skipped, remedy=remedy)
        order = ORDERS.kind.take("order", others.get("order", ORDERS.default))
        if order.digests_field:
            accepted = f"mixture alone with order {order.name}, which chooses the sources of all rows itself"
            raise InvalidPlan.expected("stages", accepted, "epochs, tokens or until")
        self._has_epochs = order.has_epochs
        is_mixed = any(len(stage.sources) > 1 for stage in stages)
        if others.get("version") is None:
            others["version"] = 2 if is_mixed else 1
        self._others = others
        if is_mixed and self._others["version"] == 1:
            accepted = "2, or left out, where stages of several corpora say epochs, tokens or until"
            raise InvalidPlan.expected("version", accepted, 1)
        every = dict.fromkeys(sorted({name for stage in stages for name in stage.sources}), 1)
        probe = Plan.from_json({**self._others, "stages": [{"global_batch_size": 1, "mixture": every}]})
        self._plan_fields = probe
        shapes = [
            Stage(global_batch_size=each.global_batch_size, seq_len=each.seq_len, mixture={"any": 1})
            for each in stages
        ]
        parts = [probe.seq_len // (each.seq_len or probe.seq_len) for each in probe.checked_parts(shapes)]
        self._step_rows = [stage.global_batch_size // num for stage, num in zip(stages, parts, strict=True)]
        probe.rows.check(seq_len=probe.seq_len, stride=probe.stride, stages=shapes)
        lengths = probe.lengths_with((), shapes)
        its_stages = [
            Stage(from_step=number, global_batch_size=probe.seq_len // each, seq_len=each, mixture=every)
            for number, each in enumerate(lengths)
        ]
        sampler = bind(probe.changed(stages=its_stages))
        # Of an epoch, in rows of the plan's `seq_len`: rows of another length stand for a part of one each.
        self._epoch_rows_of = {
            (name, laid.seq_len): Fraction(num_rows, laid.num_parts)
            for laid in sampler.laid
            for name, num_rows in zip(probe.sources, laid.rows.epoch_rows.tolist(), strict=True)
        }
        self._made: list[_Made] = []
        self._end: int | None = 0

    def settled(self) -> Settled:
        """Return the plan, after all checks."""
        for number, stage in enumerate(self._draft.stages):
            self._add(number, stage, self._begin(number, stage))
        num_steps, end = self._draft.num_steps, self._end
        if num_steps is not None and end is not None and num_steps > end:
            accepted = f"at most {end}, where the last stage ends, or left out"
            raise InvalidPlan.expected("num_steps", accepted, num_steps)
        plan = Plan.from_json({**self._others, "stages": [each.stage for each in self._made]})
        settled = Settled(plan, end if num_steps is None else num_steps)
        self._check_max_epochs(settled)
        return settled

    def _begin(self, number: int, stage: DraftStage) -> int:
        """Return the step at which a stage begins."""
        what = f"stages[{number}].from_step"
        if self._end is None:
            if stage.from_step is None:
                raise InvalidPlan(
                    f"{what} is missing: the stage before has weights alone, and does not say where it ends",
                    parameter=what,
                    remedy="give from_step, or until in the stage before",
                )
            return stage.from_step
        if stage.from_step not in (None, self._end):
            accepted = f"left out, or {self._end}, " + (
                "where the stage before ends" if number else "in the first"
            )
            raise InvalidPlan.expected(what, accepted, stage.from_step)
        return self._end

    def _add(self, number: int, stage: DraftStage, begin: int) -> None:
        """Make the stages that one of the draft becomes."""
        step_rows = self._step_rows[number]
        if stage.mixture:
            parts, end = [(begin, stage.mixture)], None
        else:
            wanted = self._wanted(number, stage)
            num_steps = floor(sum(wanted.values()) / step_rows)
            self._check_steps(number, num_steps, f"{_shown(sum(wanted.values()))} rows", step_rows)
            end = begin + num_steps
            parts = [(begin + start, mixture) for start, mixture in _weights(wanted, num_steps, step_rows)]
            self._check_shares(number, wanted, parts)
        before = len(self._made)
        if before + len(parts) > MAX_STAGES:  # before thousands of them are made
            raise InvalidPlan(
                f"stages[{number}]: epochs and tokens up to here come to {before + len(parts)} stages, and a "
                f"plan may have {MAX_STAGES}",
                parameter="stages",
                remedy="say mixture where shares need not be exact, or join stages",
            )
        common: Any = {"global_batch_size": stage.global_batch_size, "seq_len": stage.seq_len}
        for start, mixture in parts:
            exclude = stage.exclude if start == begin else {}
            made = Stage(from_step=start, mixture=mixture, exclude=exclude, **common)
            self._made.append(_Made(made, step_rows, self._mixture(made), self._given(start)))
        if stage.until is not None:
            ends = [*self._ends(number, stage, stage.until, begin), *([] if end is None else [end])]
            if ends:
                end = min(ends)
                self._made[before:] = [each for each in self._made[before:] if each.stage.from_step < end]
        if end is not None and end > MAX_STEP:
            raise InvalidPlan.expected(f"stages[{number}]", f"such that it ends by step {MAX_STEP}", end)
        self._end = end

    def _wanted(self, number: int, stage: DraftStage) -> dict[str, Fraction]:
        """Return the rows of each source that a stage asks for."""
        wanted = {}
        for word, per in (("epochs", None), ("tokens", Fraction(1, self._plan_fields.seq_len))):
            for name, amount in (getattr(stage, word) or {}).items():
                what = f"stages[{number}].epochs"
                rows = amount * (self._epoch_rows(what, name, stage.seq_len) if per is None else per)
                if rows < 1:
                    accepted = f"at least one row of {self._plan_fields.seq_len} tokens"
                    raise InvalidPlan.expected(f"stages[{number}].{word}.{name}", accepted, float(amount))
                wanted[name] = rows
        return dict(sorted(wanted.items()))

    def _epoch_rows(self, what: str, name: str, seq_len: int | None) -> Fraction:
        """Return the rows of an epoch in a stage of some `seq_len`, counted as rows of the plan's."""
        if not self._has_epochs:
            raise InvalidPlan(
                f"{what} needs an order that has epochs, and {self._plan_fields.order.name!r} has none",
                parameter=what,
                remedy="say tokens, or choose another order",
            )
        plan_length = self._plan_fields.seq_len
        found = self._epoch_rows_of.get((name, seq_len or plan_length))
        return self._epoch_rows_of[name, plan_length] if found is None else found

    def _rows_before(self, what: str, name: str, epochs: Fraction) -> Fraction:
        """Return how many rows of a source so many epochs are, counted in each stage by its own length."""
        left = epochs
        for made, after in zip_longest(self._made, self._made[1:]):
            per, given = self._epoch_rows(what, name, made.stage.seq_len), made.given[name]
            if after is None or after.given[name] - given > left * per:
                break
            left -= (after.given[name] - given) / per
        return given + left * per

    def _epochs_before(self, name: str, step: int) -> Fraction:
        """Return how often a source was shown before a step: the inverse of `_rows_before`."""
        found, total = Fraction(0), self._given(step)[name]
        for made, after in zip_longest(self._made, self._made[1:]):
            stop = total if after is None else min(total, after.given[name])
            if (rows := stop - made.given[name]) > 0:
                found += rows / self._epoch_rows("max_epochs", name, made.stage.seq_len)
        return found

    def _ends(self, number: int, stage: DraftStage, until: Until, begin: int) -> Iterator[int]:
        """Yield the steps before which a stage must end."""
        what = f"stages[{number}].until"
        tokens = until.tokens if isinstance(until.tokens, Mapping) else {}
        per_row = Fraction(1, self._plan_fields.seq_len)
        rows: dict[tuple[str, str], Fraction] = {}
        for word, amounts_of in (("tokens", tokens), ("epochs", until.epochs or {})):
            if strangers := sorted(set(amounts_of) - set(stage.sources)):
                accepted = f"corpora that the stage shows: {', '.join(stage.sources)}"
                raise InvalidPlan.expected(f"{what}.{word}", accepted, ", ".join(strangers))
            for name, amount in amounts_of.items():
                rows[word, name] = (
                    amount * per_row
                    if word == "tokens"
                    else self._rows_before(f"{what}.epochs", name, amount)
                )
        for (word, name), amount in rows.items():
            if amount >= _MAX_POSITION:
                raise InvalidPlan.expected(f"{what}.{word}.{name}", "reached by a run", float(amount))
            # None: the stage ends by its own amounts before, and shows this source in a part of it alone.
            if (step := self._step_of(name, floor(amount))) is not None:
                self._check_until(f"{what}.{word}.{name}", step, begin)
                yield step
        if isinstance(until.tokens, Fraction):
            given = sum(self._given(begin).values())
            left = floor((until.tokens * per_row - given) / self._step_rows[number])
            self._check_until(f"{what}.tokens", begin + left, begin)
            yield begin + left

    def _check_shares(
        self, number: int, wanted: Mapping[str, Fraction], parts: Sequence[tuple[int, Mapping[str, float]]]
    ) -> None:
        """Refuse a source that the stages leave out, because its share is too small."""
        if left_out := sorted(set(wanted).difference(*(mixture for _, mixture in parts))):
            name, total = left_out[0], sum(wanted.values())
            raise InvalidPlan(
                f"stages[{number}]: {name!r} asks for {_shown(wanted[name])} of {_shown(total)} rows, too "
                "small a share for a stage",
                parameter=f"stages[{number}]",
                remedy="ask for more of it, or show it in a stage of its own",
            )

    def _check_steps(self, number: int, num_steps: int, what: str, step_rows: int) -> None:
        if num_steps < 1:
            raise InvalidPlan(
                f"stages[{number}] would have no step: it asks for {what}, and a step has {step_rows}",
                parameter=f"stages[{number}]",
                remedy="ask for more, or for a smaller global_batch_size",
            )

    def _check_until(self, what: str, end: int, begin: int) -> None:
        if end <= begin:
            raise InvalidPlan(
                f"{what} is passed in step {max(end, 0)}, and its stage begins at step {begin}, so that it "
                "would have no step",
                parameter=what,
                remedy="until counts from the start of the run: raise it, or leave the stage out",
            )

    def _mixture(self, stage: Stage) -> Mixture:
        version, seed = self._others["version"], self._plan_fields.seed
        return MIXTURES[version](stage.units, stream_key("mixture", seed, str(len(self._made))))

    def _given(self, step: int) -> Counter[str]:
        """Return the rows that each source gives before a step, by the stages made so far."""
        last = next((each for each in reversed(self._made) if each.stage.from_step <= step), None)
        if last is None:
            return Counter()
        num_rows = np.array([(step - last.stage.from_step) * last.step_rows], dtype=np.uint64)
        counts = last.mixture.count(num_rows).tolist()
        return last.given + Counter(dict(zip(last.mixture.names, counts, strict=True)))

    def _step_of(self, name: str, row: int) -> int | None:
        """Return the step that shows a row of a source, numbered through its epochs, if one does."""
        made = next(each for each in reversed(self._made) if each.given[name] <= row)
        if name not in made.mixture.names:
            return None  # it is the last that shows the source, or a later one would have given more
        number = np.array([row - made.given[name]], dtype=np.uint64)
        at = int(made.mixture.find(made.mixture.names.index(name), number)[0])
        return made.stage.from_step + at // made.step_rows

    def _check_max_epochs(self, settled: Settled) -> None:
        """Refuse a plan that shows a source more often than it may.

        By how much a mixture may miss its shares is no excess.
        """
        most = self._draft.max_epochs
        if most is None:
            return
        sources = settled.plan.sources
        each = most if isinstance(most, Mapping) else dict.fromkeys(sources, most)
        if strangers := sorted(set(each) - set(sources)):
            accepted = f"sources of the plan: {', '.join(sources)}"
            raise InvalidPlan.expected("max_epochs", accepted, ", ".join(strangers))
        for name, epochs in each.items():
            mixed = sum(name in stage.mixture and len(stage.mixture) > 1 for stage in settled.plan.stages)
            most_rows = floor(self._rows_before("max_epochs", name, epochs)) + _STAGE_ROWS * mixed
            step = None if most_rows >= _MAX_POSITION else self._step_of(name, most_rows)
            if step is None or (settled.num_steps is not None and step >= settled.num_steps):
                continue
            if settled.num_steps is None:
                ends, remedy = "has no end", f"say num_steps, at most {step}; or where the last stage ends"
            else:
                shown = _shown(self._epochs_before(name, settled.num_steps), digits=6)
                ends = f"shows {name!r} {shown} times in {settled.num_steps} steps"
                remedy = f"end the run at step {step}, give {name!r} less, or raise max_epochs"
            raise InvalidPlan(
                f"max_epochs: {name!r} may be seen {_shown(epochs)} times, which step {step} passes; the "
                f"plan {ends}",
                parameter=f"max_epochs.{name}",
                received=float(epochs),
                remedy=remedy,
            )


def _weights(
    wanted: Mapping[str, Fraction], num_steps: int, step_rows: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield stages of some steps that together give sources what is wanted, in proportion.

    Each as its first step and its weights, in units of 1/65536.
    """
    total, names = sum(wanted.values()), list(wanted)
    shares = [rows * BLOCK_ROWS / total for rows in wanted.values()]
    if min(shares) >= 1:
        units = quantise(wanted)
        rows = num_steps * step_rows
        if all(
            abs(units[name] - share) * rows <= _CLOSE_ROWS * BLOCK_ROWS
            for name, share in zip(names, shares, strict=True)
        ):
            yield 0, {name: its / BLOCK_ROWS for name, its in units.items()}
            return
    # Systematic rounding. Shares laid end to end are ranges of a line; for any u in [0, 1) a source gets as
    # many units as its range has points u, u + 1, ...: 65,536 in all. Over all u that is its share.
    ends = [Fraction(0)]
    for share in shares:
        ends.append(ends[-1] + share)
    borders = sorted({end % 1 for end in ends})
    if len(borders) > _MAX_PARTS:
        borders = [Fraction(part, _MAX_PARTS) for part in range(_MAX_PARTS)]
    steps = [round(num_steps * border) for border in borders]
    for border, (start, stop) in zip(borders, pairwise([*steps, num_steps]), strict=True):
        if start < stop:
            points = [-floor(border - end) for end in ends]
            units = {name: high - low for name, (low, high) in zip(names, pairwise(points), strict=True)}
            yield start, {name: its / BLOCK_ROWS for name, its in units.items() if its}


def _shown(number: Fraction | int, *, digits: int = 12) -> str:
    return f"{float(number):.{digits}g}"
