"""Query parameters and JSON answers, as the API describes itself.

Numbers are decimal digits and nothing else: no sign tricks, no `1e3`, no `true`, so that a typing
error never trains on something else. Unknown parameters are refused for the same reason.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from corpus_server.plan.document import (
    MAX_GLOBAL_BATCH_SIZE,
    MAX_SEED,
    MAX_SEQ_LEN,
    MAX_STEP,
    MAX_STRIDE,
    Order,
)
from corpus_server.wire import ChecksumPlace, Format

MAX_COUNT = 4096
MAX_EPOCHS = 10_000
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
Count = Annotated[int, Integer(1, MAX_COUNT)]
Token = Annotated[int, Integer(0, 2**63 - 1)]
FormatChoice = Annotated[
    Format | None, Field(description="Format of the body; without it the `Accept` header decides.")
]


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NoQuery(_Query):
    """No parameters at all."""


class FormatQuery(_Query):
    """Parameters of a route that answers tokens."""

    format: FormatChoice = None
    checksum: Annotated[
        ChecksumPlace,
        Field(
            description="Where the checksum stands: `true`, in `Corpus-Checksum`, for which everything is "
            "read before it is sent; `tail`, as the last 8 bytes of the body (raw only); `false`, nowhere."
        ),
    ] = "true"


class TokensQuery(FormatQuery):
    """Parameters of a raw range."""

    start: Annotated[Token, Field(description="First token, corpus-wide.")] = 0
    count: Annotated[Token | None, Field(description="Tokens; default: up to 256, as many as there are.")] = (
        None
    )


class PlanQuery(_Query):
    """A plan by its id, or spelled inline."""

    plan: Annotated[
        str | None,
        Field(pattern="^[0-9a-f]{64}$", description="Plan id; or spell the plan with the next six."),
    ] = None
    corpus: Annotated[str | None, Field(max_length=128, description="Corpus name.")] = None
    seq_len: Annotated[
        Annotated[int, Integer(1, MAX_SEQ_LEN)] | None, Field(description="Inputs per row.")
    ] = None
    batch_size: Annotated[
        Annotated[int, Integer(1, MAX_GLOBAL_BATCH_SIZE)] | None,
        Field(description="Rows of a step over all ranks."),
    ] = None
    seed: Annotated[Annotated[int, Integer(0, MAX_SEED)] | None, Field(description="Default 0.")] = None
    order: Annotated[Order | None, Field(description="Default shuffle.")] = None
    stride: Annotated[
        Annotated[int, Integer(1, MAX_STRIDE)] | None,
        Field(description="Tokens between neighbouring windows; default seq_len, with order random 1."),
    ] = None


class StepsQuery(PlanQuery):
    """Parameters of a rank's share of consecutive steps."""

    step: Annotated[Step, Field(description="First training step.")]
    count: Annotated[Count, Field(description="Consecutive steps.")] = 1
    rank: Annotated[
        Annotated[int, Integer(0, MAX_WORLD_SIZE - 1)], Field(description="In [0, world_size).")
    ] = 0
    world_size: Annotated[
        Annotated[int, Integer(1, MAX_WORLD_SIZE)], Field(description="Ranks; must divide the global batch.")
    ] = 1


class BatchesQuery(StepsQuery, FormatQuery):
    """Parameters of batches and indices."""


class StepQuery(_Query):
    """Parameter of a route about one training step of a plan."""

    step: Annotated[Step, Field(description="Training step.")]


class UsageQuery(StepQuery):
    """Parameters of what training saw."""

    since: Annotated[Step, Field(description="Training step to count from.")] = 0


class LookupQuery(PlanQuery):
    """Parameters of a look-up; `corpus` names the source also where the plan is named by its id."""

    token: Annotated[Token | None, Field(description="A token, corpus-wide.")] = None
    start: Annotated[Token | None, Field(description="First token of a range.")] = None
    stop: Annotated[Token | None, Field(description="End of the range, exclusive.")] = None
    document: Annotated[Token | None, Field(description="A document, where the corpus has an index.")] = None
    epochs: Annotated[
        Annotated[int, Integer(1, MAX_EPOCHS)], Field(description="Passes over the source to look through.")
    ] = 1
    limit: Annotated[
        Annotated[int, Integer(1, 100_000)], Field(description="Rows to return at most, earliest first.")
    ] = 1000


class PlansQuery(_Query):
    """Parameters of the list of plans."""

    limit: Annotated[Annotated[int, Integer(1, 1000)], Field(description="Plans, last seen first.")] = 100


class ShardAnswer(BaseModel):
    """One shard of a corpus."""

    name: str
    format: str
    num_tokens: int
    dtype: str
    data_offset: Annotated[int, Field(description="Bytes before the first token.")]
    size_bytes: Annotated[int, Field(description="Bytes of the file.")]


class CorpusAnswer(BaseModel):
    """One corpus."""

    name: str
    num_tokens: int
    dtype: str
    num_documents: int | None
    fingerprint: str
    fingerprint_kind: Annotated[
        Literal["sampled", "full"],
        Field(description="`sampled`: blocks read at opening; `full`: recorded hashes of every byte."),
    ]
    fingerprints: dict[str, str]
    tokenizer: str | None
    shards: list[ShardAnswer]


class CorporaAnswer(BaseModel):
    """All corpora."""

    corpora: list[CorpusAnswer]


class SourceAnswer(BaseModel):
    """One source of a plan."""

    num_windows: int
    steps_per_epoch: Annotated[
        float | None, Field(description="In the last stage that uses it; null for order random.")
    ]
    fingerprint: str


class StageAnswer(BaseModel):
    """One stage of a plan."""

    from_step: Annotated[int, Field(description="Plan step.")]
    first_step: Annotated[int | None, Field(description="Training step; null if training skips it all.")]
    global_batch_size: int
    weights_65536: Annotated[dict[str, int], Field(description="Exact shares of 65,536 rows.")]
    positions: Annotated[dict[str, int], Field(description="Rows that each source has given before.")]
    excluded_windows: dict[str, int]


class PlanShardAnswer(ShardAnswer):
    """One shard of a plan's shard list."""

    corpus: str


class PlanAnswer(BaseModel):
    """A plan bound to the corpora here."""

    id: str
    plan: dict[str, Any]
    sources: dict[str, SourceAnswer]
    stages: list[StageAnswer]
    dtype: str
    shards: list[PlanShardAnswer]


class SourceUsageAnswer(BaseModel):
    """Rows of one source."""

    rows: int
    tokens: Annotated[int, Field(description="Inputs: rows x seq_len.")]
    epochs: Annotated[float | None, Field(description="Passes over the source; null for order random.")]


class SkippedAnswer(BaseModel):
    """What training did not see."""

    steps: int
    sources: dict[str, SourceUsageAnswer]


class UsageAnswer(BaseModel):
    """What training sees in steps [since, step)."""

    plan: str
    since: int
    step: int
    plan_step: int
    sources: dict[str, SourceUsageAnswer]
    skipped: SkippedAnswer


class ReceiptAnswer(BaseModel):
    """Proof of a step: the checksum of its whole global batch."""

    plan: str
    step: int
    plan_step: int
    global_batch_size: int
    digest: Annotated[str, Field(description="`xxh3-64=HEX` of the raw answer for world_size 1.")]


class SightingAnswer(BaseModel):
    """One row that holds what was looked for."""

    epoch: int
    step: Annotated[int | None, Field(description="Training step; null if training skips it.")]
    plan_step: int
    row: Annotated[int, Field(description="Of the global batch.")]
    shard: Annotated[int, Field(description="Over the plan's shard list.")]
    start: Annotated[int, Field(description="First token of the row in its shard.")]
    substitute: Annotated[bool, Field(description="Whether the window stands in for an excluded one.")]


class LookupAnswer(BaseModel):
    """Every row that holds a token, a range or a document."""

    plan: str
    corpus: str
    start: int
    stop: int
    epochs: int
    num_found: int
    truncated: bool
    rows: list[SightingAnswer]


class PlanItem(BaseModel):
    """A plan in the list."""

    id: str
    plan: dict[str, Any]
    seen_unix_seconds: float


class PlansAnswer(BaseModel):
    """The plans a server has seen."""

    num_plans: Annotated[int, Field(description="All that were seen; the list may hold fewer.")]
    plans: list[PlanItem]


class Problem(BaseModel):
    """RFC 9457 problem document."""

    type: Annotated[str, Field(description="Stable slug.")]
    title: str
    status: int
    detail: str
    parameter: str | None = None
    received: Any = None
    accepted: str | None = None
    remedy: str | None = None
