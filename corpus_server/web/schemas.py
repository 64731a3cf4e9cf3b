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
from corpus_server.wire import Format

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
        Literal["true", "false"], Field(description="Whether `Corpus-Checksum` is computed.")
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
    steps_per_epoch: float | None
    weight: float
    weight_65536: int
    fingerprint: str


class PlanShardAnswer(ShardAnswer):
    """One shard of a plan's shard list."""

    corpus: str


class PlanAnswer(BaseModel):
    """A plan bound to the corpora here."""

    id: str
    plan: dict[str, Any]
    sources: dict[str, SourceAnswer]
    dtype: str
    shards: list[PlanShardAnswer]


class PlanItem(BaseModel):
    """A plan in the list."""

    id: str
    plan: dict[str, Any]
    seen_unix_seconds: float


class PlansAnswer(BaseModel):
    """The plans a server has seen."""

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
