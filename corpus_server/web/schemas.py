"""JSON responses, as the API describes itself; only the description imports them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field


class MaskResponse(BaseModel):
    """The loss mask of a shard: one byte a token, 0 where the token is no target."""

    file: Annotated[str, Field(description="The file, below the corpus's folder.")]
    data_offset: Annotated[int, Field(description="Bytes before that of the first token.")]
    size_bytes: Annotated[int, Field(description="Bytes of the file.")]


class ShardResponse(BaseModel):
    """One shard of a corpus."""

    name: Annotated[str, Field(description="Of its file; `:NUMBER` behind it if the file holds several.")]
    file: Annotated[str, Field(description="The file, below the corpus's folder.")]
    format: str
    num_tokens: int
    dtype: str
    data_offset: Annotated[int, Field(description="Bytes before the first token.")]
    size_bytes: Annotated[int, Field(description="Bytes of the file.")]
    loss_mask: Annotated[MaskResponse | None, Field(description="Missing if the shard has none.")] = None


class ViewResponse(BaseModel):
    """Of which corpus a view is, and how it was made."""

    fingerprint: Annotated[str, Field(description="Of the corpus.")]
    num_tokens: Annotated[int, Field(description="Of the corpus.")]
    num_documents: Annotated[int, Field(description="Of the corpus.")]
    made: Annotated[dict[str, Any], Field(description="The options of `view create`.")]
    metadata: Annotated[str | None, Field(description="Digest of the metadata; null if none was read.")]
    encoding: Annotated[str, Field(description="Of the multiplicities: `bits`, `bytes`, `words` or `runs`.")]
    size_bytes: Annotated[int, Field(description="Bytes of the view's file.")]


class CorpusResponse(BaseModel):
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
    tokenizer_identity: Annotated[
        str | None,
        Field(description="The same for corpora of one tokenizer: `bytes` or a digest; null: not known."),
    ]
    num_masks: Annotated[int, Field(description="Shards with a loss mask; the others count as all ones.")]
    has_metadata: Annotated[bool, Field(description="Whether its documents have metadata.")]
    shards: list[ShardResponse]
    view: Annotated[ViewResponse | None, Field(description="Missing unless the corpus is a view.")] = None


class CorporaResponse(BaseModel):
    """All corpora."""

    corpora: list[CorpusResponse]


class SourceResponse(BaseModel):
    """One source of a plan."""

    num_windows: Annotated[int, Field(description="Rows of an epoch.")]
    num_masks: Annotated[int, Field(description="Shards with a loss mask; the others count as all ones.")]
    steps_per_epoch: Annotated[
        float | None, Field(description="In the last stage that uses it; null if the order has no epochs.")
    ]
    fingerprint: str
    eot: Annotated[int | None, Field(description="Id of the end-of-text token, if it is known.")]
    tokenizer_identity: Annotated[
        str | None, Field(description="The same for corpora of one tokenizer; null if it is not known.")
    ]
    vocab_size: Annotated[int | None, Field(description="Of the corpus's tokenizer; null if it has none.")]
    largest_id: Annotated[int | None, Field(description="Largest token id of a sample of the corpus.")]
    view: Annotated[bool, Field(description="Whether it is a view; missing unless it is.")] = False
    num_pieces: Annotated[
        int | None, Field(description="Pieces of documents in the rows of an epoch; of rows documents only.")
    ] = None
    fill: Annotated[
        float | None, Field(description="Used tokens of those rows to all; of rows documents only.")
    ] = None


class StageResponse(BaseModel):
    """One stage of a plan."""

    from_step: Annotated[int, Field(description="Plan step.")]
    first_step: Annotated[int | None, Field(description="Training step; null if training skips it all.")]
    global_batch_size: int
    seq_len: Annotated[int, Field(description="Inputs per row.")]
    weights_65536: Annotated[dict[str, int], Field(description="Exact shares of 65,536 windows.")]
    positions: Annotated[
        dict[str, int], Field(description="Windows that each source gives before this stage.")
    ]
    excluded_windows: Annotated[
        dict[str, int], Field(description="Windows, with rows documents pieces, that have substitutes.")
    ]


class PlanShardResponse(ShardResponse):
    """One shard of a plan's shard list."""

    corpus: str


class RootResponse(BaseModel):
    """The plan that others continue."""

    id: str
    plan: dict[str, Any]


class PlanResponse(BaseModel):
    """A plan bound to the corpora here."""

    id: str
    plan: dict[str, Any]
    root: Annotated[
        RootResponse | None, Field(description="Of a plan that continues others, the first of them.")
    ] = None
    sources: dict[str, SourceResponse]
    num_stages: int
    stages: Annotated[
        list[StageResponse],
        Field(description="The last 512; of a posted plan that continues another one, those that it adds."),
    ]
    warnings: Annotated[
        list[str],
        Field(description="What its author should know: tokenizers that could not be compared."),
    ]
    num_steps: Annotated[int | None, Field(description="Training steps; null if the plan has no end.")]
    dtype: str
    fills_ends: Annotated[
        bool, Field(description="Whether rows may end with end-of-text tokens that belong to no document.")
    ]
    indices: Annotated[
        Literal["windows", "pieces"],
        Field(description="What `/v1/indices` says of a row: its window, or the pieces that it joins."),
    ]
    shards: Annotated[
        list[PlanShardResponse],
        Field(description="Of a posted plan that continues another one, those of sources that it adds."),
    ]


class PlanItem(BaseModel):
    """A plan in the list."""

    id: str
    plan: dict[str, Any]
    seen_unix_seconds: float
    runs: Annotated[list[str], Field(description="Names of the runs that posted it, last seen first.")]
    head: Annotated[
        str | None, Field(description="Id of the longest plan that continues it; missing if there is none.")
    ] = None
    num_stages: Annotated[int | None, Field(description="Of that one.")] = None


class PlansResponse(BaseModel):
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

RESPONSES: dict[tuple[str, str], Any] = {
    ("GET", "/healthz"): dict[str, str],
    ("GET", "/v1/corpora"): CorporaResponse,
    ("GET", "/v1/corpora/{name}"): CorpusResponse,
    ("POST", "/v1/plans"): PlanResponse,
    ("GET", "/v1/plans"): PlansResponse,
    ("GET", "/v1/plans/{plan_id}"): PlanResponse,
}
"""What routes answer, by method and path, where the route does not say so itself."""
