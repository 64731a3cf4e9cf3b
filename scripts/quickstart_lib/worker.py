"""A training worker: the quick start's model, from a server that runs elsewhere.

python -m quickstart_lib.worker http://data:8000 --corpus web --vocab-size 50304 --steps 1000
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from corpus_client.errors import CorpusClientError

from .train import CheckpointMismatch, Limit, Recipe, choose_device, train


def run(
    url: Annotated[str, typer.Argument(help="The server, as in http://data:8000.")],
    corpus: Annotated[str, typer.Option(help="Name of the corpus there.")],
    vocab_size: Annotated[int, typer.Option(min=1, help="Largest token id + 1, or more.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Train for so many steps...")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="...or for so long.")] = 60,
    checkpoint: Annotated[Path, typer.Option(help="Where to go on from, and to save.")] = Path(
        "checkpoint.pt"
    ),
) -> None:
    """Train a small GPT from a corpus server."""
    device = choose_device()
    recipe = Recipe.for_device(device, corpus=corpus, vocab_size=vocab_size)
    limit = Limit(seconds=seconds, steps=steps)
    try:
        report = train(url, recipe, limit=limit, checkpoint=checkpoint, device=device, console=Console())
    except (CorpusClientError, CheckpointMismatch) as error:
        print(f"worker: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(
        f"{report.num_steps:,} steps on {device.type}: "
        f"loss {report.first_loss:.2f} -> {report.last_loss:.2f}, {report.tokens_per_second:,.0f} tokens/s, "
        f"{report.stall_share:.2%} of the time waiting for data"
    )


if __name__ == "__main__":
    typer.run(run)
