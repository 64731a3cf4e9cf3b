"""Measure what a bounded shuffle loses in randomness beside a full one.

    python -m scripts.shuffle_statistics order           distances and correlations, from the arithmetic
    python -m scripts.shuffle_statistics loss OUT.png    loss curves of the quick start's model, three seeds

The first part needs no corpus. The second trains on the quick start's text without a server: the order of the
windows is the same.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Sampler
from scripts.processes import ROOT
from scripts.quickstart_lib import text
from scripts.quickstart_lib.training import EXAMPLE, Recipe

Order = str | dict[str, dict[str, int]]

NUM_WINDOWS, ROWS, STEPS = 10_000_000, 512, 2000
NEAR = 16  # windows; with 1,024 tokens each they may be one long document
SEEDS = (1, 2, 3)
TRAIN_STEPS, EVAL_EVERY, EVAL_ROWS, EVAL_STEPS = 400, 50, 64, 2


def bounded(group_blocks: int, block_windows: int) -> Order:
    """Return the order of a bounded shuffle."""
    return {"shuffle": {"block_windows": block_windows, "group_blocks": group_blocks}}


ORDERS: dict[str, Order] = {
    "shuffle": "shuffle",
    "64 x 16,384": bounded(64, 16_384),
    "256 x 4,096": bounded(256, 4096),
    "1,024 x 1,024": bounded(1024, 1024),
    "16 x 16,384": bounded(16, 16_384),
    "sequential": "sequential",
}
TRAINED: dict[str, Order] = {"full shuffle": "shuffle", "bounded, 16 x 64": bounded(16, 64)}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("order")
    parts.add_parser("loss").add_argument("plot", type=Path)
    args = parser.parse_args()
    print(order_table() if args.part == "order" else loss_table(args.plot))


def order_table() -> str:
    """Return a table of figures for each order, over 2,000 steps spread over the first epoch."""
    lines = [
        "| order | correlation | same block | near | distance p1 | p10 | p50 | p90 | parts |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, order in ORDERS.items():
        sampler = Sampler(_plan(order, 1, ROWS, seed=0), {"web": [NUM_WINDOWS + 1]})
        steps = np.linspace(0, NUM_WINDOWS // ROWS - 1, STEPS).astype(int)
        windows = np.stack([sampler.locate(int(step))[0, :, 1] for step in steps])
        lines.append(f"| {name} | " + " | ".join(_figures(windows, order)) + " |")
    return "\n".join(lines)


def _figures(windows: npt.NDArray[np.int64], order: Order) -> list[str]:
    """Return the figures of `(steps, rows)` windows."""
    left, right = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    distances = np.abs(left - right)
    block = order["shuffle"]["block_windows"] if isinstance(order, Mapping) else 16_384
    parts = [len(np.unique(row * 100 // NUM_WINDOWS)) for row in windows]
    return [
        f"{np.corrcoef(left, right)[0, 1]:.3f}",
        f"{np.mean(left // block == right // block):.2%}",
        f"{np.mean(distances < NEAR):.4%}",
        *(f"{np.quantile(distances, q) / NUM_WINDOWS:.1%}" for q in (0.01, 0.1, 0.5, 0.9)),
        f"{statistics.fmean(parts):.0f}",
    ]


def loss_table(plot: Path) -> str:
    """Train with each order and seed, draw the curves, and return a table of the last losses."""
    folder = text.build(ROOT / ".cache" / "quickstart" / "corpus", corpus_mb=12, report=print)
    runs_of = [(name, seed) for name in TRAINED for seed in SEEDS]
    with ProcessPoolExecutor(2) as pool:
        found = pool.map(
            _train, repeat(folder), (TRAINED[name] for name, _ in runs_of), (s for _, s in runs_of)
        )
        curves: dict[str, list[list[float]]] = {name: [] for name in TRAINED}
        for (name, _), losses in zip(runs_of, found, strict=True):
            curves[name].append(losses)
    _draw(curves, plot)
    lines = [
        "| order | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, runs in curves.items():
        last = [run[-1] for run in runs]
        lines.append(
            f"| {name} | " + " | ".join(f"{each:.3f}" for each in (*last, statistics.fmean(last))) + " |"
        )
    return "\n".join(lines)


def _train(folder: Path, order: Order, seed: int) -> list[float]:
    """Return the validation loss at every `EVAL_EVERY` steps; weights start alike for a seed."""
    torch.set_num_threads(1)
    example = _example()
    recipe = Recipe.for_device("cpu")
    with Catalog.open([CorpusSpec(name=name, path=folder / name) for name in text.SPLITS]) as catalog:
        bound = catalog.bind(_plan(order, recipe.seq_len, recipe.global_batch_size, seed, "train"))
        held = catalog.bind(_plan("shuffle", recipe.seq_len, EVAL_ROWS, 0, "validation"))
        torch.manual_seed(seed)
        model = example.GPT(
            vocab_size=text.VOCAB_SIZE,
            seq_len=recipe.seq_len,
            layers=recipe.layers,
            heads=recipe.heads,
            width=recipe.width,
        )
        optimizer = example.make_optimizer(model, recipe.learning_rate)
        schedule = argparse.Namespace(learning_rate=recipe.learning_rate, warmup_steps=50, steps=TRAIN_STEPS)
        losses, began = [], time.perf_counter()
        for step in range(TRAIN_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = example.learning_rate_at(step, schedule)
            loss = model(*_batch(bound, step))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % EVAL_EVERY == 0:
                with torch.no_grad():
                    held_out = [float(model(*_batch(held, number))) for number in range(EVAL_STEPS)]
                losses.append(statistics.fmean(held_out))
    taken = time.perf_counter() - began
    print(f"{order}, seed {seed}: {losses[-1]:.3f} in {taken:.0f} s", file=sys.stderr, flush=True)
    return losses


def _batch(bound: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a step."""
    length = bound.plan.seq_len + 1
    rows = bound.gatherer.gather(bound.sampler.locate(step)[0], length, bound.dtype).astype(np.int64)
    tokens = torch.from_numpy(rows)
    return tokens[:, :-1], tokens[:, 1:]


def _draw(curves: Mapping[str, list[list[float]]], plot: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(EVAL_EVERY, TRAIN_STEPS + 1, EVAL_EVERY)
    for (name, runs), colour in zip(curves.items(), ("#30475e", "#d1495b"), strict=True):
        for number, run in enumerate(runs):
            axes.plot(steps, run, color=colour, alpha=0.7, label=name if number == 0 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_title(f"The quick start's model, {len(SEEDS)} seeds of each order")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(plot, dpi=120)


def _plan(order: Order, seq_len: int, rows: int, seed: int, corpus: str = "web") -> Plan:
    stage = {"from_step": 0, "global_batch_size": rows, "mixture": {corpus: 1.0}}
    return Plan.from_json({"seq_len": seq_len, "seed": seed, "order": order, "stages": [stage]})


def _example() -> Any:
    """Import the training example, which is a script."""
    sys.path.insert(0, str(EXAMPLE.parent))
    return importlib.import_module(EXAMPLE.stem)


if __name__ == "__main__":
    main()
