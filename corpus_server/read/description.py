"""What a plan is over the corpora here, as its description says it: sources, stages, shards."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from corpus_server.corpus.formats.masks import sent_as
from corpus_server.corpus.shards import ShardDescription
from corpus_server.described import described_keys
from corpus_server.plan.document import MAX_STAGES
from corpus_server.plan.laid import Laid
from corpus_server.plan.timeline import PlacedStage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.vocabularies import tokenizer_warnings

_DESCRIBED_STAGES = MAX_STAGES
"""The last stages, which a description has; a plan that continues others may have 100,000."""


@described_keys
class LengthDescription(TypedDict):
    """Rows of one source that are packed for the `seq_len` of a stage, where it is not the plan's."""

    seq_len: int
    num_windows: int
    """Rows of an epoch."""
    num_pieces: int
    fill: float
    left_out: NotRequired[float]


@described_keys
class SourceDescription(TypedDict):
    """One source of a plan."""

    num_windows: int
    """Rows of an epoch."""
    num_masks: int
    """Shards with a loss mask; the others count as all ones."""
    steps_per_epoch: float | None
    """In the last stage that uses it; null if the order has no epochs."""
    fingerprint: str
    eot: int | None
    """Id of the end-of-text token, if it is known."""
    eot_first: bool
    """Whether documents begin with it; else they end with it."""
    tokenizer_identity: str | None
    """The same for corpora of one tokenizer; null if it is not known."""
    vocab_size: int | None
    """Of the corpus's tokenizer; null if it has none."""
    largest_id: int | None
    """Largest token id of a sample of the corpus."""
    view: NotRequired[bool]
    """Whether it is a view; missing unless it is."""
    num_pieces: NotRequired[int]
    """Pieces of documents in the rows of an epoch; of rows documents only."""
    fill: NotRequired[float]
    """Used tokens of those rows to all; of rows documents only."""
    kept: NotRequired[float]
    """Share of the windows, with rows documents pieces, that a member of a family keeps, of a sample; others
    have substitutes. Of members of families only."""
    doubled: NotRequired[float]
    """Share of them that it doubles, of the sample. Of members of families with `double` only."""
    left_out: NotRequired[float]
    """Share of the predictions that are in no row; of rows documents that begin with a document only."""
    lengths: NotRequired[list[LengthDescription]]
    """The same of rows of other lengths; missing where no stage has a `seq_len` of its own."""


@described_keys
class StageDescription(TypedDict):
    """One stage of a plan."""

    from_step: int
    """Plan step."""
    first_step: int | None
    """Training step; null if training skips it all."""
    global_batch_size: int
    seq_len: int
    """Inputs per row."""
    weights_65536: dict[str, int]
    """Exact shares of 65,536 windows."""
    positions: dict[str, int]
    """Windows that each source gives before this stage."""
    excluded_windows: dict[str, int]
    """Windows, with rows documents pieces, that have substitutes."""


@described_keys
class PlanShard(ShardDescription):
    """One shard of a plan's shard list; the other keys are those of its corpus's description."""

    corpus: str


@described_keys
class BoundDescription(TypedDict):
    """What a plan is over the corpora here."""

    sources: dict[str, SourceDescription]
    num_stages: int
    stages: list[StageDescription]
    """The last 512; of a posted plan that continues another one, those that it adds."""
    warnings: list[str]
    """What its author should know: tokenizers that could not be compared."""
    num_steps: int | None
    """Training steps; null if the plan has no end, and its posted stages say none."""
    dtype: str
    """Of the tokens in responses."""
    loss_mask_dtype: Literal["uint8", "float16"]
    """Of `loss_mask` in responses: `float16` if a loss mask of a source holds weights."""
    order_repeats: bool
    """Whether every epoch has the same order, as an evaluation has; else each has an order of its own."""
    fills_ends: bool
    """Whether rows may end with end-of-text tokens that belong to no document."""
    indices: Literal["windows", "pieces"]
    """What `/v1/indices` says of a row: its window, or the pieces that it joins."""
    shards: list[PlanShard]
    """Of a posted plan that continues another one, those of sources that it adds."""


def describe(bound: BoundPlan, parent: BoundPlan | None = None) -> BoundDescription:
    """Describe a plan over its corpora: sources, stages, shard list.

    Args:
        parent: whose stages and shards are known, and are left out.
    """
    timeline = bound.sampler.timeline
    num_stages = len(timeline.stages)
    first = max(0, num_stages - _DESCRIBED_STAGES) if parent is None else len(parent.plan.stages)
    shards = bound.shards[0 if parent is None else len(parent.shards) :]
    return {
        "sources": {name: _source(bound, number) for number, name in enumerate(bound.plan.sources)},
        "num_stages": num_stages,
        "stages": [_stage(bound, placed) for placed in timeline.stages[first:]],
        "warnings": tokenizer_warnings(bound.plan, bound.corpora),
        "num_steps": bound.sampler.num_steps,
        "dtype": bound.dtype.name,
        "loss_mask_dtype": sent_as(bound.mask_dtype),
        "order_repeats": bound.plan.order.repeats,
        "fills_ends": bound.plan.rows.fills_ends,
        "indices": "windows" if bound.sampler.is_window else "pieces",
        "shards": [{"corpus": name, **shard.describe()} for name, shard in shards],
    }


def _source(bound: BoundPlan, number: int) -> SourceDescription:
    name = bound.plan.sources[number]
    corpus, rows = bound.corpora[name], bound.sampler.rows.describe(number)
    tokenizer, sampled = corpus.tokenizer, corpus.sampled_ids
    described: SourceDescription = {
        "num_windows": int(bound.sampler.num_windows[number]),
        "steps_per_epoch": bound.sampler.steps_per_epoch(name),
        "fingerprint": bound.plan.fingerprints[name],
        "eot": corpus.eot,
        "eot_first": corpus.eot_first,
        "num_masks": corpus.num_masks,
        "tokenizer_identity": corpus.tokenizer_identity,
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
        "largest_id": None if sampled is None else sampled.largest,
    }
    if corpus.base is not corpus:
        described["view"] = True
    if bound.sampler.left_out is not None:
        described["kept"] = bound.sampler.left_out.kept[number]
        if bound.sampler.left_out.family.double is not None:
            described["doubled"] = bound.sampler.left_out.doubled[number]
    if rows:
        described["num_pieces"], described["fill"] = rows["num_pieces"], rows["fill"]
        if "left_out" in rows:
            described["left_out"] = rows["left_out"]
    if len(bound.sampler.laid) > 1:
        described["lengths"] = [_length(laid, number) for laid in bound.sampler.laid[1:]]
    return described


def _stage(bound: BoundPlan, placed: PlacedStage) -> StageDescription:
    sources, laid = bound.plan.sources, bound.sampler.laid_of(placed.seq_len)
    exclusion = laid.exclusion_at(placed.number)
    excluded = [] if exclusion is None else exclusion.num_excluded.tolist()
    return {
        "from_step": placed.from_step,
        "first_step": bound.sampler.timeline.first_training_step(placed.number),
        "global_batch_size": placed.global_batch_size,
        "seq_len": placed.seq_len,
        "weights_65536": bound.plan.log.shares(placed.number),
        "positions": dict(zip(sources, placed.positions.tolist(), strict=True)),
        "excluded_windows": dict(zip(sources, excluded, strict=False)),
    }


def _length(laid: Laid, source: int) -> LengthDescription:
    its = laid.rows.describe(source)
    described: LengthDescription = {
        "seq_len": laid.seq_len,
        "num_windows": int(laid.rows.num_rows[source]),
        "num_pieces": its["num_pieces"],
        "fill": its["fill"],
    }
    if "left_out" in its:
        described["left_out"] = its["left_out"]
    return described
