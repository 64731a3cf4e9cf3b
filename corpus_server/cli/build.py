"""`corpus-server build | merge`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
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
    print_table,
    progress,
    say,
    split_names,
    table,
    warn,
    warn_of,
)
from corpus_server.corpus import Corpus
from corpus_server.corpus_spec import tokenizer_source
from corpus_server.errors import InvalidParameter, counted
from corpus_server.tools.building import Split
from corpus_server.tools.building.driver import Reading, RunParts, choose_options, eot_disagreement, name_of
from corpus_server.tools.building.driver import build as build_corpus
from corpus_server.tools.building.inputs import fetch_source
from corpus_server.tools.building.job import SHARD_TOKENS, BuildOptions
from corpus_server.tools.building.kept import columns_without_values
from corpus_server.tools.building.manifest import Manifest, spec_of
from corpus_server.tools.building.merge import merge as merge_corpora
from corpus_server.tools.building.running import in_processes, on_ray
from corpus_server.tools.hub import fetched_tokenizer

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Files, folders, quoted patterns or hf://datasets/ORG/NAME\\[/PATH]: .txt (one document), "
        ".jsonl, both also .gz and .zst, .parquet, .arrow, .mds, litData's chunks. SOURCE#train takes "
        "the files whose names say so, SOURCE?text=FIELD has its text in that field.",
        show_default=False,
    ),
]
OutOption = Annotated[Path, typer.Option(help="Folder of the corpus; must not exist.")]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="`bytes`, a tokenizer.json, tiktoken ranks, a SentencePiece model, or a repository of the "
        "Hugging Face Hub: `gpt2`, ORG/NAME, hf://ORG/NAME@REVISION."
    ),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Of folders read only the files that match, as text if of no other kind: '*.md'; may be "
        "repeated.",
    ),
]
TextFieldOption = Annotated[str, typer.Option(help="Field or column that holds the text.")]
ColumnOption = Annotated[
    str | None, typer.Option(help="Field or column that holds lists of token ids, instead of text.")
]
RowsOption = Annotated[
    str | None,
    typer.Option(
        metavar="documents|packed",
        help="With --column: whether a row is a document, or a piece of a running text with end-of-text "
        "tokens in it, as group_texts packs rows.",
        show_default="documents, unless the first rows look packed",
    ),
]
ChatOption = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD",
        help="Field with conversations, rendered by the tokenizer's chat template; all but the turns of "
        "the assistant is masked.",
    ),
]
ChatTemplateOption = Annotated[
    Path | None, typer.Option(help="File of another template for --chat.", show_default=False)
]
MaskOption = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD,...|none",
        help="With --column: fields that say which tokens are targets of training: labels (-100: not), "
        "attention_mask, 0 and 1, or weights as floating-point numbers. They become loss masks.",
    ),
]
EotOption = Annotated[
    int | None,
    typer.Option(
        metavar="ID", help="End-of-text token, put behind each document.", show_default="the tokenizer's"
    ),
]
SplitOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=SHARE",
        help="Put this share of the documents into OUT/NAME, the rest into OUT/train; may be repeated.",
    ),
]
ShardTokensOption = Annotated[int, typer.Option(help="Most tokens of a shard.")]
KeepOption = Annotated[
    str | None,
    typer.Option(metavar="FIELD,...", help="Fields or columns that become the metadata of the documents."),
]
CutTextsOption = Annotated[
    bool,
    typer.Option(
        "--cut-texts",
        help="Take texts of any length: pieces that end with lines are encoded; ids may differ there.",
    ),
]
OnErrorOption = Annotated[
    str,
    typer.Option(
        metavar="refuse|skip",
        help="What a document that cannot be read or encoded does: it ends the build, or is left out and "
        "listed in OUT/skipped.txt.",
    ),
]
ProcessesOption = Annotated[
    int | None, typer.Option(min=1, help="Processes that tokenize.", show_default="one per core")
]
RayOption = Annotated[
    bool, typer.Option("--ray", help="Tokenize on a Ray cluster: RAY_ADDRESS, or one that runs here.")
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Only tokenize share K of N, counted from 0: one task of a job array. The same command "
        "without --task then makes the corpus.",
    ),
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Begin anew where an unfinished build lies beside OUT.")
]


def build(
    sources: Sources,
    out: OutOption,
    tokenizer: TokenizerOption = None,
    include: IncludeOption = None,
    text_field: TextFieldOption = "text",
    column: ColumnOption = None,
    rows: RowsOption = None,
    chat: ChatOption = None,
    chat_template: ChatTemplateOption = None,
    mask: MaskOption = None,
    eot: EotOption = None,
    split: SplitOption = None,
    shard_tokens: ShardTokensOption = SHARD_TOKENS,
    keep: KeepOption = None,
    cut_texts: CutTextsOption = False,
    on_error: OnErrorOption = "refuse",
    processes: ProcessesOption = None,
    ray: RayOption = False,
    task: TaskOption = None,
    fresh: FreshOption = False,
    as_json: AsJson = False,
) -> None:
    """Make a corpus of text or token ids. After an interruption the same command continues.

    Example: corpus-server build 'texts/*.jsonl' --tokenizer tokenizer.json --out corpus
    """
    if ray and processes is not None:
        raise InvalidParameter.expected("processes", "left out with --ray", processes)
    if fresh and task is not None:
        raise InvalidParameter.expected("fresh", "left out with --task, as tasks share the work", True)
    options = choose_options(
        tokenizer=None if tokenizer is None else fetched_tokenizer(tokenizer_source(tokenizer), note),
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
    if task is None:
        made = {out / (name or ""): manifest for name, manifest in built.items()}
        _warn_of(made, options)
        _describe(made, options, as_json=as_json)
        if reading is None:
            note(f"{out} was there already, built of the same files with the same options; nothing was read")
        else:
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
            f"{path}: {counted(manifest.num_tokens, 'token')} of "
            f"{counted(manifest.num_documents, 'document')} in {counted(len(manifest.shards), 'shard')}, "
            f"{manifest.fingerprint}"
        )


def _warn_of(made: Mapping[Path, Manifest], options: BuildOptions) -> None:
    """Print what is strange about the corpora that were built."""
    for path, manifest in made.items():
        for name in columns_without_values(path) if options.keep else ():
            warn(f"{path}: no document has a value of {name!r}")
        if options.is_packed and manifest.num_documents == 1:
            warn(
                f"the rows hold no end-of-text token {options.eot} between two documents, so all of their "
                "text is one document: is it the right token?"
            )
        with Corpus.open(spec_of(path)) as corpus:
            warn_of(corpus, degenerate=True)


def _describe(made: Mapping[Path, Manifest], options: BuildOptions, *, as_json: bool) -> None:
    """Print what was built."""
    if as_json:
        wanted: tuple[str, ...] = ("num_tokens", "num_documents", "num_shards", "dtype", "fingerprint", "eot")
        wanted = (*wanted, "num_targets", "loss_mask_dtype")
        print_json({str(path): _facts(manifest, wanted) for path, manifest in made.items()})
        return
    for path, manifest in made.items():
        say(
            f"{path}: {counted(manifest.num_documents, 'document')}, "
            f"{counted(manifest.num_tokens, f'{manifest.dtype} token')} "
            f"in {counted(len(manifest.shards), 'shard')}"
        )
        if (targets := manifest.num_targets) is not None:
            kept = "weights (float16)" if manifest.loss_mask_dtype == "float16" else "0 and 1"
            share = f"{counted(targets, 'target')} ({targets / manifest.num_tokens:.1%})"
            say(f"  loss masks of {kept}: {share}")
    if options.is_packed:
        say("rows are one running text: no token was put between them")
    eot_name = name_of(options.tokenizer, options.eot)
    say(f"documents end with token {options.eot}" + ("" if eot_name is None else f" {eot_name!a}"))


def _tell(reading: Reading, where: Console) -> None:
    """Print what was read, what was left out, and why."""
    for said in reading.missing:
        warn(f"{said}; were all of them copied?")
    for said in reading.doubled:
        warn(said)
    if reading.dropped is not None:
        warn(reading.dropped)
    all_read = not (reading.documents_left_out or reading.num_rounded or reading.files_left_out)
    made = table("", "documents", "files", "" if all_read else "why", "", box=None, show_header=True)
    made.add_row("read", f"{reading.num_documents:,}", f"{reading.num_files:,}", "", "")
    for why, count in sorted(reading.documents_left_out.items()):
        made.add_row("left out", f"{count:,}", "", why, "")
    if reading.num_rounded:
        made.add_row("rounded", "", "", f"weights of {counted(reading.num_rounded, 'token')}, to float16", "")
    reasons: dict[str, list[Path]] = {}
    for path, why in reading.files_left_out:
        reasons.setdefault(why, []).append(path)
    for why, paths in reasons.items():
        names = ", ".join(path.name for path in paths[:2]) + ", ..." * (len(paths) > 2)
        made.add_row("left out", "", f"{len(paths):,}", escape(why), escape(names))
    print_table(made, where)


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
