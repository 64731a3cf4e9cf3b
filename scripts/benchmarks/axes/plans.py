"""Measure what a plan costs at any scale: rows of a step, a new block, a look-up, posting.

None of them may grow with the size of the corpus or the number of the step.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from corpus_server.plan import Plan, Sampler
from corpus_server.plan.questions.lookup import look_up_slices
from corpus_server.plan.questions.slices import finish
from scripts.benchmarks import corpus
from scripts.benchmarks.measure import Rounds
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import serving

HELP = "rows of a step, a new block, a look-up, posting: with many sources and exclusions, at any scale"

SIZES = (10**6, 10**9, 10**13)
STEPS = (0, 10**8)
ROWS, SEQ_LEN = 1024, 1024
NUM_SOURCES, NUM_STAGES, NUM_EXCLUSIONS = 16, 4, 10**6
QUICK_EXCLUSIONS = 1600
DOCUMENT_TOKENS = 1000
COLUMNS = {
    "step": ("rows of a step ms", ".2f"),
    "block": ("a new block ms", ".2f"),
    "lookup": ("a look-up ms", ".2f"),
    "post": ("posting ms", ".1f"),
}
MOST_MS = {"step": 2.0, "block": 15.0, "lookup": 5.0, "post": 1000.0}
MAX_SPARSE_TOKENS = 10**12  # common file systems hold no file of more uint16 tokens


def measure(options: Options) -> Report:
    """Measure every size at every step, and posting once for each size."""
    exclusions = QUICK_EXCLUSIONS if options.quick else NUM_EXCLUSIONS
    rounds = Rounds(
        f"{ROWS:,} rows, {NUM_SOURCES} sources, {NUM_STAGES} stages, {exclusions:,} exclusions", COLUMNS
    )
    for num_tokens in SIZES[:1] if options.quick else SIZES:
        for seed, step in enumerate(STEPS, start=num_tokens):  # blocks are cached by seed
            _measure_arithmetic(rounds, num_tokens, step, seed, exclusions, options.rounds)
        _measure_post(rounds, options, num_tokens, exclusions)
    targets = [
        rounds.target(name, figure, "at most", MOST_MS[figure])
        for name, its in rounds.values.items()
        for figure in its
    ]
    return Report(data=rounds.summary(), tables=[rounds.table()], targets=targets)


def document(num_tokens: int, names: list[str], exclusions: int) -> dict[str, Any]:
    """Return a plan of four stages over sources of together `num_tokens`, with exclusions in the first.

    The excluded ranges lie in the first half of every source; of 10^6 tokens they are single ones.
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
            "from_step": number * 10**6,
            "global_batch_size": ROWS,
            "mixture": {name: weights.uniform(1, 2) for name in names},
        }
        for number in range(NUM_STAGES)
    ]
    stages[0]["exclude"] = exclude
    return {"seq_len": SEQ_LEN, "seed": 1, "stages": stages}


def _measure_arithmetic(
    rounds: Rounds, num_tokens: int, step: int, seed: int, exclusions: int, num_rounds: int
) -> None:
    names = [f"source-{k:02}" for k in range(NUM_SOURCES)]
    sampler = Sampler(
        Plan.from_json({**document(num_tokens, names, exclusions), "seed": seed}),
        {name: [num_tokens // NUM_SOURCES] for name in names},
    )
    steps_per_block = 65_536 // ROWS
    begin = step // steps_per_block * steps_per_block
    first = num_tokens // NUM_SOURCES - DOCUMENT_TOKENS * (num_rounds + 2)

    def look(k: int) -> object:
        start = first + k * DOCUMENT_TOKENS
        return finish(look_up_slices(sampler, names[k % NUM_SOURCES], start, start + DOCUMENT_TOKENS))

    name = f"{num_tokens:.0e} tokens, step {step:.0e}"
    _time(rounds, name, "step", lambda k: sampler.locate(begin + k), steps_per_block - 1)
    # Every round takes another block, far from all that were used before.
    _time(rounds, name, "block", lambda k: sampler.locate(begin + (1000 + k) * steps_per_block), num_rounds)
    _time(rounds, name, "lookup", look, num_rounds)


def _measure_post(rounds: Rounds, options: Options, num_tokens: int, exclusions: int) -> None:
    """Post plans that differ in their seed to a server over a sparse file."""
    served = min(num_tokens, MAX_SPARSE_TOKENS)
    path: Path = corpus.sparse(options.cache, served)
    with serving({corpus.NAME: path}) as server:
        plan = document(served, [corpus.NAME], exclusions)
        bodies = [json.dumps({**plan, "seed": seed}).encode() for seed in range(options.rounds + 1)]
        name = f"{num_tokens:.0e} tokens, step {STEPS[0]:.0e}"
        _time(rounds, name, "post", lambda k: server.answer_to_plan(bodies[k]), options.rounds)


def _time(rounds: Rounds, name: str, figure: str, call: Callable[[int], object], number: int) -> None:
    """Add the ms of `call(1)` to `call(number)`, after `call(0)` has warmed up."""
    call(0)
    for k in range(1, number + 1):
        began = time.perf_counter()
        call(k)
        rounds.add(name, {figure: (time.perf_counter() - began) * 1e3})
