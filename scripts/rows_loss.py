"""Train the quick start's model with windows and with rows of documents, and compare losses on `val`.

    python -m scripts.rows_loss [SEQ_LEN [STEPS]]

The model is that of `client/examples/train.py` with the quick start's sizes for a CPU: causal attention that
sees across documents, whatever the rows. A step has as many tokens with both. Rows of documents leave
predictions across documents out of the loss. Every model is evaluated on windows of `val` and on its rows of
documents, there without predictions across documents; runs of one seed begin with the same weights.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from corpus_client import CorpusLoader
from scripts.processes import HOST, claim_port, is_ready, running
from scripts.quickstart_lib import text
from scripts.quickstart_lib.training import EXAMPLE, Recipe

HOME = Path(".cache/quickstart")
SEEDS = (1, 2, 3)
LAYOUTS = ("windows", "documents")
EVAL_TOKENS = 2**16
CORPUS_MB = 12


def example() -> Any:
    """Import the example."""
    spec = importlib.util.spec_from_file_location("train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(url: str, recipe: Recipe, rows: str, steps: int) -> list[float]:
    """Train one model; return its losses on `val`, by the layouts of the rows."""
    train = example()
    named = [
        "--corpus",
        "train",
        "--vocab-size",
        str(text.VOCAB_SIZE),
        "--steps",
        str(steps),
        "--device",
        "cpu",
    ]
    args = train.parse_arguments([url, *recipe.flags(), *named])
    trainer = train.Trainer(args, torch.device("cpu"), 0, 1)

    def loader(corpus: str, rows: str, num_steps: int, seed: int = 0) -> CorpusLoader:
        return CorpusLoader(
            url,
            corpus=corpus,
            rows=rows,
            num_steps=num_steps,
            seed=seed,
            seq_len=recipe.seq_len,
            global_batch_size=recipe.global_batch_size,
            ignore_index=-100 if rows == "documents" else None,  # which torch ignores by default
            device="cpu",
        )

    with loader("train", rows, steps, seed=recipe.seed) as batches:
        for batch in batches:
            trainer.train_step(batch)
    found = []
    num_steps = EVAL_TOKENS // (recipe.seq_len * recipe.global_batch_size)
    for layout in LAYOUTS:
        with loader("val", layout, num_steps) as batches:
            found.append(float(trainer.evaluate(batches)))
    return found


def main(seq_len: int = 128, steps: int = 400) -> None:
    """Train and evaluate all; print a table in Markdown."""
    recipe = replace(Recipe.for_device("cpu"), seq_len=seq_len)
    corpus = text.build(HOME / "corpus", corpus_mb=CORPUS_MB, report=partial(print, file=sys.stderr))
    url = f"http://{HOST}:{claim_port(0)}"
    named = [f"{name}={corpus / name}" for name in text.SPLITS]
    with TemporaryDirectory() as state:
        serve = [text.program(), "serve", *named, "--host", HOST, "--port", url.rpartition(":")[2]]
        serve += ["--state-dir", state]
        print(
            "| seq_len | rows in training | seed | on windows | on rows of documents |\n|--:|---|--:|--:|--:|"
        )
        with running(serve, ready=partial(is_ready, url), log=Path(state) / "server.log"):
            for rows in LAYOUTS:
                every = []
                for seed in SEEDS:
                    found = losses(url, replace(recipe, seed=seed), rows, steps)
                    every.append(found)
                    print(f"| {seq_len:,} | {rows} | {seed} | {found[0]:.4f} | {found[1]:.4f} |", flush=True)
                means = [statistics.mean(each) for each in zip(*every, strict=True)]
                print(f"| {seq_len:,} | {rows} | mean | {means[0]:.4f} | {means[1]:.4f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
