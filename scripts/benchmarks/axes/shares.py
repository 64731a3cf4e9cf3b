"""Measure by how many rows sources miss their shares, in random stages and chains, and the epochs asked for.

Nothing is timed: a round is other random plans. A stage has 2 to 64 sources with lognormal weights and 1,000
to 65,536 rows, and every one of its rows is looked at. A chain is 20 stages of 200 to 5,000 rows with weights
of their own; the deviations of its stages add up. Epochs are asked of 2 to 24 sources of 30 to 10^7 rows.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan import Sampler
from corpus_server.plan.draft import Draft
from corpus_server.plan.mixture import BLOCK_ROWS, Mixture, quantise
from corpus_server.plan.permutation import stream_key
from corpus_server.plan.settling import settle
from corpus_server.plan.stratified import MIXTURES
from scripts.benchmarks.measure import Columns, Rounds
from scripts.benchmarks.report import Options, Report

HELP = "by how many rows sources miss their shares, and epochs that were asked for"

STAGES, CHAINS, DRAFTS, CHAIN_STAGES = 1000, 1000, 1000, 20
QUICK = 3
WORST, MEAN = "worst_rows", "mean_worst_rows"
COLUMNS: Columns = {WORST: ("worst, rows", ".2f"), MEAN: ("mean of the worst of each, rows", ".2f")}
STAGE_BOUND = 4.0
"""Proven in docs/arithmetic.md."""
SEQ_LEN = 8

Random = np.random.Generator


def measure(options: Options) -> Report:
    """Measure each kind over random plans."""
    report = Report(data={}, tables=[])
    num_stages, num_chains, num_drafts = (QUICK,) * 3 if options.quick else (STAGES, CHAINS, DRAFTS)
    shares = Rounds(
        f"{num_stages:,} stages at every row, {num_chains:,} chains at every stage's end", COLUMNS
    )
    epochs = Rounds(f"{num_drafts:,} plans in epochs, when they are over", COLUMNS)
    for number in range(options.rounds):
        for version in MIXTURES:
            random = np.random.default_rng(number)
            worst = [stage_worst(random, version) for _ in range(num_stages)]
            shares.add(f"stages, version {version}", summary(worst))
            worst = [chain_worst(random, version) for _ in range(num_chains)]
            shares.add(f"chains, version {version}", summary(worst))
        random = np.random.default_rng(number)
        found = [draft_worst(random) for _ in range(num_drafts)]
        epochs.add("beyond what was asked", summary([above for above, _ in found]))
        epochs.add("missing, besides the last step", summary([below for _, below in found]))
    report.targets.append(shares.target("stages, version 2", WORST, "at most", STAGE_BOUND))
    for rounds in (shares, epochs):
        report.data[rounds.title] = rounds.summary()
        report.tables.append(rounds.table())
    return report


def summary(worst: list[float]) -> dict[str, float]:
    """Return the worst and the mean of what was worst in each plan."""
    return {WORST: max(worst), MEAN: float(np.mean(worst))}


def random_units(random: Random, num_sources: int) -> dict[str, int]:
    """Return units of 1/65536 by lognormal weights, none of them 0."""
    weights = random.lognormal(0, 1.5, num_sources)
    weights = np.maximum(weights, 2 * weights.sum() / BLOCK_ROWS)
    return quantise({f"source-{number:02}": float(weight) for number, weight in enumerate(weights)})


def random_mixture(random: Random, version: int, units: dict[str, int]) -> Mixture:
    """Return the mixture of the first stage of a plan with a random seed."""
    return MIXTURES[version](units, stream_key("mixture", int(random.integers(2**62)), "0"))


def deviations(random: Random, version: int, units: dict[str, int], num_rows: int) -> NDArray[np.float64]:
    """Return by how many rows each source is off after each row of a stage: `(sources, rows)`."""
    sources, _ = random_mixture(random, version, units).place(np.arange(num_rows, dtype=np.uint64))
    numbers = np.arange(len(units))[:, None]
    given = np.cumsum(np.asarray(sources)[None] == numbers, axis=1)
    shares = np.array(list(units.values()))[:, None] * np.arange(1, num_rows + 1) / BLOCK_ROWS
    return np.asarray(given - shares)


def stage_worst(random: Random, version: int) -> float:
    """Return the largest deviation of any source at any row of a random stage."""
    units = random_units(random, int(random.integers(2, 65)))
    return float(np.abs(deviations(random, version, units, int(random.integers(1000, BLOCK_ROWS + 1)))).max())


def chain_worst(random: Random, version: int) -> float:
    """Return the largest sum of deviations of a source when a stage of a random chain ends."""
    num_sources = int(random.integers(2, 17))
    total, worst = np.zeros(num_sources), 0.0
    for _ in range(CHAIN_STAGES):
        units = random_units(random, num_sources)
        mixture, num_rows = random_mixture(random, version, units), int(random.integers(200, 5001))
        given = mixture.count(np.array([num_rows], dtype=np.uint64)).astype(np.float64)
        total += given - np.array(list(units.values())) * num_rows / BLOCK_ROWS
        worst = max(worst, float(np.abs(total).max()))
    return worst


def draft_worst(random: Random) -> tuple[float, float]:
    """Return the most rows that a source got beyond its epochs, or lacks besides its rows of a step."""
    num_sources, batch = int(random.integers(2, 25)), int(2 ** random.integers(0, 11))
    rows = {f"source-{n:02}": int(30 * 10 ** random.uniform(0, 5.5)) for n in range(num_sources)}
    epochs = {name: int(random.integers(1, 41)) / 10 for name in rows}
    document = {
        "seq_len": SEQ_LEN,
        "seed": int(random.integers(2**62)),
        "stages": [{"global_batch_size": batch, "epochs": epochs}],
    }
    wanted = {name: Fraction(str(each)) * rows[name] for name, each in epochs.items()}
    total = sum(wanted.values())
    shards = {name: [num * SEQ_LEN + 1] for name, num in rows.items()}
    if total < batch:
        return 0.0, 0.0
    plan, num_steps = settle(Draft.from_json(document), lambda plan: Sampler(plan, shards))
    assert num_steps is not None
    given = Sampler(plan, shards).timeline.given_before(num_steps)[0].tolist()
    used = dict(zip(plan.sources, given, strict=True))
    left = total - num_steps * batch
    off = [used[name] - float(its - left * its / total) for name, its in wanted.items()]
    beyond = [used[name] - float(its) for name, its in wanted.items()]
    return max(0.0, *beyond), max(0.0, *(-each for each in off))
