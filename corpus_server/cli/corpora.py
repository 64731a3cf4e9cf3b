"""`corpus-server inspect | verify | index`: commands on files, without a server."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from corpus_server.catalog import Catalog
from corpus_server.cli.common import (
    DAMAGED,
    AsJson,
    CorpusArgument,
    console,
    print_facts,
    print_json,
    print_table,
    progress,
    say,
    split_names,
    table,
    warn,
    warn_of,
)
from corpus_server.cli.statistics import show_statistics, statistics
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.formats.registry import is_side_file, side_file
from corpus_server.corpus.index import Indexed
from corpus_server.corpus.index import index as index_corpus
from corpus_server.corpus.metadata.files import metadata_digest
from corpus_server.corpus.selection import ShardFile, files_left_out, is_metadata
from corpus_server.corpus.verify import record
from corpus_server.corpus.verify import verify as verify_corpus
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CorpusServerError, InvalidParameter, TextUnavailable, counted, printable
from corpus_server.plan.windows import Windows
from corpus_server.read.text import decode, mask_of, spans

_SHOWN_TOKENS = 32  # of the decoded beginning: two lines of a terminal
_SHOWN_FILES = 5


def inspect(
    spec: CorpusArgument,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Also count windows of this length, and the tokens that are in none."
        ),
    ] = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Also sample the lengths of documents and the frequencies of tokens."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Describe a corpus as `serve` would serve it, without reading all of it.

    Example: corpus-server inspect /data/fineweb --seq-len 1024
    """
    with Catalog.open([spec]) as catalog:
        corpus = catalog.corpus(spec.name)
        described = _describe(spec, corpus, seq_len)
        if stats:
            described["inspected"]["statistics"] = statistics(spec)
        if as_json:
            print_json(described)
        else:
            print_facts(_facts(described))
            print_table(_shards(described))
            if stats:
                show_statistics(described["inspected"]["statistics"], spec)
        warn_of(corpus, degenerate=stats)


def _describe(spec: CorpusSpec, corpus: Corpus, seq_len: int | None) -> dict[str, Any]:
    """Return the description that the server gives, and under `inspected` what only `inspect` says."""
    ids = corpus.sampled_ids
    masks = {shard.mask.path for shard in corpus.shards if shard.mask is not None}
    inspected: dict[str, Any] = {
        "reasons": {shard.name: shard.reason for shard in corpus.shards},
        "sample": None if ids is None else ids._asdict(),
        "documents_listed": any(shard.listed_ends is not None for shard in corpus.shards),
        "other_files": {
            file.name: _other(file)
            for file in (files_left_out(spec) if spec.store is None else ())
            if file.path not in masks
        },
    }
    try:
        if (table := corpus.metadata()) is not None:
            inspected["metadata"] = {"columns": table.columns, "digest": metadata_digest(table.paths)}
    except CorpusServerError as error:  # tokens are served without
        warn(error.detail)
    if seq_len is not None:
        counts = np.diff(corpus.starts).tolist()
        windows = np.diff(Windows([counts], seq_len=seq_len, stride=seq_len).shard_window.astype(np.int64))
        used = int(windows.sum()) * seq_len + int(np.count_nonzero(windows))
        inspected["windows"] = {
            "seq_len": seq_len,
            "num_windows": int(windows.sum()),
            "num_tokens_dropped": corpus.num_tokens - used,
        }
    if corpus.tokenizer is not None and corpus.num_tokens:
        begin, end = np.array([0]), np.array([min(_SHOWN_TOKENS, corpus.num_tokens)])
        number, first, count = corpus.pieces(begin, end).places[0].tolist()
        shard = corpus.shards[number]
        # Not through the map: a shard in an object store is mapped only once it is staged.
        start = shard.read_data(first * shard.dtype.itemsize, count * shard.dtype.itemsize)
        tokens = np.frombuffer(start, shard.dtype).tolist()
        try:
            inspected["text"] = decode(corpus, tokens)
            if shard.mask is not None:
                found = spans(corpus, 0, tokens, mask_of(corpus, 0, count))
                inspected["loss_mask"] = [[span.text, span.loss_mask] for span in found]
        except TextUnavailable as error:
            inspected["text"] = f"({error.detail})"
    return {**corpus.describe(), "inspected": inspected}


def _other(file: ShardFile) -> str:
    if is_metadata(file.name):
        return "metadata of documents"
    return side_file(file.path) or ("no tokens" if is_side_file(file.path) else "not chosen")


def verify(
    spec: CorpusArgument,
    record_: Annotated[
        bool, typer.Option("--record", help="Compute full content hashes and keep them beside the shards.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte and compare it with the recorded hashes, or record them.

    Example: corpus-server verify --record /data/fineweb
    """
    with progress(quiet=as_json) as report:
        if record_:
            recorded = record(spec, progress=report)
        else:
            found = verify_corpus(spec, progress=report)
    if record_:
        if as_json:
            print_json(dataclasses.asdict(recorded))
            return
        say(
            f"recorded {counted(recorded.num_tokens, 'token')} in {counted(recorded.num_shards, 'shard')}: "
            f"{recorded.fingerprints['full']}\nhashes are in {recorded.sidecar}"
        )
        return
    if as_json:
        print_json({"ok": found.ok, **dataclasses.asdict(found)})
    else:
        damages = [f"{problem.shard or 'corpus'}: {problem.detail}" for problem in found.problems]
        for block in found.bad_blocks:
            where = f"block {block.block}, tokens [{block.start}, {block.stop})"
            damages.append(f"{block.shard}, {where}: {block.reason}")
        for damage in damages:
            console.print(f"[red]damaged[/] {escape(damage)}")
        if found.ok:
            said = "matches its recorded hashes" if found.sidecar else "can be read; no hashes are recorded"
            console.print(f"[green]ok[/] every byte {said}")
            if found.sidecar is None:
                say(f"record them with: {spec.command('verify --record')}")
    if not found.ok:
        raise typer.Exit(DAMAGED)
    with Catalog.open([spec]) as catalog:
        warn_of(catalog.corpus(spec.name), degenerate=True)


def _facts(described: dict[str, Any]) -> dict[str, str]:
    inspected, documents = described["inspected"], described["num_documents"]
    no_index = "no index"
    if inspected["documents_listed"]:
        no_index += "; corpus-server index reads them from the .csv.gz files"
    facts = {
        "corpus": described["name"],
        "tokens": f"{described['num_tokens']:,} ({described['dtype']})",
        "size": decimal(sum({shard["file"]: shard["size_bytes"] for shard in described["shards"]}.values())),
        "documents": no_index if documents is None else f"{documents:,}",
        "end of text": _end_of_text(described),
        "tokenizer": _tokenizer(described),
        "fingerprint": described["fingerprint"],
    }
    if view := described.get("view"):
        facts["view of"] = f"{view['fingerprint']}, {counted(view['num_documents'], 'document')}"
        facts["made with"] = json.dumps(view["made"])
    if described["num_masks"]:
        num_shards = f"{described['num_masks']:,} of {counted(len(described['shards']), 'shard')}"
        masks = [shard["loss_mask"] for shard in described["shards"] if "loss_mask" in shard]
        weights = sum(mask["dtype"] == "float16" for mask in masks)
        kind = f" ({weights:,} of weights, float16)" if weights else ""
        facts["loss masks"] = f"for {num_shards}{kind}; mask=no leaves them out"
    for name in ("address", "license"):
        if described[name] is not None:
            facts[name] = described[name]
    if metadata := inspected.get("metadata"):
        facts["metadata"] = ", ".join(f"{name} ({kind})" for name, kind in metadata["columns"].items())
    if (ids := inspected["sample"]) is not None:
        facts["largest id"] = f"{ids['largest']:,} among {ids['num_tokens']:,} sampled tokens"
        if ids["smallest"] < 0:
            facts["smallest id"] = f"{ids['smallest']:,}"
    if windows := inspected.get("windows"):
        facts["windows"] = (
            f"{windows['num_windows']:,} of {windows['seq_len']:,} + 1 tokens; "
            f"not in windows: {counted(windows['num_tokens_dropped'], 'token')} at the ends of shards"
        )
    # The shards of a corpus are mostly alike: each reason stands once.
    reasons = Counter(
        f"{each['format']}: {inspected['reasons'][each['name']]}" for each in described["shards"]
    )
    facts["recognised"] = "\n".join(f"{count:,} x {reason}" for reason, count in reasons.items())
    if others := [f"{name} ({what})" for name, what in inspected["other_files"].items()]:
        more = [f"and {len(others) - _SHOWN_FILES:,} more"] if len(others) > _SHOWN_FILES else []
        facts["other files"] = "\n".join([*others[:_SHOWN_FILES], *more])
    if "text" in inspected:
        lines = inspected["text"].split("\n")
        facts["begins"] = "\n".join(map(printable, lines))  # it may hold commands of a terminal
    if "loss_mask" in inspected:
        parts = [repr(text) for text, weight in inspected["loss_mask"] if weight == 0]
        facts["masked there"] = " ".join(parts) or "nothing"
        if weights := [
            f"{weight:g} {text!r}" for text, weight in inspected["loss_mask"] if weight not in (0, 1)
        ]:
            facts["weights there"] = " ".join(weights)
    return facts


def _tokenizer(described: dict[str, Any]) -> str:
    name, identity = described["tokenizer"], described["tokenizer_identity"]
    return (name or "none") if identity in {None, name} else f"{name or 'none'} ({identity})"


def _shards(described: dict[str, Any], most: int = 20) -> Table:
    shards = described["shards"]
    left_out = (
        f"{counted(len(shards) - most, 'more shard')}: --json lists them all" if len(shards) > most else None
    )
    shown = table("shard", "format", "tokens", "dtype", "data at byte", "size", caption=left_out)
    for shard in shards[:most]:
        shown.add_row(
            escape(shard["name"]),
            shard["format"],
            f"{shard['num_tokens']:,}",
            shard["dtype"],
            str(shard["data_offset"]),
            decimal(shard["size_bytes"]),
        )
    return shown


def index(
    spec: CorpusArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Rewrite sidecars that are up to date, too.")
    ] = False,
    metadata: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE",
            help="Attach the rows of a table (Parquet, JSON lines, CSV; a quoted pattern) to the documents, "
            "in their order.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="With --metadata: find rows by a column that is there already."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,...", help="With --metadata: these columns.", show_default="all but the text"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find where documents end (PATH,eot=ID), and keep the ends in sidecars beside the shards.

    With --metadata also say where the documents came from, in Parquet files beside the shards.

    Example: corpus-server index /data/fineweb,eot=50256
    """
    if metadata is None and (key is not None or keep is not None):
        raise InvalidParameter.expected("metadata", "given with --key and --keep", None)
    response: dict[str, Any] = {}
    lines: list[str] = []
    if metadata is None or force or spec.eot is not None or not _has_documents(spec):
        with progress(quiet=as_json) as report:
            indexed = index_corpus(spec, force=force, progress=report)
        if indexed.found_nowhere:
            warn(f"token {indexed.eot} occurs nowhere: is it the right id? Every shard is one document now")
        if spec.eot is not None and not indexed.is_sure:
            warn(
                f"nothing tells whether documents end or begin with token {spec.eot}: now they end with it; "
                "say eot_at=last where the corpus is served if that is right, or index it with eot_at=first"
            )
        counts = {"num_documents": indexed.num_documents, "found_nowhere": indexed.found_nowhere}
        response |= {**dataclasses.asdict(indexed), **counts}
        lines += _indexed(indexed)
    if metadata is not None:
        from corpus_server.tools.viewing.attach import attach

        with progress(quiet=as_json, counts="documents") as report:
            names = split_names("keep", keep)
            attached = attach(spec, metadata, key=key, keep=names, progress=report)
        response["metadata"] = dataclasses.asdict(attached)
        columns = ", ".join(f"{name} ({kind})" for name, kind in attached.columns.items())
        lines.append(f"{counted(attached.num_documents, 'row')} of metadata in {attached.folder}: {columns}")
    if as_json:
        print_json(response)
    else:
        say("\n".join(lines))


def _end_of_text(described: dict[str, Any]) -> str:
    if described["eot"] is None:
        return "not known"
    return f"{described['eot']}, which documents {'begin' if described['eot_first'] else 'end'} with"


def _has_documents(spec: CorpusSpec) -> bool:
    with Corpus.open(dataclasses.replace(spec, view=None)) as corpus:
        return corpus.num_documents is not None


def _indexed(indexed: Indexed) -> list[str]:
    lines = [f"{counted(indexed.num_documents, 'document')} in {counted(indexed.num_tokens, 'token')}"]
    for action, said in (
        ("written", "indexed; the ends are beside them in *.documents"),
        ("kept", "indexed already"),
        ("own", "left alone: their format has its own index"),
    ):
        if count := sum(shard.action == action for shard in indexed.shards):
            lines.append(f"  {counted(count, 'shard')} {said}")
    return lines
