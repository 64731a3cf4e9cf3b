"""`corpus-server build`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from corpus_server.building import Split
from corpus_server.building.driver import RunParts, choose_options
from corpus_server.building.driver import build as build_corpus
from corpus_server.building.job import SHARD_TOKENS, Report
from corpus_server.building.local import LocalProcesses
from corpus_server.building.on_ray import on_ray
from corpus_server.cli.common import AsJson, console, errors, print_json
from corpus_server.errors import InvalidParameter


def build(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files, folders or quoted patterns: .txt (one document), .jsonl, both also .gz and .zst, "
            ".parquet, .arrow, .mds, litData's chunks.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the corpus; must not exist.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="`bytes`, a tokenizer.json, tiktoken ranks or a SentencePiece model."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    column: Annotated[
        str | None, typer.Option(help="Field or column that holds lists of token ids, instead of text.")
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
    pack: Annotated[
        str | None,
        typer.Option(metavar="best-fit", help="Put whole documents into rows of seq_len + 1 tokens."),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Inputs per row, with --pack.")] = None,
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
    as_json: AsJson = False,
) -> None:
    """Make a corpus of text or token ids. After an interruption the same command continues."""
    if ray and processes is not None:
        raise InvalidParameter.expected("processes", "left out with --ray", processes)
    options = choose_options(
        tokenizer=tokenizer,
        eot=eot,
        text_field=text_field,
        column=column,
        splits=tuple(_split(text) for text in split or ()),
        shard_tokens=shard_tokens,
        pack=pack,
        seq_len=seq_len,
    )
    run_parts: RunParts = on_ray if ray else LocalProcesses(processes or len(os.sched_getaffinity(0)))
    with _progress(quiet=as_json) as report:
        share = None if task is None else _task(task)
        built = build_corpus(sources, out, options, run_parts, report, task=share)
    if task is not None:
        return
    said = {out / (name or ""): manifest for name, manifest in built.items()}
    if as_json:
        print_json(
            {
                str(path): {
                    "num_tokens": manifest.num_tokens,
                    "num_documents": manifest.num_documents,
                    "num_shards": len(manifest.shards),
                    "dtype": manifest.dtype,
                    "fingerprint": manifest.fingerprint,
                    "packing": manifest.packing and dataclasses.asdict(manifest.packing),
                }
                for path, manifest in said.items()
            }
        )
        return
    for path, manifest in said.items():
        console.print(
            f"{path}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} {manifest.dtype} tokens "
            f"in {len(manifest.shards):,} shard{'s' if len(manifest.shards) > 1 else ''}",
            soft_wrap=True,
        )
        if (packing := manifest.packing) is not None:
            filled = 1 - packing.num_padding / manifest.num_tokens
            console.print(
                f"  rows of {packing.row_tokens:,} tokens, {filled:.2%} filled; {packing.num_cut:,} longer "
                f"documents are cut. Train with stride {packing.row_tokens}",
                soft_wrap=True,
            )


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


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Report]:
    """Yield a callback that draws a bar with tokens/s and the time left on standard error."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=quiet or not errors.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None, rate="")

        def report(what: str, done: int, total: int, num_tokens: int) -> None:
            if bar.tasks[task].description != what:
                # What earlier runs did does not count towards the speed of this one.
                bar.reset(task, description=what, completed=done, total=total)
            seconds = bar.tasks[task].elapsed or 0
            rate = f"{num_tokens / seconds / 1e6:.1f} M tokens/s" if num_tokens and seconds else ""
            bar.update(task, completed=done, total=total, rate=rate)

        yield report
