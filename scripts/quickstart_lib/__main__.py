"""The tour: corpus, server, training, and what to try next. `scripts/quickstart` sets up and runs it."""

import contextlib
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer
from rich.console import Console

from corpus_client.errors import CorpusClientError

from . import server, text
from .train import CheckpointMismatch, Limit, Recipe, Report, choose_device, train, validation_loss

HOME = Path(".cache/quickstart")  # below the root of the repository, where scripts/quickstart goes
SHOWN_LINES = 16
INTERRUPTED = 130  # what shells report for Ctrl-C


def run(
    seconds: Annotated[float, typer.Option(min=1, help="Train for so long.")] = 60,
    steps: Annotated[int | None, typer.Option(min=1, help="Train for so many steps instead.")] = None,
    corpus_mb: Annotated[int, typer.Option(min=1, max=30, help="Megabytes of text.")] = 12,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the server; 0 takes a free one.")] = 0,
    keep_serving: Annotated[bool, typer.Option("--keep-serving", help="Until Ctrl-C.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what was trained before.")] = False,
) -> None:
    """Build a corpus of real text, serve it, and train a small GPT from it over HTTP."""
    console = Console(highlight=False, soft_wrap=True)
    # By default SIGTERM would end this process without stopping the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    limit = Limit(seconds=seconds, steps=steps)
    try:
        report = _tour(
            console, corpus_mb=corpus_mb, port=port, limit=limit, keep_serving=keep_serving, fresh=fresh
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (CorpusClientError, CheckpointMismatch, server.ServerFailed, OSError, ValueError) as error:
        console.print(f"[red]quickstart failed:[/] {type(error).__name__}:", end=" ")
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    if not report.is_complete:
        raise typer.Exit(INTERRUPTED)


def _tour(
    console: Console, *, corpus_mb: int, port: int, limit: Limit, keep_serving: bool, fresh: bool
) -> Report:
    _title(console, "A corpus of the text that comes with Python")
    corpus = text.build(HOME / "corpus", corpus_mb=corpus_mb, report=console.print)
    console.print(f"{corpus} holds {' and '.join(text.SPLITS)}, as llm.c shards with a tokenizer.json")

    port = server.claim_port(port)
    url = f"http://127.0.0.1:{port}"
    corpora = {split: corpus / split for split in text.SPLITS}
    command = server.serve_command(corpora, port=port, state_dir=HOME / "state")
    _title(console, f"A server on {url}")
    console.print(shlex.join(command), markup=False)
    with server.running(command, url=url, log=HOME / "server.log"):
        device = choose_device()
        recipe = Recipe.for_device(device, corpus="train", vocab_size=text.VOCAB_SIZE)
        checkpoint = HOME / f"{corpus.name}-{device.type}.pt"
        if fresh:
            checkpoint.unlink(missing_ok=True)

        _title(console, f"Training on {device.type}, {recipe.tokens_per_step:,} tokens a step")
        report = train(url, recipe, limit=limit, checkpoint=checkpoint, device=device, console=console)
        if not report.is_complete:
            console.print(f"stopped; the next run goes on from {checkpoint} at step {report.next_step:,}")
            return report
        unseen = validation_loss(url, recipe, corpus="validation", checkpoint=checkpoint, device=device)
        console.print(
            f"loss {report.first_loss:.2f} -> {report.last_loss:.2f} in {report.num_steps:,} steps "
            f"({unseen:.2f} on text that it never saw), {report.tokens_per_second:,.0f} tokens/s, "
            f"{report.stall_share:.2%} of the time waiting for data"
        )
        _show_first_batch(console, url, recipe)
        _show_what_to_try(console, url, recipe, command, checkpoint, is_serving=keep_serving)
        if keep_serving:
            console.print("\nserving until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    return report


def _show_first_batch(console: Console, url: str, recipe: Recipe) -> None:
    _title(console, "What step 0 saw, its first row")
    one_row = _query(
        url, "batches", recipe, step=0, rank=0, world_size=recipe.global_batch_size, format="text"
    )
    lines = server.get_text(one_row).splitlines()
    for line in lines[:SHOWN_LINES]:
        console.print(line, markup=False)
    if len(lines) > SHOWN_LINES:
        console.print(f"[dim]... {len(lines) - SHOWN_LINES} more lines[/]")


def _show_what_to_try(
    console: Console, url: str, recipe: Recipe, command: list[str], checkpoint: Path, *, is_serving: bool
) -> None:
    _title(console, "To try")
    if not is_serving:
        console.print("# start the server again (Ctrl-C stops it)")
        console.print(shlex.join(command), markup=False)
    console.print("# what is served; where the rows of step 1000 lie; the whole batch of step 0 as text")
    for address in (
        f"{url}/v1/corpora",
        _query(url, "indices", recipe, step=1000),
        _query(url, "batches", recipe, step=0, format="text"),
    ):
        console.print(f"curl -s '{address}'", markup=False)
    console.print(f"# scripts/quickstart goes on from {checkpoint}; --fresh starts anew")


def _query(url: str, route: str, recipe: Recipe, **parameters: int | str) -> str:
    plan = {
        "corpus": recipe.corpus,
        "seq_len": recipe.model.seq_len,
        "batch_size": recipe.global_batch_size,
        "seed": recipe.seed,
    }
    return f"{url}/v1/{route}?{urlencode({**plan, **parameters})}"


def _title(console: Console, title: str) -> None:
    console.print(f"\n[bold]{title}[/]")


if __name__ == "__main__":
    typer.run(run)
