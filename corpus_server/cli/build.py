"""`corpus-server build | merge`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from corpus_server.cli.common import (
    AsJson,
    console,
    errors,
    note,
    print_json,
    progress,
    say,
    split_names,
    table,
    warn,
    warn_of,
)
from corpus_server.corpus import Corpus
from corpus_server.corpus_spec import tokenizer_source
from corpus_server.errors import InvalidParameter
from corpus_server.tools.building import Split
from corpus_server.tools.building.driver import Reading, RunParts, choose_options, eot_disagreement, name_of
from corpus_server.tools.building.driver import build as build_corpus
from corpus_server.tools.building.inputs import fetch_source
from corpus_server.tools.building.job import SHARD_TOKENS
from corpus_server.tools.building.kept import columns_without_values
from corpus_server.tools.building.manifest import Manifest, spec_of
from corpus_server.tools.building.merge import merge as merge_corpora
from corpus_server.tools.building.running import in_processes, on_ray
from corpus_server.tools.hub import fetched_tokenizer


def build(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files, folders, quoted patterns or hf://datasets/ORG/NAME\\[/PATH]: .txt (one document), "
            ".jsonl, both also .gz and .zst, .parquet, .arrow, .mds, litData's chunks. SOURCE#train takes "
            "the files whose names say so, SOURCE?text=FIELD has its text in that field.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the corpus; must not exist.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="`bytes`, a tokenizer.json, tiktoken ranks, a SentencePiece model, or a repository of the "
            "Hugging Face Hub: `gpt2`, ORG/NAME, hf://ORG/NAME@REVISION."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Of folders read only the files that match, as text if of no other kind: '*.md'; may be "
            "repeated.",
        ),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    column: Annotated[
        str | None, typer.Option(help="Field or column that holds lists of token ids, instead of text.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="documents|packed",
            help="With --column: whether a row is a document, or a piece of a running text with end-of-text "
            "tokens in it, as group_texts packs rows.",
            show_default="documents, unless the first rows look packed",
        ),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Field with conversations, rendered by the tokenizer's chat template; all but the turns of "
            "the assistant is masked.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File of another template for --chat.", show_default=False)
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD,...|none",
            help="With --column: fields that say which tokens are targets of training: labels (-100: not), "
            "attention_mask, or 0 and 1. They become loss masks.",
        ),
    ] = None,
    eot: Annotated[
        int | None,
        typer.Option(
            metavar="ID", help="End-of-text token, put behind each document.", show_default="the tokenizer's"
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SHARE",
            help="Put this share of the documents into OUT/NAME, the rest into OUT/train; may be repeated.",
        ),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Most tokens of a shard.")] = SHARD_TOKENS,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD,...", help="Fields or columns that become the metadata of the documents."
        ),
    ] = None,
    cut_texts: Annotated[
        bool,
        typer.Option(
            "--cut-texts",
            help="Take texts of any length: pieces that end with lines are encoded; ids may differ there.",
        ),
    ] = False,
    on_error: Annotated[
        str,
        typer.Option(
            metavar="refuse|skip",
            help="What a document that cannot be read or encoded does: it ends the build, or is left out and "
            "listed in OUT/skipped.txt.",
        ),
    ] = "refuse",
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that tokenize.", show_default="one per core")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Tokenize on a Ray cluster: RAY_ADDRESS, or one that runs here.")
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Only tokenize share K of N, counted from 0: one task of a job array. The same command "
            "without --task then makes the corpus.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew where an unfinished build lies beside OUT.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a corpus of text or token ids. After an interruption the same command continues.

    Example: corpus-server build 'texts/*.jsonl' --tokenizer tokenizer.json --out corpus
    """
    if ray and processes is not None:
        raise InvalidParameter.expected("processes", "left out with --ray", processes)
    if fresh and task is not None:
        raise InvalidParameter.expected("fresh", "left out with --task, as tasks share the work", True)
    if tokenizer is not None:
        tokenizer = fetched_tokenizer(tokenizer_source(tokenizer), note)
    options = choose_options(
        tokenizer=tokenizer,
        eot=eot,
        text_field=text_field,
        column=column,
        rows=rows,
        splits=tuple(map(_split, split or ())),
        shard_tokens=shard_tokens,
        keep=split_names("keep", keep) or (),
        mask=split_names("mask", mask) or (),
        chat=chat,
        chat_template=chat_template,
        cut_texts=cut_texts,
        on_error=on_error,
    )
    if eot is None and (disagreement := eot_disagreement(options)) is not None:
        warn(disagreement)
    num_processes = processes or len(os.sched_getaffinity(0))
    run_parts: RunParts = on_ray if ray else partial(in_processes, num_processes=num_processes)
    share = None if task is None else _task(task)
    sources = [fetch_source(source, include or (), note) for source in sources]
    try:
        with progress(quiet=as_json) as report:
            built, reading = build_corpus(
                sources, out, options, run_parts, report, include=include or (), fresh=fresh, task=share
            )
    except KeyboardInterrupt:
        note("stopped; the same command continues")
        raise
    if task is not None:
        return
    said = {out / (name or ""): manifest for name, manifest in built.items()}
    for path in said if keep else ():
        for name in columns_without_values(path):
            warn(f"{path}: no document has a value of {name!r}")
    for path in said:
        with Corpus.open(spec_of(path)) as corpus:
            warn_of(corpus, degenerate=True)
    if as_json:
        wanted = ("num_tokens", "num_documents", "num_shards", "dtype", "fingerprint", "eot", "num_targets")
        print_json({str(path): _facts(manifest, wanted) for path, manifest in said.items()})
    for path, manifest in () if as_json else said.items():
        say(
            f"{path}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} {manifest.dtype} tokens "
            f"in {len(manifest.shards):,} shard{'s' if len(manifest.shards) > 1 else ''}"
        )
        if (targets := manifest.num_targets) is not None:
            say(f"  loss masks: {targets:,} tokens are targets ({targets / manifest.num_tokens:.1%})")
    if options.is_packed and any(manifest.num_documents == 1 for manifest in said.values()):
        warn(
            f"the rows hold no end-of-text token {options.eot} between two documents, so all of their text "
            "is one document: is it the right token?"
        )
    if not as_json:
        eot_name = name_of(options.tokenizer, options.eot)
        if options.is_packed:
            say("rows are one running text: no token was put between them")
        say(f"documents end with token {options.eot}" + ("" if eot_name is None else f" {eot_name!a}"))
    if reading is not None:
        _tell(reading, errors if as_json else console)


def merge(
    corpora: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Folders that build wrote, or their manifests.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the merged corpus; must not exist.")],
    copy: Annotated[
        bool,
        typer.Option("--copy", help="Copy the shards: for another file system, or while they are served."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Join built corpora by hard links, without moving a token.

    Example: corpus-server merge corpus-a corpus-b --out corpus
    """
    merged = {out / (name or ""): made for name, made in merge_corpora(corpora, out, copy=copy).items()}
    if as_json:
        wanted = ("num_tokens", "num_documents", "num_shards", "fingerprint")
        print_json([{"path": path, **_facts(manifest, wanted)} for path, manifest in merged.items()])
        return
    for path, manifest in merged.items():
        say(
            f"{path}: {manifest.num_tokens:,} tokens of {manifest.num_documents:,} documents in "
            f"{len(manifest.shards):,} shards, {manifest.fingerprint}"
        )


def _tell(reading: Reading, where: Console) -> None:
    """Print what was read, what was left out, and why."""
    for said in reading.missing:
        warn(f"{said}; were all of them copied?")
    if reading.dropped is not None:
        warn(reading.dropped)
    made = table("", "documents", "files", "why", "", box=None, show_header=True)
    made.add_row("read", f"{reading.num_documents:,}", f"{reading.num_files:,}", "", "")
    for why, count in sorted(reading.documents_left_out.items()):
        made.add_row("left out", f"{count:,}", "", why, "")
    reasons: dict[str, list[Path]] = {}
    for path, why in reading.files_left_out:
        reasons.setdefault(why, []).append(path)
    for why, paths in reasons.items():
        names = ", ".join(path.name for path in paths[:2]) + ", ..." * (len(paths) > 2)
        made.add_row("left out", "", f"{len(paths):,}", escape(why), escape(names))
    where.print(made)


def _facts(manifest: Manifest, names: Sequence[str]) -> dict[str, Any]:
    known = {**dataclasses.asdict(manifest), "num_shards": len(manifest.shards)}
    return {name: known[name] for name in names}


def _split(text: str) -> Split:
    name, _, share = text.partition("=")
    try:
        return Split(name=name, share=float(share))
    except ValueError:
        raise InvalidParameter.expected("split", "NAME=SHARE, for example val=0.001", text) from None


def _task(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if number.isdecimal() and count.isdecimal() and int(number) < int(count):
        return int(number), int(count)
    raise InvalidParameter.expected("task", "K/N with K in [0, N - 1], for example 0/16", text)
