"""What `inspect --stats` adds: lengths of documents and frequencies of tokens in a sample, drawn as bars."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from corpus_server.cli.common import console, say
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import counted

_SHOWN_TOKENS = 20
_BAR_WIDTH = 40  # characters


def statistics(spec: CorpusSpec) -> dict[str, Any]:
    """Return what `/v1/corpora/{name}/statistics` answers about files."""
    from corpus_server.cli.files import open_files  # loads pydantic, which the other commands do not wait for

    with open_files(spec) as files:
        response: dict[str, Any] = files.ask(f"/v1/corpora/{quote(spec.name, safe='')}/statistics")
    return response


def show_statistics(statistics: dict[str, Any], spec: CorpusSpec) -> None:
    """Print statistics."""
    console.print(
        f"{statistics['num_sampled_tokens']:,} of {counted(statistics['num_tokens'], 'token')} sampled, "
        f"{statistics['num_distinct_tokens']:,} distinct"
    )
    lengths = statistics["document_lengths"]
    if lengths is None:
        say(f"no document index: make one with {spec.index_command()}")
    elif lengths["num_sampled"]:
        quantiles = lengths["quantiles"]
        console.print(
            f"\n{lengths['num_sampled']:,} of {counted(statistics['num_documents'], 'document')} sampled: "
            f"median {quantiles['0.5']:,}, mean {lengths['mean']:,.1f}, "
            f"longest {counted(quantiles['1.0'], 'token')}"
        )
        histogram = [(f"{least:,} +", number) for least, number in lengths["histogram"]]
        console.print(_bars(("tokens", "documents"), histogram))
    console.print("\nmost frequent tokens")
    top = [
        (f"{token['token']} {'' if token['text'] is None else ascii(token['text'])}", token["count"])
        for token in statistics["top_tokens"][:_SHOWN_TOKENS]
    ]
    console.print(_bars(("token", "occurrences"), top))


def _bars(head: tuple[str, str], rows: list[tuple[str, int]]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    largest = max((number for _, number in rows), default=0) or 1
    for name, number in rows:
        table.add_row(Text(name), f"{number:,}", Bar(largest, 0, number, width=_BAR_WIDTH))
    return table
