"""A plan together with the open corpora that hold its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.shards import Shard
from corpus_server.errors import InvalidPlan
from corpus_server.plan import MegatronSampler, Plan, Sampler
from corpus_server.plan.megatron import Table
from corpus_server.read.gather import Gatherer
from corpus_server.stores import is_staged

_PLAN_BYTES, _STAGE_BYTES = 8_000, 1_500
"""Memory of the Python objects of a plan and of each of its stages, as tracemalloc counts them."""


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """Whose tokens a response holds: `shares` of corpora, by the exact weights of a plan's stage.

    A plan's id is "" for tokens that no plan chose.
    """

    plan_id: str
    shares: Mapping[str, float]


class BoundPlan:
    """A plan together with the open corpora that hold its tokens.

    Args:
        table: of a plan in Megatron's order.

    Raises:
        InvalidPlan: the plan does not fit the corpora, see `Sampler`.

    Attributes:
        plan: with its fingerprints.
        sampler: (step, rank) to windows.
        gatherer: windows to tokens; its shard numbers are the sampler's.
        shards: the plan's shard list: (corpus name, shard).
        staged: the file of each shard that lies in an object store, None for local ones.
        is_staged: whether there is such a shard.
        dtype: of the answers, the widest of the sources.
        num_bytes: memory that the plan takes, approximately.
    """

    def __init__(
        self,
        plan: Plan,
        corpora: Mapping[str, Corpus],
        *,
        reads_ahead: bool = True,
        table: Table | None = None,
    ) -> None:
        self.plan = plan
        self.corpora = {name: corpora[name] for name in plan.sources}
        self.shards: list[tuple[str, Shard]] = [
            (name, shard) for name, corpus in self.corpora.items() for shard in corpus.shards
        ]
        files = [shard.file for _, shard in self.shards]
        self.staged = tuple(file if is_staged(file) else None for file in files)
        self.is_staged = any(self.staged)
        shard_tokens = {name: [shard.num_tokens for shard in c.shards] for name, c in self.corpora.items()}
        if table is None:
            self.sampler = Sampler(plan, shard_tokens)
        elif self.is_staged:
            raise InvalidPlan(
                "order megatron reads pieces of shards anywhere for each row, and corpora in an object store "
                "are fetched shard by shard; serve a local copy, or use a bounded shuffle",
                parameter="order",
            )
        else:
            self.sampler = MegatronSampler(plan, shard_tokens, table)
        self.gatherer = Gatherer([shard for _, shard in self.shards], reads_ahead=reads_ahead)
        self.dtype: np.dtype[np.integer] = np.result_type(*(c.dtype for c in self.corpora.values()))
        self._sources: dict[int, Source] = {}  # by the number of the stage
        # Kept, because a cache of plans asks for it at each insertion and removal.
        self.num_bytes = _PLAN_BYTES + _STAGE_BYTES * len(plan.stages) + self.sampler.num_bytes

    def source_at(self, plan_step: int) -> Source:
        """Return whose tokens a step holds: the same object for all steps of a stage."""
        placed = self.sampler.timeline.stage_at(plan_step)
        found = self._sources.get(placed.number)
        if found is None:
            found = self._sources[placed.number] = Source(self.plan.id, placed.stage.mixture)
        return found

    def describe(self) -> dict[str, Any]:
        """Describe the plan over these corpora: sources, stages, shard list."""
        sampler, timeline = self.sampler, self.sampler.timeline
        return {
            "sources": {
                name: {
                    "num_windows": num_windows,
                    "steps_per_epoch": sampler.steps_per_epoch(name),
                    "fingerprint": self.plan.fingerprints[name],
                    "eot": self.corpora[name].eot,
                    **_vocabulary(self.corpora[name]),
                }
                for name, num_windows in zip(self.plan.sources, sampler.num_windows.tolist(), strict=True)
            },
            "stages": [
                {
                    "from_step": placed.stage.from_step,
                    "first_step": timeline.first_training_step(placed.number),
                    "global_batch_size": placed.stage.global_batch_size,
                    "seq_len": placed.seq_len,
                    "weights_65536": placed.stage.units,
                    "positions": dict(zip(self.plan.sources, placed.positions.tolist(), strict=True)),
                    "excluded_windows": {}
                    if exclusion is None
                    else dict(zip(self.plan.sources, exclusion.num_excluded.tolist(), strict=True)),
                }
                for placed, exclusion in zip(timeline.stages, sampler.exclusions, strict=True)
            ],
            "num_steps": sampler.num_steps if isinstance(sampler, MegatronSampler) else None,
            "dtype": self.dtype.name,
            "shards": [{"corpus": name, **shard.describe()} for name, shard in self.shards],
        }

    def to_json(self) -> bytes:
        """Return id, plan and description as JSON text.

        The plan's own text exists already, because the id is made of it; a million ranges have 20 MB.
        """
        described = json.dumps(self.describe(), separators=(",", ":"))
        return f'{{"id":"{self.plan.id}","plan":{self.plan.canonical_json},{described[1:]}'.encode()


def _vocabulary(corpus: Corpus) -> dict[str, int | None]:
    """Return what a model's embedding has to hold: the tokenizer's size, and the largest id of a sample."""
    tokenizer, sampled = corpus.tokenizer, corpus.sampled_ids
    return {
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
        "largest_id": None if sampled is None else sampled.largest,
    }
