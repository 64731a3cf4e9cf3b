"""Plans for property tests: small ones that shrink, and wild ones of any scale from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

from corpus_server.plan import ORDERS, Plan, Sampler
from corpus_server.plan.declared import declared_fields
from tests.reference import BLOCK, ReferencePlan, units_of

SEEDS = (0, 1337, 2**64 - 1)
"""Few: the reference computes a block's slots once per (seed, stage, block)."""
PLAIN_ORDERS = tuple(each.name for each in ORDERS if not declared_fields(each))
"""Orders that are spelled by their names."""
EPOCH_ORDERS = tuple(each.name for each in ORDERS if each.has_epochs and not declared_fields(each))
REPEATING_ORDERS = tuple(each.name for each in ORDERS if each.repeats)
NO_EPOCH_ORDERS = tuple(each.name for each in ORDERS if not each.has_epochs)
STRIDES = {each.name: each.stride for each in ORDERS if each.stride is not None}
"""Orders that have one stride only, by their names."""
FAR_BLOCK = 1_525_878
"""Its rows are beyond 10^11: with a global batch of 512, steps beyond 10^8."""


@dataclass(frozen=True)
class Case:
    """A plan document and the shapes of the corpora under it."""

    document: dict[str, Any]
    shard_tokens: dict[str, list[int]]

    def sampler(self) -> Sampler:
        """The code under test."""
        return Sampler(Plan.from_json(self.document), self.shard_tokens)

    def reference(self) -> ReferencePlan:
        """The yardstick."""
        return self._reference

    @cached_property
    def _reference(self) -> ReferencePlan:
        return ReferencePlan(self.document, self.shard_tokens)  # 50 ms, where it needs a block's slots

    def with_fields(self, **fields: Any) -> Case:
        """The same with other fields."""
        return Case({**self.document, **fields}, self.shard_tokens)

    def without_exclusions(self) -> Case:
        """The same plan before anything was denied."""
        stages = [{k: v for k, v in stage.items() if k != "exclude"} for stage in self.document["stages"]]
        return self.with_fields(stages=stages)

    def names(self) -> list[str]:
        """Source names in the order of the plan's shard list."""
        return list(self.reference().sources)

    def first_shards(self) -> dict[str, int]:
        """Number of each source's first shard in the plan's shard list."""
        return self.reference().first_shard


def bounded(block_windows: int, group_blocks: int) -> dict[str, Any]:
    """The order of a bounded shuffle."""
    return {"shuffle": {"block_windows": block_windows, "group_blocks": group_blocks}}


def source_numbers(case: Case, located: Any) -> Any:
    """The source of each located row, as its place in `case.names()`; any shape of rows."""
    bounds = list(case.first_shards().values())
    return np.searchsorted(bounds, located[..., 0], side="right") - 1


def run_of(case: Case, num_steps: int) -> list[list[tuple[int, int]]]:
    """The rows (shard, start) of the first training steps, by the code under test."""
    sampler = case.sampler()
    return [[tuple(row) for row in sampler.locate(step)[0].tolist()] for step in range(num_steps)]


def allow_something(document: dict[str, Any], shard_tokens: dict[str, list[int]]) -> None:
    """Take a source out of the last stage's `exclude` where no window of it would be left."""
    reference = ReferencePlan({**document, "stages": _short(document["stages"])}, shard_tokens)
    exclude = document["stages"][-1]["exclude"]
    for name, denied in reference.denied[-1].items():
        if sum(map(len, denied)) == reference.sources[name].num_windows:
            del exclude[name]
    if not exclude:
        del document["stages"][-1]["exclude"]


def _short(stages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stages of no rows, so that no block is needed to look at their exclusions."""
    return [{**stage, "from_step": 0} for stage in stages]


@st.composite
def small_plans(
    draw: st.DrawFn,
    *,
    orders: Sequence[str] = (*EPOCH_ORDERS, "bounded"),
    exclude: bool = True,
    skip: bool = True,
    max_stages: int = 3,
) -> Case:
    """One to three sources of at most a few dozen windows, stages of a few steps."""
    seq_len = draw(st.integers(1, 4))
    document: dict[str, Any] = {
        "seq_len": seq_len,
        "seed": draw(st.sampled_from(SEEDS[:2])),
        "order": draw(st.sampled_from(orders)),
    }
    if document["order"] == "bounded":
        document["order"] = bounded(draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    if str(document["order"]) not in STRIDES:
        document["stride"] = draw(st.integers(1, seq_len + 2))
    names = ["c", "a", "b"][: draw(st.integers(1, 3))]
    shard_tokens = {
        name: [
            *draw(st.lists(st.integers(0, 20), max_size=2)),
            draw(st.integers(seq_len + 1, 40)),
        ]
        for name in names
    }
    stages: list[dict[str, Any]] = []
    from_step = 0
    for _ in range(draw(st.integers(1, max_stages))):
        used = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        parts = draw(st.sampled_from([n for n in (1, 2, 3, 4) if seq_len % n == 0]))
        stage = {
            "from_step": from_step,
            "global_batch_size": draw(st.integers(1, 7)) * parts,
            "mixture": {name: draw(st.sampled_from([1, 2, 5, 0.5])) for name in used},
            **({"seq_len": seq_len // parts} if parts > 1 else {}),
        }
        stages.append(stage)
        used_so_far = {name for each in stages for name in each["mixture"]}
        if exclude and draw(st.booleans()):
            stage["exclude"] = {
                name: draw(st.lists(token_ranges(sum(shard_tokens[name])), min_size=1, max_size=3))
                for name in sorted(used_so_far)
            }
            allow_something({**document, "stages": stages}, shard_tokens)
        from_step += draw(st.integers(1, 12))
    document["stages"] = stages
    if skip and draw(st.booleans()):
        document["skip_steps"] = draw(SKIPS)
    return Case(document, shard_tokens)


@st.composite
def token_ranges(draw: st.DrawFn, num_tokens: int) -> list[int]:
    """A half-open range of up to six tokens."""
    start = draw(st.integers(0, num_tokens - 1))
    return [start, draw(st.integers(start + 1, min(num_tokens, start + 6)))]


SKIPS = st.lists(st.integers(0, 40), max_size=6, unique=True).map(
    lambda steps: [list(pair) for pair in zip(sorted(steps)[::2], sorted(steps)[1::2], strict=False)]
)
"""Ranges of steps in order and apart; they may cover whole stages of a small plan."""


def wild_plan(draw: random.Random) -> Case:
    """One to eight sources of one window to 10^12 tokens, one to four stages cut anywhere in a block."""
    order: Any = draw.choice(["shuffle", *PLAIN_ORDERS])
    if draw.random() < 0.4:
        order = bounded(draw.choice([1, 7, 1000, 16384, 2**40]), draw.choice([1, 2, 64]))
    seq_len = draw.choice([1, 7, 1024, 2**20])
    document: dict[str, Any] = {"seq_len": seq_len, "seed": draw.choice(SEEDS), "order": order}
    stride = STRIDES.get(str(order), seq_len)
    if str(order) not in STRIDES and draw.random() < 0.5:
        stride = document["stride"] = draw.choice([1, seq_len + 1, 3 * seq_len])
    names = draw.sample(["web", "code", "math", "Büro", "a", "z", "books", "wiki"], draw.randint(1, 8))
    shard_tokens = {}
    for name in names:
        longest = seq_len + 1 + draw.choice([0, stride, 40 * stride, 10**6 * stride, 10**12])
        shard_tokens[name] = [draw.randrange(longest) for _ in range(draw.randrange(4))] + [longest]
        draw.shuffle(shard_tokens[name])
    stages: list[dict[str, Any]] = []
    from_step = 0
    for _ in range(draw.randint(1, 4)):
        used = draw.sample(names, draw.randint(1, len(names)))
        size = draw.choice([1, 6, 64, 512, 1000, 4096])
        stage = {"from_step": from_step, "global_batch_size": size, "mixture": wild_mixture(draw, used)}
        stages.append(stage)
        parts = draw.choice([n for n in (1, 2, 8, 64) if seq_len % n == size % n == 0])
        if parts > 1:
            stage["seq_len"] = seq_len // parts
        if draw.random() < 0.6:
            used_so_far = sorted({name for each in stages for name in each["mixture"]})
            stage["exclude"] = {
                name: [wild_range(draw, sum(shard_tokens[name])) for _ in range(draw.randint(1, 5))]
                for name in draw.sample(used_so_far, draw.randint(1, len(used_so_far)))
            }
            allow_something({**document, "stages": stages}, shard_tokens)
        rows = draw.choice([0, 0, 1, FAR_BLOCK]) * BLOCK + draw.randrange(BLOCK)
        from_step += max(2, rows * parts // size)
    document["stages"] = stages
    if draw.random() < 0.5:
        document["skip_steps"] = wild_skips(draw, stages)
    return Case(document, shard_tokens)


def wild_mixture(draw: random.Random, names: Sequence[str]) -> dict[str, float]:
    """Weights of which the smallest are 1/65536."""
    weights = {name: draw.choice([1.0, 0.5, draw.random() + 0.01, 2.0]) for name in names}
    if len(names) > 1 and draw.random() < 0.3:
        smallest = draw.choice(names)
        rest = sum(weight for name, weight in weights.items() if name != smallest)
        weights[smallest] = rest / (BLOCK - 1)
        while 0 in units_of(weights).values():  # the others' remainders were larger
            weights[smallest] *= 1.5
    return weights


def wild_range(draw: random.Random, num_tokens: int) -> list[int]:
    """Any part of a corpus, often small, sometimes nearly all of it."""
    length = min(num_tokens, draw.choice([1, 10, 10**4, num_tokens // 3 + 1, num_tokens - num_tokens // 50]))
    start = draw.choice([0, num_tokens - length, draw.randint(0, num_tokens - length)])
    return [start, start + length]


def wild_skips(draw: random.Random, stages: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Apart, in order; each leaves its stage at least its first step."""
    ends = [stage["from_step"] for stage in stages[1:]] + [stages[-1]["from_step"] + 10**9]
    found = []
    for stage, end in zip(stages, ends, strict=True):
        first = stage["from_step"] + 1
        if end > first and draw.random() < 0.6:
            start = min(end - 1, first + draw.choice([0, 3, 100, 10**6]))
            found.append([start, min(end, start + draw.choice([1, 10, 10**5]))])
    return found
