"""Query parameters and JSON answers, as the API describes itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from corpus_server.answers.queries import Integer, QueryParameters
from corpus_server.read.wire import FORMATS, MEDIA_TYPES


class PlansQuery(QueryParameters):
    """Parameters of the list of plans."""

    limit: Annotated[int, Integer(1, 1000)] = 100
    """Plans, last seen first."""


class PostQuery(QueryParameters):
    """Parameters of a posted plan."""

    keep: Literal["true", "false"] = "true"
    """`false`: describe the plan, and do not keep it."""


class LiveQuery(QueryParameters):
    """Parameters of the last hour."""

    follow: Literal["true", "false"] = "false"
    """`true`: stay, and send what is new as server-sent events."""


class ShardAnswer(BaseModel):
    """One shard of a corpus."""

    name: Annotated[str, Field(description="Of its file; `:NUMBER` behind it if the file holds several.")]
    file: Annotated[str, Field(description="The file, below the corpus's folder.")]
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
    eot: Annotated[int | None, Field(description="Id of the end-of-text token, if it is known.")]
    tokenizer: Annotated[str | None, Field(description="`bytes` or the name of its file.")]
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
    eot: Annotated[int | None, Field(description="Id of the end-of-text token, if it is known.")]
    vocab_size: Annotated[int | None, Field(description="Of the corpus's tokenizer; null if it has none.")]
    largest_id: Annotated[int | None, Field(description="Largest token id of a sample of the corpus.")]


class StageAnswer(BaseModel):
    """One stage of a plan."""

    from_step: Annotated[int, Field(description="Plan step.")]
    first_step: Annotated[int | None, Field(description="Training step; null if training skips it all.")]
    global_batch_size: int
    seq_len: Annotated[int, Field(description="Inputs per row.")]
    weights_65536: Annotated[dict[str, int], Field(description="Exact shares of 65,536 windows.")]
    positions: Annotated[
        dict[str, int], Field(description="Windows that each source gives before this stage.")
    ]
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
    num_steps: Annotated[
        int | None, Field(description="Training steps; null without an end, as in all orders but megatron.")
    ]
    dtype: str
    shards: list[PlanShardAnswer]


class SourceUsageAnswer(BaseModel):
    """Rows of one source."""

    rows: int
    tokens: Annotated[int, Field(description="Inputs: of each row the `seq_len` of its stage.")]
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


class ReadShardAnswer(BaseModel):
    """A shard that some steps read."""

    corpus: str
    name: str
    size_bytes: Annotated[int, Field(description="Bytes of the file.")]
    first_step: Annotated[int, Field(description="First training step of those that reads it.")]
    num_rows: Annotated[int, Field(description="Rows of those steps that lie in it.")]
    is_local: Annotated[
        bool,
        Field(description="Whether it is on the server's machine: local, or staged from an object store."),
    ]


class ShardsAnswer(BaseModel):
    """The shards that some steps read, first used first."""

    plan: str
    step: int
    count: int
    num_bytes: Annotated[int, Field(description="Bytes of all of them.")]
    shards: list[ReadShardAnswer]


class SightingAnswer(BaseModel):
    """One row that holds what was looked for."""

    epoch: int
    step: Annotated[int | None, Field(description="Training step; null if training skips it.")]
    plan_step: int
    row: Annotated[int, Field(description="Row of the global batch.")]
    shard: Annotated[int, Field(description="Number in the plan's shard list.")]
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


class SpanAnswer(BaseModel):
    """Consecutive tokens of one document."""

    start: Annotated[int, Field(description="First token, corpus-wide.")]
    document: Annotated[int | None, Field(description="Its number; null without a document index.")]
    is_eot: Annotated[bool, Field(description="Whether the span is one end-of-text token.")]
    tokens: list[int]
    text: Annotated[
        str | None, Field(description="Null without a tokenizer, or if it does not know one of the ids.")
    ]


class RowAnswer(BaseModel):
    """One row of a global batch."""

    row: int
    corpus: str
    shard: str
    start: Annotated[int, Field(description="First token, corpus-wide.")]
    spans: list[SpanAnswer]


class RowsAnswer(BaseModel):
    """Rows of a step as text."""

    plan: str
    step: int
    plan_step: int
    global_batch_size: int
    first: int
    rows: list[RowAnswer]


class SpansAnswer(BaseModel):
    """A range of tokens as text."""

    corpus: str
    start: int
    stop: int
    num_tokens: Annotated[int, Field(description="Tokens of the corpus.")]
    spans: list[SpanAnswer]


class TopTokenAnswer(BaseModel):
    """One of the most frequent tokens of a sample."""

    token: int
    count: int
    text: str | None


class LengthsAnswer(BaseModel):
    """Lengths of sampled documents, in tokens."""

    num_sampled: int
    mean: float | None
    quantiles: Annotated[dict[str, int], Field(description="Share of the documents -> length.")]
    histogram: Annotated[
        list[tuple[int, int]], Field(description="`[least, number]`: documents of [least, 2 least) tokens.")
    ]


class StatisticsAnswer(BaseModel):
    """What a sample of a corpus is made of."""

    corpus: str
    num_tokens: int
    num_sampled_tokens: int
    num_distinct_tokens: int
    top_tokens: list[TopTokenAnswer]
    counts_by_rank: Annotated[
        list[tuple[int, int]],
        Field(description="`[k, count]`: how often the k-th most frequent token occurs."),
    ]
    num_documents: int | None
    document_lengths: LengthsAnswer | None


class FoundAnswer(BaseModel):
    """One place of a text."""

    token: Annotated[int, Field(description="The token that it begins in, corpus-wide.")]
    document: int | None
    before: str
    text: str
    after: str


class SearchAnswer(BaseModel):
    """Where a text is in a sample of a corpus, or in all of a small one."""

    corpus: str
    text: str
    num_tokens: int
    num_searched_tokens: int
    found: list[FoundAnswer]


class FieldChangeAnswer(BaseModel):
    """A field in which two plans differ; null in the plan that lacks it."""

    field: str
    a: Any
    b: Any


class StepChangeAnswer(BaseModel):
    """A training step that differs."""

    step: int
    plan_steps: tuple[int, int]
    num_rows: int
    rows: Annotated[list[tuple[int, int]], Field(description="Half-open ranges of the global batch.")]


class RowsDiffAnswer(BaseModel):
    """Which rows differ: those of steps [equal_steps, compared_until) were compared."""

    equal_steps: Annotated[
        int | None, Field(description="First steps that are equal by the documents alone; null: all.")
    ]
    compared_until: int | None
    steps: list[StepChangeAnswer]
    first_step: int | None


class DiffAnswer(BaseModel):
    """What differs between two plans."""

    a: str
    b: str
    fields: list[FieldChangeAnswer]
    rows: RowsDiffAnswer


class PlanItem(BaseModel):
    """A plan in the list."""

    id: str
    plan: dict[str, Any]
    seen_unix_seconds: float


class PlansAnswer(BaseModel):
    """The plans that were posted to a server."""

    num_plans: Annotated[int, Field(description="Plans that the server keeps; the list may hold fewer.")]
    plans: list[PlanItem]


class Problem(BaseModel):
    """RFC 9457 problem document."""

    type: Annotated[str, Field(description="Stable name of the error, for programs.")]
    title: str
    status: int
    detail: str
    request_id: Annotated[str, Field(description="The request's id, as in its `X-Request-Id` and the log.")]
    parameter: str | None = None
    received: Any = None
    accepted: str | None = None
    remedy: str | None = None


PROBLEM_TYPE = "application/problem+json"

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "What `If-None-Match` names still holds."}
}
"""For routes whose responses have an `ETag`."""

EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'data: {"unix_seconds": ..., "samples": {...}}\n\n',
            }
        }
    }
}
"""For the route that can be followed."""

_ARRAY = {"type": "string", "contentMediaType": "application/octet-stream"}
TOKENS: dict[int | str, dict[str, Any]] = NOT_MODIFIED | {
    200: {
        "description": "Raw little-endian integers in C order, the same as .npy, JSON, or text.",
        "content": {
            MEDIA_TYPES[each]: {"schema": _ARRAY if each in ("raw", "npy") else {}} for each in FORMATS
        },
    }
}
"""For routes that answer tokens."""

INDICES: dict[int | str, dict[str, Any]] = NOT_MODIFIED | {
    200: {
        "description": "Pairs of shard and start token: raw little-endian int64, the same as .npy, or JSON.",
        "content": {
            kind: each for kind, each in TOKENS[200]["content"].items() if kind != MEDIA_TYPES["text"]
        },
    }
}
"""For the route that answers where tokens lie."""
