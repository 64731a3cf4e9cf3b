"""What a right response is, in plain Python, one window after another.

So tests of the client can say what is right without the code under test.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

ORDERS = ("shuffle", "sequential", "random")
"""Those that the fake server knows; it refuses others, as the real one does."""


@dataclass(eq=False)
class ReferenceCorpus:
    """Shards of tokens, `shard_arrays[i]` of one dtype."""

    name: str
    shard_arrays: Sequence[np.ndarray]
    data_offset: int = 0
    eot: int | None = None

    @property
    def dtype(self) -> np.dtype:
        return np.result_type(*self.shard_arrays)

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for shard in self.shard_arrays:
            digest.update(shard.tobytes())
        return f"full-{digest.hexdigest()[:32]}"

    def shards(self) -> list[dict[str, Any]]:
        return [
            {
                "name": f"{number:05}.bin",
                "file": f"{number:05}.bin",
                "format": "raw",
                "num_tokens": len(shard),
                "dtype": shard.dtype.name,
                "data_offset": self.data_offset,
                "size_bytes": self.data_offset + shard.nbytes,
            }
            for number, shard in enumerate(self.shard_arrays)
        ]

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_tokens": sum(map(len, self.shard_arrays)),
            "dtype": self.dtype.name,
            "num_documents": None,
            "fingerprint": self.fingerprint,
            "fingerprint_kind": "full",
            "fingerprints": {"full": self.fingerprint},
            "tokenizer": None,
            "shards": self.shards(),
        }

    @functools.cache  # noqa: B019
    def window_starts(self, seq_len: int, stride: int, seed: int | None = None) -> list[tuple[int, int]]:
        """(shard, start) of every window, in file order or shuffled."""
        starts = [
            (number, start)
            for number, shard in enumerate(self.shard_arrays)
            for start in range(0, len(shard) - seq_len, stride)
        ]
        if seed is not None:
            random.Random(seed).shuffle(starts)
        return starts

    def write(self, folder: Any) -> None:
        for shard, described in zip(self.shard_arrays, self.shards(), strict=True):
            (folder / described["name"]).write_bytes(bytes(self.data_offset) + shard.tobytes())


def plan_step_of(plan: dict[str, Any], step: int) -> int:
    """The plan step of a training step: skipped ones are counted over, one at a time."""
    if not plan.get("skip_steps"):
        return step
    plan_step = -1
    for _ in range(step + 1):
        plan_step += 1
        while any(start <= plan_step < stop for start, stop in plan["skip_steps"]):
            plan_step += 1
    return plan_step


def stage_of(plan: dict[str, Any], plan_step: int) -> tuple[int, int]:
    """(number of the stage, rows of all stages before this step)."""
    stages = plan["stages"]
    ends = [stage["from_step"] for stage in stages[1:]] + [plan_step + 1]
    number = next(number for number, end in enumerate(ends) if plan_step < end)
    ends[number] = plan_step
    rows = sum(
        (end - stage["from_step"]) * stage["global_batch_size"]
        for stage, end in zip(stages[: number + 1], ends, strict=False)
    )
    return number, rows


def first_step_of(plan: dict[str, Any], number: int) -> int | None:
    """The first training step in a stage; None: all of it is skipped."""
    stages = plan["stages"]
    step = 0
    while plan_step_of(plan, step) < stages[number]["from_step"]:
        step += 1
    return step if stage_of(plan, plan_step_of(plan, step))[0] == number else None


def sources_of(plan: dict[str, Any]) -> list[str]:
    """Names of the corpora in order of first use."""
    return list(dict.fromkeys(name for stage in plan["stages"] for name in sorted(stage["mixture"])))


def whole(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with all its stages in one document, as a person would read its decisions."""
    if "decisions" not in plan:
        return plan
    lines = [json.loads(line) for line in plan["decisions"].splitlines()]
    plan = {name: value for name, value in plan.items() if name != "decisions"}
    for line in lines:
        stage = dict(line) if isinstance(line, dict) else {**plan["stages"][-1], "from_step": line[0]}
        units = (
            stage["mixture"]
            if isinstance(line, dict)
            else dict(zip(sources_of(plan), line[1:], strict=False))
        )
        stage["mixture"] = {name: each / 65536 for name, each in sorted(units.items()) if each}
        exclude = {"exclude": stage["exclude"]} if isinstance(line, dict) and "exclude" in line else {}
        own_length = (
            {"seq_len": stage["seq_len"]} if stage.get("seq_len", plan["seq_len"]) != plan["seq_len"] else {}
        )
        kept = {name: stage[name] for name in ("from_step", "global_batch_size", "mixture")}
        plan["stages"] = [*plan["stages"], {**kept, **own_length, **exclude}]
        plan["fingerprints"] = {**plan["fingerprints"], **stage.get("fingerprints", {})}
    return plan


def rows_of_step(
    corpora: ReferenceCorpus | Sequence[ReferenceCorpus], plan: dict[str, Any], step: int
) -> list[tuple[int, int]]:
    """(shard over the plan's shard list, start) of each row of the global batch.

    Mixtures and exclusions are not the real server's: a row's source is drawn by its weights, and its
    window is the one of its number in the plan, or the next that touches nothing excluded.
    """
    plan = whole(plan)
    by_name = {c.name: c for c in ([corpora] if isinstance(corpora, ReferenceCorpus) else corpora)}
    names = sources_of(plan)
    plan_step = plan_step_of(plan, step)
    number, before = stage_of(plan, plan_step)
    stage = plan["stages"][number]
    excluded = [e for earlier in plan["stages"][: number + 1] for e in earlier.get("exclude", {}).items()]
    if plan["order"] not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {plan['order']!r}")
    stride = 1 if plan["order"] == "random" else plan["stride"]
    shuffled = plan["seed"] if plan["order"] == "shuffle" else None
    windows_of = {
        name: by_name[name].window_starts(plan["seq_len"], stride, shuffled) for name in stage["mixture"]
    }
    draw = random.Random(f"{plan['seed']}/{plan_step}")
    found = []
    for row in range(stage["global_batch_size"]):
        name = next(iter(stage["mixture"]))
        if len(stage["mixture"]) > 1:
            (name,) = draw.choices(*zip(*sorted(stage["mixture"].items()), strict=True))
        corpus, windows = by_name[name], windows_of[name]
        shift = sum(len(by_name[each].shard_arrays) for each in names[: names.index(name)])
        at = draw.randrange(len(windows)) if plan["order"] == "random" else before + row
        while True:
            shard, start = windows[at % len(windows)]
            ranges = [r for source, ranges in excluded if source == name for r in ranges]
            first = start + sum(map(len, corpus.shard_arrays[:shard])) if ranges else 0
            if not any(first < stop and begin <= first + plan["seq_len"] for begin, stop in ranges):
                break
            at += 1
        found.append((shift + shard, start))
    return found


def tokens_of_step(
    corpora: ReferenceCorpus | Sequence[ReferenceCorpus], plan: dict[str, Any], step: int
) -> np.ndarray:
    """The global batch, `(rows, seq_len + 1)`."""
    by_name = {c.name: c for c in ([corpora] if isinstance(corpora, ReferenceCorpus) else corpora)}
    plan = whole(plan)
    shards = [shard for name in sources_of(plan) for shard in by_name[name].shard_arrays]
    return np.stack(
        [
            shards[shard][start : start + plan["seq_len"] + 1]
            for shard, start in rows_of_step(corpora, plan, step)
        ]
    ).astype(np.result_type(*shards))


def receipt_of(tokens: np.ndarray, salt: bytes = b"") -> str:
    """The receipt of a global batch."""
    return f"xxh3-64={xxhash.xxh3_64_hexdigest(tokens.tobytes() + salt)}"
