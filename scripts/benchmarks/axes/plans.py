"""What a plan costs at any scale: rows of a step, a new block, a look-up, posting; nothing may grow."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from corpus_server.plan import Plan, Sampler
from corpus_server.plan.lookup import look_up
from scripts.benchmarks import corpus
from scripts.benchmarks.measure import spread
from scripts.benchmarks.report import Options, Report, Table, Target
from scripts.benchmarks.servers import serving

HELP = "rows of a step, a new block, a look-up, posting: with many sources and exclusions, at any scale"

SIZES = (10**6, 10**9, 10**13)
STEPS = (0, 10**8)
ROWS, SEQ_LEN = 1024, 1024
NUM_SOURCES, NUM_STAGES, NUM_EXCLUSIONS = 16, 4, 10**6
SMOKE_EXCLUSIONS = 1600
DOCUMENT_TOKENS = 1000
ROUNDS = 9
TARGETS_MS = {"step": 2.0, "block": 15.0, "lookup": 5.0, "post": 1000.0}
NAMES = {"step": "rows of a step", "block": "a new block", "lookup": "a look-up", "post": "posting a plan"}
MAX_SPARSE_TOKENS = 10**12
"""A file of more uint16 tokens is beyond what common file systems hold."""

Figures = dict[str, float]


def measure(options: Options) -> Report:
    """Measure every size at every step; the post once for each size."""
    exclusions = SMOKE_EXCLUSIONS if options.smoke else NUM_EXCLUSIONS
    found: list[dict[str, Any]] = []
    for num_tokens in SIZES[:1] if options.smoke else SIZES:
        post = _post(options.cache, num_tokens, exclusions)
        for seed, step in enumerate(STEPS, start=num_tokens):  # blocks are cached by seed
            figures = _arithmetic(num_tokens, step, seed, exclusions)
            found.append({"num_tokens": num_tokens, "at_step": step, **figures, "post": post})
    return Report(
        data={"exclusions": exclusions, "measured": found},
        tables=[_table(found, exclusions)],
        targets=_targets(found),
    )


def _table(measured: list[dict[str, Any]], exclusions: int) -> Table:
    return Table(
        title=f"{ROWS:,} rows, {NUM_SOURCES} sources, {NUM_STAGES} stages, {exclusions:,} exclusions; "
        f"ms, median of {ROUNDS} (lowest - highest)",
        columns=["tokens", "step", "rows of a step", "new block", "look-up", "posting (to 10^12)"],
        rows=[
            [f"{row['num_tokens']:.0e}", f"{row['at_step']:.0e}", *(_cell(row[name]) for name in TARGETS_MS)]
            for row in measured
        ],
    )


def _targets(measured: list[dict[str, Any]]) -> list[Target]:
    return [
        Target(
            figure=f"{NAMES[name]}, the slowest median",
            reached=max(row[name]["median"] for row in measured),
            bound="at most",
            wanted=wanted,
            unit="ms",
        )
        for name, wanted in TARGETS_MS.items()
    ]


def _cell(figures: Figures) -> str:
    return f"{figures['median']:.2f} ({figures['lowest']:.2f} - {figures['highest']:.2f})"


def document(num_tokens: int, names: list[str], changes: list[int], exclusions: int) -> dict[str, Any]:
    """A plan of four stages over sources of together `num_tokens`, so many ranges excluded in the first.

    The ranges are of at most half of every source's tokens, and of 10^6 tokens they are single ones.
    """
    draw = np.random.default_rng(0)
    each = num_tokens // len(names)
    per_source = exclusions // len(names)
    exclude = {}
    for name in names:
        width = each // 2 / per_source
        starts = np.sort(draw.integers(0, each // 2 - 1, per_source))
        stops = np.minimum(starts + max(1, int(min(width, 1000))), each // 2)
        exclude[name] = np.stack((starts, np.maximum(stops, starts + 1)), axis=1).tolist()
    weights = random.Random(0)
    stages: list[dict[str, Any]] = [
        {
            "from_step": from_step,
            "global_batch_size": ROWS,
            "mixture": {name: weights.uniform(1, 2) for name in names},
        }
        for from_step in (0, *changes)
    ]
    stages[0]["exclude"] = exclude
    return {"seq_len": SEQ_LEN, "seed": 1, "stages": stages}


def _arithmetic(num_tokens: int, step: int, seed: int, exclusions: int) -> dict[str, Figures]:
    names = [f"source-{k:02}" for k in range(NUM_SOURCES)]
    changes = [10**6, 2 * 10**6, 3 * 10**6]
    sampler = Sampler(
        Plan.from_json({**document(num_tokens, names, changes, exclusions), "seed": seed}),
        {name: [num_tokens // NUM_SOURCES] for name in names},
    )
    steps_per_block = 65_536 // ROWS
    begin = step // steps_per_block * steps_per_block
    warm = _timed(lambda k: sampler.locate(begin + k), rounds=steps_per_block - 1)
    # Every round another block, far from all that were touched before.
    block = _timed(lambda k: sampler.locate(begin + (1000 + k) * steps_per_block))
    first = num_tokens // NUM_SOURCES - DOCUMENT_TOKENS * (ROUNDS + 2)
    look = _timed(
        lambda k: look_up(
            sampler,
            names[k % NUM_SOURCES],
            first + k * DOCUMENT_TOKENS,
            first + (k + 1) * DOCUMENT_TOKENS,
        )
    )
    return {"step": warm, "block": block, "lookup": look}


def _post(cache: Path, num_tokens: int, exclusions: int) -> Figures:
    """Post plans that differ in their seed to a real server over a sparse file."""
    served = min(num_tokens, MAX_SPARSE_TOKENS)
    path = corpus.sparse(cache, served)
    with serving({corpus.NAME: path}) as server:
        plan = document(served, [corpus.NAME], [10**6, 2 * 10**6, 3 * 10**6], exclusions)
        bodies = [json.dumps({**plan, "seed": seed}).encode() for seed in range(ROUNDS + 1)]
        return _timed(lambda k: server.answer_to_plan(bodies[k]))


def _timed(call: Callable[[int], object], *, rounds: int = ROUNDS) -> Figures:
    """Median and spread in ms of `call(1)` to `call(rounds)`, after `call(0)` has warmed up."""
    call(0)
    times = []
    for k in range(1, rounds + 1):
        began = time.perf_counter()
        call(k)
        times.append((time.perf_counter() - began) * 1e3)
    return spread(times)
