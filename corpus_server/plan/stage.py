"""A stage of a plan: its own batch size, mixture and exclusions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from corpus_server.errors import InvalidPlan
from corpus_server.plan.amounts import numbers_by_corpus, schema_of_numbers
from corpus_server.plan.declared import Declared, Kind, declared, integer, ranges
from corpus_server.plan.mixture import BLOCK_ROWS, quantise
from corpus_server.plan.ranges import Ranges

MAX_SEQ_LEN: Final = 2**20
MAX_GLOBAL_BATCH_SIZE: Final = 2**20
MAX_STEP: Final = 2**40
"""With MAX_GLOBAL_BATCH_SIZE it keeps every position below 2^61, inside uint64 arithmetic."""


def _mixture(what: str, value: object) -> dict[str, float]:
    weights = numbers_by_corpus(what, value)
    # Multiples of 1/65536 are exact floats, so quantising them again changes nothing.
    return {name: share / BLOCK_ROWS for name, share in quantise(weights).items()}


def _exclude(what: str, value: object) -> dict[str, Ranges]:
    found = {} if value is None else value
    if not isinstance(found, Mapping):
        raise InvalidPlan(f"{what} must map corpus names to ranges", parameter=what)
    # A name without ranges stays until it is known to be one of the plan's, see `Plan.checked_parts`.
    return {name: _RANGES.take(f"{what}.{name}", found[name]) for name in sorted(found)}


_RANGES: Final = ranges()
MIXTURE: Final = Kind(schema_of_numbers(), _mixture)
EXCLUDE: Final = Kind({"type": "object", "additionalProperties": _RANGES.schema}, _exclude)


class Stage(Declared):
    """A part of a plan with its own batch size, mixture and exclusions.

    The weights of the mixture may be any positive numbers. The stage keeps them as exact multiples of 1/65536
    that sum to 1, sorted by corpus name. Exclusions are corpus-wide tokens, and hold in later stages, too.
    """

    prefix = "stages[]."
    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("version", "seed", "order", "rows", "stride", "skip_steps", "fingerprints", "tokenizers"),
            "it belongs beside `stages`",
        ),
        "corpus": "`mixture` says it",
    }

    from_step: int = declared(
        integer(0, MAX_STEP), "Plan step; 0 in the first stage, then rising.", default=0
    )
    global_batch_size: int = declared(integer(1, MAX_GLOBAL_BATCH_SIZE), "Rows of a step over all ranks.")
    mixture: Mapping[str, float] = declared(MIXTURE, "Weight by corpus name, or by group.")
    seq_len: int | None = declared(
        integer(1, MAX_SEQ_LEN),
        "A divisor of the plan's, which holds where this is left out or null. global_batch_size is a "
        "multiple of the plan's seq_len divided by this one.",
        omit=True,
        default=None,
    )
    exclude: Mapping[str, Ranges] = declared(
        EXCLUDE, "Half-open token ranges by corpus name.", omit=True, default_factory=dict
    )

    @property
    def units(self) -> dict[str, int]:
        """Units of 1/65536 by name, sorted by name."""
        return {name: round(weight * BLOCK_ROWS) for name, weight in self.mixture.items()}
