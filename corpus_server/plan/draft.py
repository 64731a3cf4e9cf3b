"""Plans as people think of them: stages that say epochs or tokens, and where they end.

    posted     {"global_batch_size": 512, "epochs": {"web": 1, "code": 2}}
               {"global_batch_size": 512, "mixture": {"web": 1}, "until": {"tokens": 2e12}}
    the plan   {"from_step": 0,     "global_batch_size": 512, "mixture": {"web": 0.8, "code": 0.2}}
               {"from_step": 48828, "global_batch_size": 512, "mixture": {"web": 1.0}}

A *draft* becomes a plan of plain stages over the corpora of a server: what epochs and tokens come to depends
on how many rows a corpus has. The plan alone is kept and has an id, so nothing else has to know drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from fractions import Fraction
from typing import Any, Final, Self

from corpus_server.errors import InvalidPlan
from corpus_server.plan.amounts import amounts, exact
from corpus_server.plan.declared import Declared, Kind, declared, integer, shorten
from corpus_server.plan.document import MAX_STAGES, Plan, stages_of
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.stage import EXCLUDE, MAX_GLOBAL_BATCH_SIZE, MAX_SEQ_LEN, MAX_STEP, MIXTURE, Stage

_EPOCHS: Final = amounts(has_groups=False)
_TOKENS: Final = amounts(has_groups=True)


def _all_or_each(what: str, value: Any) -> Fraction | dict[str, Fraction]:
    found: dict[str, Fraction] | Fraction
    found = _EPOCHS.take(what, value) if isinstance(value, Mapping) else exact(what, value)
    return found


_ALL_OR_EACH: Final = Kind(
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _EPOCHS.schema]}, _all_or_each
)


class Until(Declared):
    """Where a stage ends, if it does not end before."""

    prefix = "stages[].until."

    epochs: Mapping[str, Fraction] | None = declared(
        _EPOCHS, "By corpus, how often the run may have seen it.", default=None
    )
    tokens: Fraction | Mapping[str, Fraction] | None = declared(
        _ALL_OR_EACH, "How many tokens the run may have seen, of all corpora or of each.", default=None
    )

    def settled(self) -> dict[str, Any]:
        """See `Declared.settled`."""
        if self.epochs is None is self.tokens:
            accepted = 'an object with epochs or tokens, like {"epochs": {"web": 2}} or {"tokens": 1e12}'
            raise InvalidPlan.expected("stages[].until", accepted, {})
        return {}


_UNTIL: Final = Kind(Until.schema(), lambda what, value: Until.from_json(value, what=what))


class DraftStage(Declared):
    """A stage of a draft: its sources by weights, epochs or tokens."""

    prefix = "stages[]."
    elsewhere = Stage.elsewhere

    from_step: int | None = declared(
        integer(0, MAX_STEP), "Left out behind a stage that ends by itself.", default=None
    )
    global_batch_size: int = declared(integer(1, MAX_GLOBAL_BATCH_SIZE), "Rows of a step over all ranks.")
    mixture: Mapping[str, float] | None = declared(
        MIXTURE, "Weight by corpus name, or by group.", default=None
    )
    epochs: Mapping[str, Fraction] | None = declared(
        _EPOCHS, "By corpus, how often the stage shows it; the stage ends then.", default=None
    )
    tokens: Mapping[str, Fraction] | None = declared(
        _TOKENS, "By corpus or group, how many inputs the stage shows of it.", default=None
    )
    until: Until | None = declared(_UNTIL, "Where the stage ends, if not before.", default=None)
    seq_len: int | None = declared(integer(1, MAX_SEQ_LEN), "See a plan's stage.", default=None)
    exclude: Mapping[str, Ranges] = declared(EXCLUDE, "See a plan's stage.", default_factory=dict)

    def settled(self) -> dict[str, Any]:
        """See `Declared.settled`."""
        if bool(self.mixture) == bool(self.epochs or self.tokens):
            given = [name for name in ("mixture", "epochs", "tokens") if getattr(self, name)]
            raise InvalidPlan(
                "stages[] must say either mixture (weights) or epochs and tokens of its corpora, got "
                f"{' and '.join(given) or 'none'}",
                parameter="stages[]",
                accepted="mixture, or epochs, or tokens, or epochs of some corpora and tokens of others",
            )
        if twice := sorted(set(self.epochs or ()) & set(self.tokens or ())):
            raise InvalidPlan(
                f"stages[] says both epochs and tokens of {shorten(twice)}; say one of them",
                parameter="stages[].tokens",
            )
        return {}

    @property
    def sources(self) -> tuple[str, ...]:
        """The corpora that it shows, by name."""
        return tuple(sorted({*(self.mixture or ()), *(self.epochs or ()), *(self.tokens or ())}))


_STAGES: Final = Kind(
    {"type": "array", "minItems": 1, "maxItems": MAX_STAGES, "items": DraftStage.schema()},
    lambda what, value: stages_of(DraftStage, what, value),
)


class Draft(Declared):
    """A plan whose stages may say epochs and tokens, with checks of what it comes to.

    Args:
        others: the fields of the plan besides its stages.
    """

    prefix = ""

    stages: Sequence[DraftStage] = declared(_STAGES, "Those of a plan, and stages in epochs and tokens.")
    max_epochs: Fraction | Mapping[str, Fraction] | None = declared(
        _ALL_OR_EACH,
        "How often the run may see each corpus, or some by name; else it is refused.",
        default=None,
    )
    num_steps: int | None = declared(
        integer(1, MAX_STEP), "Steps of the run; its last stage may end before.", default=None
    )
    others: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def is_one(document: Mapping[str, Any]) -> bool:
        """Tell whether a document uses words that a plan does not have."""
        stages = document.get("stages")
        its = [each for each in stages if isinstance(each, Mapping)] if isinstance(stages, list) else []
        return bool({"max_epochs", "num_steps"} & set(document)) or any(
            {"epochs", "tokens", "until"} & set(each) for each in its
        )

    @classmethod
    def from_json(cls, document: object, *, what: str | None = None) -> Self:
        """Make the draft of parsed JSON; fields of the plan are checked by `settle`."""
        assert isinstance(document, Mapping)  # else it is none
        own = ("stages", "max_epochs", "num_steps")
        made = super().from_json({name: document[name] for name in own if name in document}, what=what)
        made.__dict__["others"] = {name: value for name, value in document.items() if name not in own}
        return made

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the JSON schema: that of a plan with other stages, and its own fields."""
        plan, own = Plan.schema(), super().schema()
        return {**plan, "properties": {**plan["properties"], **own["properties"]}}
