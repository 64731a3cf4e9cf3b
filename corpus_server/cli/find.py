"""`corpus-server find`: exact spans of texts in corpora, and the steps that saw them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import typer

from corpus_server import reports
from corpus_server.cli.asking import asked_about
from corpus_server.cli.common import (
    CORPUS_HELP,
    AsJson,
    note,
    print_json,
    print_table,
    progress,
    read_corpus,
    say,
    table,
    warn,
)
from corpus_server.cli.server import known_url
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.publish import check_new, publishing
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CorpusServerError, InvalidParameter, counted
from corpus_server.tools import finding

_SHOWN_ITEMS: Final = 10
_MARKDOWN, _HTML = "report.md", "report.html"
_CORPORA: Final = 4  # beside each other, in 80 columns
_IDS: Final = re.compile(r"\s*\d{1,10}(?:[\s,]+\d{1,10})*\s*")

Corpora = Annotated[
    list[str],
    typer.Argument(metavar="CORPUS...", help=f"Where to look. {CORPUS_HELP}", show_default=False),
]
ItemsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SOURCE",
        help="Items to look for: JSON lines, CSV, Parquet (a record is an item), a text file, a folder, "
        "hf://datasets/ORG/NAME; may be repeated.",
    ),
]
FieldOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Field of a record that holds a text; may be repeated.", show_default="text"
    ),
]
ColumnOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Field that holds token ids, instead of text.")
]
TextOption = Annotated[list[str] | None, typer.Option(help="A text to look for; may be repeated.")]
TokensOption = Annotated[
    list[str] | None, typer.Option(metavar="IDS", help="Token ids, as 11,22,33; may be repeated.")
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Of folders read only files that match, as text."),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "-n",
        min=1,
        help="Tokens that must stand together.",
        show_default="13; 50 of text, or where they are bytes",
    ),
]
ByOption = Annotated[
    Literal["tokens", "text"],
    typer.Option(
        help="Compare tokens, or text without white space: for texts whose tokens may be cut otherwise."
    ),
]
ShareOption = Annotated[
    float, typer.Option(min=0, max=1, help="Leave out items that are covered less, of 1.")
]
PlacesOption = Annotated[int, typer.Option(min=1, help="Places of one n-gram to list.")]
PlanOption = Annotated[
    str | None, typer.Option(metavar="ID|FILE", help="Say which steps of this plan saw the spans.")
]
BeforeStepOption = Annotated[
    int | None, typer.Option(min=1, help="With --plan: the run's steps; later ones saw nothing.")
]
ServerOption = Annotated[str | None, typer.Option(metavar="URL", help="With --plan: a server that knows it.")]
StateDirOption = Annotated[
    Path | None,
    typer.Option(help="With --plan: the server's --state-dir.", show_default="~/.local/state/corpus-server"),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for report.json, .md and .html; after an interruption the same command goes on."
    ),
]
DenyOption = Annotated[
    Path | None,
    typer.Option(
        help="File to write, must not exist: the documents that hold the spans, a number a line, for view "
        "create --without."
    ),
]
ProcessesOption = Annotated[
    int | None, typer.Option(min=1, help="Processes that scan.", show_default="one per core")
]


def find(
    corpora: Corpora,
    items: ItemsOption = None,
    field: FieldOption = None,
    column: ColumnOption = None,
    text: TextOption = None,
    tokens: TokensOption = None,
    include: IncludeOption = None,
    n: LengthOption = None,
    by: ByOption = "tokens",
    share: ShareOption = 0.0,
    places: PlacesOption = 100,
    plan: PlanOption = None,
    before_step: BeforeStepOption = None,
    server: ServerOption = None,
    state_dir: StateDirOption = None,
    out: OutOption = None,
    deny: DenyOption = None,
    processes: ProcessesOption = None,
    as_json: AsJson = False,
) -> None:
    """Find what texts and corpora have in common: exact spans, in one pass over the tokens, without an index.

    Example: corpus-server find /data/web --items questions.jsonl --field question --out report
    """
    specs = [read_corpus(each) for each in corpora]
    _check(specs, plan, before_step, server, deny)
    if column is not None and field:
        raise InvalidParameter("--field and --column both say where items stand; give one", parameter="field")
    for name, given, needed, is_there in (
        ("field", field, "items", items),
        ("column", column, "items", items),
        ("include", include, "items", items),
        ("state-dir", state_dir, "plan", plan),
    ):
        if given and not is_there:
            raise InvalidParameter(f"--{name} needs --{needed}", parameter=name.replace("-", "_"))
    wanted_items = _items(items or [], field, column, include, text or [], tokens or [])
    if deny is not None:
        check_new(deny)
    if out is not None:
        with _writing(out):
            _check_reports(out)
            out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        asked = None
        if plan is not None and before_step is not None:
            url = None if server is None else known_url(server, parameter="server")
            asked = *stack.enter_context(asked_about(plan, url, specs, state_dir)), before_step
        opened = stack.enter_context(finding.opened(specs))
        if deny is not None and opened[0].num_documents is None:
            raise opened[0].no_documents(spec=specs[0])
        wanted = finding.Wanted(
            items=wanted_items,
            n=_default_n(opened, by) if n is None else n,
            min_share=share,
            num_places=places,
            by_text=by == "text",
        )
        with progress(quiet=as_json) as report_progress:
            num_processes = processes or len(os.sched_getaffinity(0))
            look = partial(finding.find, num_processes=num_processes, work=out, progress=report_progress)
            found = [look(spec, corpus, wanted) for spec, corpus in zip(specs, opened, strict=True)]
            report = finding.describe(wanted, found)
            if asked is not None:
                finding.add_steps(report, found, asked[0].ask, *asked[1:], report_progress)
        if out is not None:
            _write(out / reports.FILE, reports.layout(report))  # first: the others are of find where it is
            _write(out / _MARKDOWN, [finding.as_markdown(report)])
            _write(out / _HTML, [finding.as_html(report)])
        if deny is not None:  # last: until it is there, the same command goes on
            _write(deny, (f"{each}\n" for each in found[0].documents.tolist()))
    if as_json:
        print_json(report)
    else:
        _print(report, out, deny)


def _default_n(opened: list[Corpus], by: str) -> int:
    """Return how many tokens must stand together; warn of corpora for which these are few."""
    n, too_few = finding.default_n(opened, by_text=by == "text")
    for name in too_few:
        warn(f"the tokens of corpus {name!r} are bytes, and {n} are two words: -n looks for more")
    return n


def _items(
    sources: list[str],
    fields: list[str] | None,
    column: str | None,
    include: list[str] | None,
    texts: list[str],
    ids: list[str],
) -> finding.Items:
    """Return what is looked for: items of files, then texts and token ids of the command line."""
    found = finding.Items()
    if sources:
        read = finding.read_items(
            sources, note, fields=fields or ["text"], column=column, include=include or []
        )
        for source, number, each in read:
            found.add(source, number, each)
    for number, text in enumerate(texts):
        found.add("--text", number, (_unicode(text),))
    for number, text in enumerate(ids):
        found.add("--tokens", number, (_ids(text),))
    if not found.texts:
        raise InvalidParameter(
            "there is no item to look for", parameter="items", remedy="name a file with --items, or a --text"
        )
    return found


def _check(
    specs: list[CorpusSpec], plan: str | None, before_step: int | None, server: str | None, deny: Path | None
) -> None:
    """Refuse options that do not fit together, before anything is read."""
    names = [each.name for each in specs]
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise InvalidParameter(
            f"two corpora are called {twice!r}; name them with NAME=PATH", parameter="corpora"
        )
    if (plan is None) != (before_step is None):
        missing, given = ("--before-step", "--plan") if before_step is None else ("--plan", "--before-step")
        raise InvalidParameter(
            f"{given} needs {missing}",
            parameter=missing.strip("-"),
            remedy="a run's steps: 0 to before-step - 1",
        )
    if plan is None and server is not None:
        raise InvalidParameter("--server is asked about a --plan, and there is none", parameter="server")
    if deny is not None and len(specs) > 1:
        raise InvalidParameter("--deny lists documents of one corpus", parameter="deny")


def _check_reports(out: Path) -> None:
    """Refuse a folder in which a report would replace a file that `find` did not write."""
    for name in (reports.FILE, _MARKDOWN, _HTML):
        if (out / name).exists() and not reports.is_report(out / reports.FILE):
            raise InvalidParameter(
                f"{out / name} exists, and find did not write it; name another folder, or remove it"
            )


def _ids(text: str) -> Any:
    if not _IDS.fullmatch(text) or any(int(each) >= 1 << 32 for each in re.findall(r"\d+", text)):
        raise InvalidParameter.expected("tokens", "ids below 4294967296, as 11,22,33", text[:60])
    return np.array(re.findall(r"\d+", text), dtype=np.int64)


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter.expected("text", "text in UTF-8", ascii(text[:60])) from None
    return text


def _write(path: Path, parts: Iterable[str]) -> None:
    with _writing(path), publishing(path) as file:
        for part in parts:
            file.write(part.encode())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusServerError(
            f"{path} cannot be written: {error.strerror}", remedy="make room, or name another place"
        ) from error


def _print(report: dict[str, Any], out: Path | None, deny: Path | None) -> None:
    head, rows = finding.summary(report)
    # A column for each corpus: so many figures beside each other would not fit a terminal.
    for first in range(0, len(rows), _CORPORA):
        names, *figures = zip(head, *rows[first : first + _CORPORA], strict=True)
        shown = table(*names)
        for each in figures:
            shown.add_row(*each)
        print_table(shown)
    for sentence in finding.sentences(report):
        say(sentence)
    for item in report["items"][:_SHOWN_ITEMS]:
        text = "".join(part["text"] for part in item["parts"] if part["is_found"])
        seen = f", first step {item['first_step']}" if item.get("first_step") is not None else ""
        say(
            f"{item['share']:>4.0%} of {item['source']} {item['number']} in {item['corpus']}, "
            f"{counted(len(item['spans']), 'place')}{seen}: {text[:80]!r}"
        )
    if (left := len(report["items"]) - _SHOWN_ITEMS) > 0:
        say(f"{left:,} more; --out DIR writes all, --json prints them")
    if out is not None:
        say(f"reports are in {out}: report.html, report.md, report.json")
    if deny is not None:
        say(f"documents to leave out are in {deny}: corpus-server view create CORPUS --without {deny} ...")
    if any(each["num_documents"] is None for each in report["corpora"]):
        warn("without a document index, spans have no documents")
