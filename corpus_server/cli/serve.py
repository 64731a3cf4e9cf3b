"""`corpus-server serve`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from corpus_server.catalog import Catalog
from corpus_server.cli.common import Dtype, errors
from corpus_server.errors import InvalidParameter
from corpus_server.settings import CorpusSpec, Settings

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def serve(
    corpora: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH|NAME=PATH...",
            help="Corpora: a token file or a folder of shards each; the name defaults to the file's.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="corpus.toml; the command line goes before it.", exists=True)
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one. [default: 8000]")] = None,
    uds: Annotated[
        Path | None,
        typer.Option(help="Unix socket to listen on, instead of a port, or beside a --host or --port given."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. [default: 1]")] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Keeps the plans that were seen. [default: ~/.local/state/corpus-server]"),
    ] = None,
    dtype: Dtype = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="`bytes` or a tokenizer.json, for corpora named here.")
    ] = None,
    max_answer_bytes: Annotated[int | None, typer.Option(help="Largest body. [default: 64 MiB]")] = None,
    max_concurrent_answers: Annotated[
        int | None, typer.Option(help="Token answers under way per process; more get 503. [default: 64]")
    ] = None,
    read_ahead_bytes: Annotated[
        int | None,
        typer.Option(help="Page cache per process for reading ahead; 0 turns it off. [default: 256 MiB]"),
    ] = None,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info or debug.")] = "info",
) -> None:
    """Serve corpora over HTTP until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if log_level not in LOG_LEVELS:
        raise InvalidParameter(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {log_level!r}")
    specs = tuple(CorpusSpec.parse(text, dtype=dtype, tokenizer=tokenizer) for text in corpora or ())
    given = {
        "host": host,
        "port": port,
        "uds": None if uds is None else uds.expanduser().absolute(),
        "workers": workers,
        "state_dir": state_dir,
        "max_answer_bytes": max_answer_bytes,
        "max_concurrent_answers": max_concurrent_answers,
        "read_ahead_bytes": read_ahead_bytes,
    }
    if config is not None:
        settings = Settings.from_toml(config, corpora=specs, **given)
    else:
        settings = Settings(
            corpora=specs,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
    # Opened once here: a mistake is one line and an exit code, not a worker that keeps restarting.
    with Catalog.open(settings.corpora) as catalog:
        for corpus in catalog.corpora.values():
            errors.print(
                f"[bold]{escape(corpus.name)}[/]: {corpus.num_tokens:,} {corpus.dtype.name} tokens in "
                f"{len(corpus.shards)} shards, {corpus.fingerprint[:20]}...",
                highlight=False,
            )
    from corpus_server.web.run import run

    run(settings, log_level=log_level)
