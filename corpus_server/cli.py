"""`corpus-server serve | inspect | verify`.

Exit codes: 0 done, 1 the corpus is damaged, 2 a mistake in what was asked.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from corpus_server import __version__
from corpus_server.catalog import Catalog
from corpus_server.corpus import Corpus
from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.settings import CorpusSpec, Settings
from corpus_server.verify import record, verify

DAMAGED = 1
MISTAKE = 2
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")

app = typer.Typer(
    name="corpus-server",
    help="Serve large files of token ids to pretraining runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True)
_console = Console()

Path_ = Annotated[Path, typer.Argument(help="A token file or a folder of shards.", show_default=False)]
Dtype = Annotated[
    str | None, typer.Option(help="Token type of headerless files: uint8, uint16, uint32, int32.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def main() -> None:
    """Run the command line; a mistake is one line on standard error and exit code 2."""
    try:
        app()
    except CorpusServerError as error:
        remedy = f" ({error.remedy})" if error.remedy else ""
        _errors.print(f"[bold red]error:[/] {escape(error.detail + remedy)}", highlight=False, soft_wrap=True)
        sys.exit(MISTAKE)


def _version(wanted: bool) -> None:
    if wanted:
        _console.print(f"corpus-server {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
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
        "workers": workers,
        "state_dir": state_dir,
        "max_answer_bytes": max_answer_bytes,
        "max_concurrent_answers": max_concurrent_answers,
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
            _errors.print(
                f"[bold]{escape(corpus.name)}[/]: {corpus.num_tokens:,} {corpus.dtype.name} tokens in "
                f"{len(corpus.shards)} shards, {corpus.fingerprint[:20]}...",
                highlight=False,
            )
    from corpus_server.web.run import run

    run(settings, log_level=log_level)


@app.command()
def inspect(path: Path_, dtype: Dtype = None, as_json: AsJson = False) -> None:
    """Say what a token file or a folder of shards holds, without reading it through."""
    with Corpus.open(path, name="corpus", dtype=dtype) as corpus:
        described = corpus.describe()
        # A corpus gets its name when it is served.
        described["name"] = path.name
        if as_json:
            print(json.dumps(described, indent=2))
        else:
            _console.print(_facts(described), _shards(described))


@app.command("verify")
def verify_(
    path: Path_,
    dtype: Dtype = None,
    record_: Annotated[
        bool, typer.Option("--record", help="Compute full content hashes and keep them beside the shards.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte; compare with the recorded hashes, or record them."""
    with _progress(quiet=as_json) as report:
        if record_:
            recorded = record(path, dtype=dtype, progress=report)
        else:
            found = verify(path, dtype=dtype, progress=report)
    if record_:
        if as_json:
            print(json.dumps(dataclasses.asdict(recorded), default=str, indent=2))
        else:
            _console.print(
                f"recorded {recorded.num_tokens:,} tokens in {recorded.num_shards} shards: "
                f"{recorded.fingerprints['full']}\nhashes are in {recorded.sidecar}",
                highlight=False,
                soft_wrap=True,
            )
        return
    if as_json:
        print(json.dumps({"ok": found.ok, **dataclasses.asdict(found)}, default=str, indent=2))
    else:
        for problem in found.problems:
            _console.print(f"[red]damaged[/] {escape((problem.shard or 'corpus') + ': ' + problem.detail)}")
        for block in found.bad_blocks:
            _console.print(
                f"[red]damaged[/] {escape(block.shard)}, block {block.block}, tokens {block.start} to "
                f"{block.stop}: {escape(block.reason)}",
                highlight=False,
            )
        if found.ok:
            said = "matches its recorded hashes" if found.sidecar else "can be read; no hashes are recorded"
            _console.print(f"[green]ok[/] every byte {said}", highlight=False)
            if found.sidecar is None:
                _console.print("record them with: corpus-server verify --record PATH", highlight=False)
    if not found.ok:
        raise typer.Exit(DAMAGED)


def _facts(described: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in (
        ("corpus", described["name"]),
        ("tokens", f"{described['num_tokens']:,} ({described['dtype']})"),
        ("size", decimal(sum(shard["size_bytes"] for shard in described["shards"]))),
        (
            "documents",
            "no index" if described["num_documents"] is None else f"{described['num_documents']:,}",
        ),
        ("tokenizer", described["tokenizer"] or "none"),
        ("fingerprint", f"{described['fingerprint']} ({described['fingerprint_kind']})"),
    ):
        table.add_row(f"[bold]{name}[/]", escape(str(value)))
    return table


def _shards(described: dict[str, Any], most: int = 20) -> Table:
    shards = described["shards"]
    left_out = f"{len(shards) - most:,} more shards: --json lists them all" if len(shards) > most else None
    table = Table("shard", "format", "tokens", "dtype", "data at byte", "size", caption=left_out)
    for shard in shards[:most]:
        table.add_row(
            escape(shard["name"]),
            shard["format"],
            f"{shard['num_tokens']:,}",
            shard["dtype"],
            str(shard["data_offset"]),
            decimal(shard["size_bytes"]),
        )
    return table


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    """Yield a callback (bytes_done, bytes_total) that draws a bar on standard error."""
    with Progress(
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=_errors,
        transient=True,
        disable=quiet,
    ) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
