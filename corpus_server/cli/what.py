"""`corpus-server what`: what a step of another trainer's run saw, from the run's configuration and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from corpus_server.cli.common import read_text, tell
from corpus_server.cli.export import print_steps
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.tools.importing import OwnOrder, import_plan, trainer_of


def what(
    config: Annotated[
        Path,
        typer.Argument(help="Megatron's arguments, as on its command line; else JSON or YAML; - for stdin."),
    ],
    step: Annotated[int, typer.Option(min=0, help="First training step.")],
    trainer: Annotated[
        OwnOrder | None,
        typer.Option(help="Whose configuration it is.", show_default="the one whose fields it has"),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Consecutive steps.")] = 1,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="For text in place of token ids: a tokenizer.json, or ORG/NAME of the Hub."),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Inputs per row, instead of the file's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a step, instead of the file's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the run, instead of the file's.")] = None,
    num_samples: Annotated[
        int | None, typer.Option(help="Samples of the run, instead of the file's.")
    ] = None,
    num_epochs: Annotated[
        int | None, typer.Option(help="Epochs of a run of OLMo, instead of the file's.")
    ] = None,
) -> None:
    """Print what a step of a run of Megatron, GPT-NeoX or OLMo saw, as `export` does; it changes nothing.

    Example: corpus-server what arguments.txt --step 81204 --tokenizer /data/tokenizer.json
    """
    text = read_text(config, "config")
    if trainer is None:
        trainer = trainer_of(text)
        tell(f"read as a configuration of {trainer}; --trainer names another")
    imported = import_plan(
        trainer,
        text,
        order=trainer,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        num_samples=num_samples,
        num_epochs=num_epochs,
    )
    for each in imported.left_out:
        tell(f"[yellow]not looked at:[/] {escape(each)}")
    from corpus_server.cli.files import open_files  # loads pydantic, which the other commands do not wait for

    option = "" if tokenizer is None else f",tokenizer={tokenizer}"
    texts = (f"{name}={path}{option}" for name, path in imported.corpora.items())
    with open_files(*map(CorpusSpec.parse, texts)) as files:
        plan = files.ask("/v1/plans", json.dumps(imported.document).encode())
        print_steps(files, plan["id"], step, count)
