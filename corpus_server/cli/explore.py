"""`corpus-server explore | stats`: text and statistics in the terminal, of files or of a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from corpus_server.cli.common import CORPUS_HELP, AsJson, console, print_json
from corpus_server.cli.server import Asked, Server, server_url
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="CORPUS|URL", help=f"{CORPUS_HELP} Or the address of a server.", show_default=False
    ),
]
CorpusOption = Annotated[
    str | None,
    typer.Option("--corpus", metavar="NAME", help="Which corpus of the server; needless if it has one."),
]
_COLOURS = ("blue", "dark_orange3", "green", "magenta", "cyan", "yellow")


def explore(
    source: SourceArgument,
    corpus: CorpusOption = None,
    document: Annotated[int | None, typer.Option(min=0, help="Show a document.")] = None,
    start: Annotated[int, typer.Option(min=0, help="Show tokens from this one on.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Tokens, or with --step rows, to show.")] = 512,
    plan: Annotated[str | None, typer.Option(metavar="ID", help="A plan that the server keeps.")] = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="The plan that this run has now.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Show the rows of a training step.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Without --plan: inputs per row.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Without --plan: rows of a step.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Without --plan: seed of the shuffle.")] = 0,
    rows: Annotated[str, typer.Option(help="Without --plan: windows, or documents.")] = "windows",
    pager: Annotated[bool, typer.Option("--pager", help="Page through the output.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a document, a range of tokens or the rows of a step as text.

    Example: corpus-server explore http://localhost:8000 --run gpt2-124m-a --step 400
    """
    if (plan or run) and step is None:
        raise InvalidParameter("--plan and --run need --step", parameter="step")
    with _opened(source, plan or run) as asked:
        if run is not None:
            plan = plan or _plan_of(asked, run)
        name, path = ("", "") if plan else asked.of_corpus(corpus)
        if step is not None:
            stage = {"global_batch_size": batch_size, "mixture": {name: 1}}
            spelled = {"seq_len": seq_len, "seed": seed, "rows": rows, "stages": [stage]}
            plan = plan or asked.ask("/v1/plans", json.dumps(spelled).encode())["id"]
            route = f"/v1/plans/{quote(plan, safe='')}/rows"
            answer = asked.ask(route, step=step, first=0, count=min(count, 64))
        else:
            if document is not None:
                found = asked.ask(f"{path}/documents/{document}", format="json")
                start, count = found["start"], max(1, min(found["stop"] - found["start"], 2**16))
            answer = asked.ask(f"{path}/spans", start=start, count=count)
    if as_json:
        print_json(answer)
        return
    if step is None:
        where = f"tokens {answer['start']:,} to {answer['stop']:,} of {answer['num_tokens']:,}"
        shown = [Text(where, style="bold"), _text(answer["spans"])]
    else:
        shown = []
        colours = dict(zip(dict.fromkeys(row["corpus"] for row in answer["rows"]), cycle(_COLOURS)))
        for row in answer["rows"]:
            where = f"step {step} row {row['row']}: {row['corpus']}, {row['shard']}, token {row['start']}"
            where += f", {row['unused']} tokens unused" if row.get("unused") else ""
            shown += [Text(where, style=f"bold {colours[row['corpus']]}"), _text(row["spans"]), Text()]
    with console.pager(styles=True) if pager else nullcontext():
        console.print(*shown, sep="\n")


def stats(
    source: SourceArgument,
    corpus: CorpusOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Which parts are sampled.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the lengths of documents and the frequencies of tokens in a sample.

    Example: corpus-server stats /data/fineweb
    """
    with _opened(source) as asked:
        answer = asked.ask(f"{asked.of_corpus(corpus)[1]}/statistics", seed=seed)
    if as_json:
        print_json(answer)
        return
    console.print(
        f"{answer['num_sampled_tokens']:,} of {answer['num_tokens']:,} tokens sampled, "
        f"{answer['num_distinct_tokens']:,} distinct"
    )
    lengths = answer["document_lengths"]
    if lengths is None:
        console.print("no document index: make one with corpus-server index")
    elif lengths["num_sampled"]:
        quantiles = lengths["quantiles"]
        console.print(
            f"\n{lengths['num_sampled']:,} of {answer['num_documents']:,} documents sampled: median "
            f"{quantiles['0.5']:,}, mean {lengths['mean']:,.1f}, longest {quantiles['1.0']:,} tokens"
        )
        console.print(
            _bars(
                ("tokens", "documents"), [(f"{least:,} +", number) for least, number in lengths["histogram"]]
            )
        )
    console.print("\nmost frequent tokens")
    top = [
        (f"{each['token']} {'' if each['text'] is None else ascii(each['text'])}", each["count"])
        for each in answer["top_tokens"][:20]
    ]
    console.print(_bars(("token", "occurrences"), top))


def _plan_of(asked: Asked, run: str) -> str:
    found = asked.ask("/v1/plans", run=run, limit=1)["plans"]
    if not found:
        raise InvalidParameter(
            f"no run named {run!r} has posted a plan here; corpus-server plans list URL shows which have",
            parameter="run",
            received=run,
        )
    plan: str = found[0]["id"]
    return plan


def _text(spans: list[dict[str, Any]]) -> Text:
    """Return spans as text; documents alternate in shade, control characters are shown by name."""
    shown = Text()
    for number, span in enumerate(spans):
        if span["document"] is not None and (not number or spans[number - 1]["document"] != span["document"]):
            shown.append(f"[document {span['document']}] ", style="bold cyan")
        if span["is_eot"]:
            shown.append(f"<{span['text'] or 'end of text'}>\n", style="bold red")
        else:
            text = " ".join(map(str, span["tokens"])) if span["text"] is None else span["text"]
            shown.append(
                "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)
            )
    return shown


def _bars(head: tuple[str, str], rows: list[tuple[str, int]]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    most = max((number for _, number in rows), default=0) or 1
    for name, number in rows:
        table.add_row(Text(name), f"{number:,}", Bar(most, 0, number, width=40))
    return table


@contextmanager
def _opened(source: str, plan: str | None = None) -> Iterator[Asked]:
    """Yield what answers about a corpus: a server, or files in this process."""
    if (url := server_url(source)) is not None:
        yield Server(url)
        return
    if plan is not None:
        raise InvalidParameter(
            "the id of a plan and the name of a run need a server; spell the plan for files", parameter="plan"
        )
    from corpus_server.cli.files import open_files  # loads pydantic, which the other commands do not wait for

    with open_files(CorpusSpec.parse(source)) as files:
        yield files
