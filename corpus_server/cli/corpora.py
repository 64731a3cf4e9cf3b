"""`corpus-server inspect | verify | index`: what lies on disk."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from corpus_server.cli.common import DAMAGED, AsJson, CorpusPath, Dtype, console, errors, progress
from corpus_server.corpus import Corpus
from corpus_server.indexing import Indexed
from corpus_server.indexing import index as index_corpus
from corpus_server.verify import record
from corpus_server.verify import verify as verify_corpus


def inspect(path: CorpusPath, dtype: Dtype = None, as_json: AsJson = False) -> None:
    """Say what a token file or a folder of shards holds, without reading it through."""
    with Corpus.open(path, name="corpus", dtype=dtype) as corpus:
        described = corpus.describe()
        # A corpus gets its name when it is served.
        described["name"] = path.name
        if as_json:
            print(json.dumps(described, indent=2))
        else:
            console.print(_facts(described), _shards(described))


def verify(
    path: CorpusPath,
    dtype: Dtype = None,
    record_: Annotated[
        bool, typer.Option("--record", help="Compute full content hashes and keep them beside the shards.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte; compare with the recorded hashes, or record them."""
    with progress(quiet=as_json) as report:
        if record_:
            recorded = record(path, dtype=dtype, progress=report)
        else:
            found = verify_corpus(path, dtype=dtype, progress=report)
    if record_:
        if as_json:
            print(json.dumps(dataclasses.asdict(recorded), default=str, indent=2))
        else:
            console.print(
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
            console.print(f"[red]damaged[/] {escape((problem.shard or 'corpus') + ': ' + problem.detail)}")
        for block in found.bad_blocks:
            console.print(
                f"[red]damaged[/] {escape(block.shard)}, block {block.block}, tokens {block.start} to "
                f"{block.stop}: {escape(block.reason)}",
                highlight=False,
            )
        if found.ok:
            said = "matches its recorded hashes" if found.sidecar else "can be read; no hashes are recorded"
            console.print(f"[green]ok[/] every byte {said}", highlight=False)
            if found.sidecar is None:
                console.print("record them with: corpus-server verify --record PATH", highlight=False)
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


def index(
    path: CorpusPath,
    eot: Annotated[int, typer.Option(metavar="ID", help="Id of the end-of-text token.")],
    dtype: Dtype = None,
    force: Annotated[bool, typer.Option("--force", help="Write also what is right already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find where documents end, and keep it beside the shards for the routes that need it."""
    with progress(quiet=as_json) as report:
        indexed = index_corpus(path, eot=eot, dtype=dtype, force=force, progress=report)
    if indexed.found_nowhere:
        errors.print(
            f"[bold yellow]warning:[/] token {eot} occurs nowhere: is it the right id? "
            "Every shard is one document now",
            highlight=False,
            soft_wrap=True,
        )
    if as_json:
        described = {
            **dataclasses.asdict(indexed),
            "num_documents": indexed.num_documents,
            "found_nowhere": indexed.found_nowhere,
        }
        print(json.dumps(described, default=str, indent=2))
        return
    console.print(_indexed(indexed), highlight=False)


def _indexed(indexed: Indexed) -> str:
    lines = [f"{indexed.num_documents:,} documents in {indexed.num_tokens:,} tokens"]
    for action, said in (
        ("written", "indexed; the ends are beside them in *.documents"),
        ("kept", "were indexed already"),
        ("own", "left alone: their format has its own index"),
    ):
        if count := sum(shard.action == action for shard in indexed.shards):
            lines.append(f"  {count:,} shard{'s' if count > 1 else ''} {said}")
    return "\n".join(lines)
