"""Query parameters of the routes that answer tokens, as the fast path and the application read them.

Numbers are decimal digits and nothing else: no sign, no `1e3`, no `true`, so that a typing error never trains
on something else. Unknown and repeated parameters are refused for the same reason.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from corpus_server.errors import InvalidParameter
from corpus_server.plan.declared import Schema
from corpus_server.plan.document import INLINE_PLAN
from corpus_server.plan.stage import MAX_STEP
from corpus_server.read.wire import ChecksumPlace, Format

MAX_COUNT = 4096
MAX_WORLD_SIZE = 2**20
_DIGITS = re.compile(r"[0-9]{1,20}", re.ASCII)


class Integer:
    """Metadata of an integer parameter in [low, high], spelled in decimal digits."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Parse strings of digits only."""
        return core_schema.no_info_plain_validator_function(self._parse)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the range."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def _parse(self, value: object) -> int:
        if isinstance(value, str) and _DIGITS.fullmatch(value) and self.low <= int(value) <= self.high:
            return int(value)
        accepted = f"an integer in [{self.low}, {self.high}]"
        raise PydanticCustomError("integer", "must be {accepted}", {"accepted": accepted})


Step = Annotated[int, Integer(0, MAX_STEP)]
Token = Annotated[int, Integer(0, 2**63 - 1)]


class QueryParameters(BaseModel):
    """Base of all query parameters: only the declared ones, each a string, described below its name."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FormatQuery(QueryParameters):
    """Parameters of a route that answers tokens."""

    format: Format | None = None
    """Format of the body; without it the `Accept` header decides."""
    checksum: ChecksumPlace = "true"
    """Place of the checksum. `true`: in `Corpus-Checksum`; everything is read before the first byte is sent.
    `tail`: the last 8 bytes of the body (raw only). `false`: none."""


class TokensQuery(FormatQuery):
    """Parameters of a raw range."""

    start: Token = 0
    """First token, corpus-wide."""
    count: Token | None = None
    """Tokens; default: up to 256, as many as there are."""


def _parameter(schema: Schema) -> tuple[Any, Any]:
    """Return the annotation and the field of a parameter that may be left out."""
    annotation: Any = str
    if schema.get("type") == "integer":
        annotation = Annotated[int, Integer(schema["minimum"], schema["maximum"])]
    elif "enum" in schema:
        annotation = Literal[tuple(schema["enum"])]
    return annotation | None, Field(
        None, description=schema["description"], max_length=schema.get("maxLength")
    )


if TYPE_CHECKING:

    class _Spelled(QueryParameters):
        plan: str | None = None
        corpus: str | None = None
else:
    _Spelled = create_model(
        "_Spelled",
        __base__=QueryParameters,
        plan=(
            Annotated[str | None, Field(pattern="^[0-9a-f]{64}$")],
            Field(None, description=f"Id of a plan; without it, {', '.join(INLINE_PLAN)} spell one."),
        ),
        **{name: _parameter(schema) for name, schema in INLINE_PLAN.items()},
    )


class PlanQuery(_Spelled):
    """A plan by its id, or spelled inline, by parameters that `corpus_server.plan.document` declares."""

    def spelling(self) -> dict[str, Any]:
        """Return the parameters that are given and spell a plan."""
        given = {name: getattr(self, name, None) for name in INLINE_PLAN}
        return {name: value for name, value in given.items() if value is not None}


class StepsQuery(PlanQuery):
    """Parameters of a rank's share of consecutive steps."""

    step: Step
    """First training step."""
    count: Annotated[int, Integer(1, MAX_COUNT)] = 1
    """Consecutive steps."""
    rank: Annotated[int, Integer(0, MAX_WORLD_SIZE - 1)] = 0
    """Whose rows; in [0, world_size)."""
    world_size: Annotated[int, Integer(1, MAX_WORLD_SIZE)] = 1
    """Number of ranks; must divide the global batch."""


class BatchesQuery(StepsQuery, FormatQuery):
    """Parameters of batches and indices."""


def parameters(query_string: bytes) -> dict[str, str]:
    """Return the parameters of a query string.

    Raises:
        InvalidParameter: one is given twice, and it cannot be known which was meant.
    """
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name in counts if counts[name] > 1)
        raise InvalidParameter(f"{repeated} is given twice", parameter=repeated)
    return found
