"""`corpus-client overlap`: how long a training step waits for its batch, by each way of feeding it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from corpus_client import errors
from corpus_client.batch import RemoteCorpus
from corpus_client.buffers import REQUEST_BYTES
from corpus_client.tools import explain, plots
from corpus_client.tools.comparison import Outcome, compare, make_step, spare_cores
from corpus_client.tools.failure import exit_on
from corpus_client.tools.feeds import Feed, TokenFile
from corpus_client.tools.machine import describe, find_device, measurable_bytes, one_line
from corpus_client.tools.recording import Recorder
from corpus_client.tools.sizes import parse_size, seconds_name, size_name
from corpus_client.tools.timeline import Durations

POOL_TOKENS = 1 << 24
"""Random tokens to sample from where there is neither a local file nor a server."""

POOL_REQUESTS = 8
"""Batches of the server that are sampled from where there is no local file."""

BUFFERS = 16
"""How many times a batch the greediest way takes: widened, ahead, and its slots."""

MOST_DRAWN = 4
"""A time line is cut at so many times the length of (f)'s."""

NO_SERVER = (
    "(e) CorpusLoader: no server was named. Start one with 'corpus-server serve NAME=PATH' and give "
    "its URL, http://127.0.0.1:8000, and --corpus NAME"
)
ON_THE_CPU = (
    "(b) and (c): on the CPU nothing is page-locked and nothing is transferred, so they are (a). "
    "A copy is the widening to int64; step, workers and loader share the cores, the step takes half"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapReport:
    """All that was measured.

    Args:
        machine: what the figures depend on.
        batch_bytes: of a batch as stored.
        asked_seconds: the step's length that was asked for.
        num_products: matrix products in a step.
        outcomes: a way each.
        missing: what was left out and why, a sentence each.
    """

    machine: dict[str, Any]
    batch_bytes: int
    rows: int
    seq_len: int
    asked_seconds: float
    num_products: int
    outcomes: list[Outcome]
    missing: list[str]

    def as_json(self) -> dict[str, Any]:
        """One object."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "outcomes"}
        return {**plain, "outcomes": [each.as_json() for each in self.outcomes]}


def overlap(
    url: Annotated[str | None, typer.Argument(help="http://host:port of a server, for (e)")] = None,
    corpus: Annotated[str | None, typer.Option(help="its corpus")] = None,
    local: Annotated[
        Path | None, typer.Option(help="headerless token file for (a) to (d); default: tokens of the server")
    ] = None,
    dtype: Annotated[str, typer.Option(help="of the local file")] = "uint16",
    step_ms: Annotated[float, typer.Option(help="length of a training step", min=0.01, max=60_000)] = 5.0,
    batch: Annotated[str, typer.Option(help="tokens of a step as stored, in bytes")] = "8MB",
    seq_len: Annotated[int, typer.Option(help="inputs per row", min=1, max=65536)] = 1024,
    steps: Annotated[int, typer.Option(help="of each way in each round", min=2)] = 60,
    rounds: Annotated[int, typer.Option(help="over all ways", min=1)] = 3,
    workers: Annotated[int, typer.Option(help="processes of torch's DataLoader", min=1, max=256)] = 2,
    device: Annotated[str | None, typer.Option(help="default: cuda where there is one")] = None,
    plot_folder: Annotated[Path | None, typer.Option("--plots", help="folder for PNG plots")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False,
    explained: Annotated[
        bool, typer.Option("--explain", help="compute time lines from stated durations; measures nothing")
    ] = False,
    fetch_ms: Annotated[float, typer.Option(help="--explain: until tokens are in host memory")] = 4.0,
    copy_ms: Annotated[float, typer.Option(help="--explain: into page-locked memory")] = 2.0,
    transfer_ms: Annotated[float, typer.Option(help="--explain: over the bus")] = 1.0,
    item: Annotated[bool, typer.Option("--item", help="--explain: loss.item() after each step")] = False,
) -> None:
    """Feed training steps of a chosen length in every way; print how long each one waits for data."""
    console = Console(stderr=as_json)
    try:
        if plot_folder is not None:
            plots.check()
        if explained:
            stated = Durations(
                fetch=fetch_ms / 1e3,
                copy=copy_ms / 1e3,
                transfer=transfer_ms / 1e3,
                compute=step_ms / 1e3,
                workers=workers,
                item=item,
            )
            explain.explain(stated, console, plot_folder, as_json=as_json)
            return
        place = find_device(device)
        with (
            token_file(url, corpus, local, dtype, parse_size(batch), seq_len) as tokens,
            console.status("feeding training steps"),
        ):
            make_feed = partial(_feed, tokens, place, workers, url, corpus)
            report = measure(make_feed, step_ms / 1e3, steps, rounds)
        if plot_folder is not None:
            for path in plots.save(plot_folder, "overlap", {"timeline": _drawing(report)}):
                console.print(f"saved {path}", highlight=False)
    except errors.CorpusClientError as error:
        raise exit_on(error) from error
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        show(report, console)


def measure(make_feed: partial[Feed], step_seconds: float, num_steps: int, rounds: int) -> OverlapReport:
    """Every way that this machine and these arguments allow."""
    feed = make_feed(Recorder(torch.device("cpu"), active=False))
    budget = measurable_bytes(feed.device)
    if feed.tokens.batch_bytes * BUFFERS > budget:
        raise errors.InvalidArgument(
            f"batch must be at most {size_name(budget // BUFFERS)}, "
            f"got {size_name(feed.tokens.batch_bytes)}: up to {BUFFERS} times a batch is taken, "
            "and no more than a quarter of the free memory"
        )
    names, missing = ["pageable", "pinned", "pinned-async", "dataloader", "corpus-loader", "full-slots"], []
    if feed.device.type == "cpu":
        names = [name for name in names if not name.startswith("pinned")]
        missing.append(ON_THE_CPU)
    if feed.url is None:
        names.remove("corpus-loader")
        missing.append(NO_SERVER)
    with spare_cores(feed.device):
        step, meter = make_step(feed, step_seconds)
        outcomes = compare([*names, "constant"], make_feed, step, meter, num_steps=num_steps, rounds=rounds)
    return OverlapReport(
        machine=describe(feed.device),
        batch_bytes=feed.tokens.batch_bytes,
        rows=feed.tokens.rows,
        seq_len=feed.tokens.window - 1,
        asked_seconds=step_seconds,
        num_products=step.num_products,
        outcomes=outcomes,
        missing=missing,
    )


@contextmanager
def token_file(
    url: str | None, corpus: str | None, local: Path | None, dtype: str, batch_bytes: int, seq_len: int
) -> Iterator[TokenFile]:
    """The file that (a) to (d) sample from: a local one, tokens of the server, or random ones."""
    if (url is None) != (corpus is None):
        raise errors.InvalidArgument(f"a URL and --corpus go together, got {url!r} and {corpus!r}")
    with tempfile.TemporaryDirectory(prefix="corpus-client-") as folder:
        path = Path(folder) / "tokens.bin"
        if local is not None:
            path = local
        elif url is not None and corpus is not None:
            dtype = _fetch_tokens(url, corpus, path, batch_bytes, seq_len)
        else:
            np.random.default_rng(0).integers(0, 50_257, POOL_TOKENS, np.uint16).tofile(path)
            dtype = "uint16"
        row_bytes = (seq_len + 1) * np.dtype(dtype).itemsize
        rows = max(1, batch_bytes // row_bytes)
        yield TokenFile(path=path, dtype=dtype, rows=rows, window=seq_len + 1)


def _fetch_tokens(url: str, corpus: str, path: Path, batch_bytes: int, seq_len: int) -> str:
    """Write random windows of a served corpus to a file; return the type of its tokens."""
    remote = RemoteCorpus(url, corpus, deadline_seconds=30.0)
    try:
        row_bytes = (seq_len + 1) * np.dtype(remote.dtype).itemsize
        rows = max(1, min(batch_bytes, REQUEST_BYTES) // row_bytes)
        buffer = bytearray(rows * row_bytes)
        with path.open("wb") as file:
            for seed in range(POOL_REQUESTS):
                remote.draw_into(memoryview(buffer), batch_size=rows, seq_len=seq_len, seed=seed)
                file.write(buffer)
        return remote.dtype
    finally:
        remote.close()


def _feed(
    tokens: TokenFile,
    device: torch.device,
    workers: int,
    url: str | None,
    corpus: str | None,
    record: Recorder,
) -> Feed:
    return Feed(tokens=tokens, device=device, record=record, workers=workers, url=url, corpus=corpus)


def show(report: OverlapReport, console: Console) -> None:
    """Print the report for a person."""
    console.print(one_line(report.machine), highlight=False)
    constant = report.outcomes[-1]
    console.print(
        f"{report.rows:,} x {report.seq_len + 1:,} tokens, {size_name(report.batch_bytes)} a step; "
        f"{seconds_name(report.asked_seconds)} asked for, {seconds_name(constant.median_seconds)} is what a "
        f"step takes with {report.num_products} matrix products",
        highlight=False,
    )
    shown = Table(
        "", "step, median", "p95", "stall", "of the rounds", title="a training step, by how it is fed"
    )
    for each in report.outcomes:
        shown.add_row(
            each.title,
            seconds_name(each.median_seconds),
            seconds_name(each.p95_seconds),
            f"{each.stall:+.1%}",
            f"{each.stall_low:+.1%} to {each.stall_high:+.1%}",
        )
    console.print(shown)
    console.print("stall: by how much the mean step is longer than that of (f)", highlight=False)
    for sentence in report.missing:
        console.print(f"[yellow]left out:[/yellow] {sentence}", highlight=False)


def _drawing(report: OverlapReport) -> plots.Drawing:
    lines = {f"{each.title}: stall {each.stall:+.0%}": each.spans for each in report.outcomes}
    ends = [max(span.stop for span in each.spans) for each in report.outcomes]
    stop = 1.05 * min(max(ends), MOST_DRAWN * ends[-1])
    note = f"Measured: steps of {seconds_name(report.outcomes[-1].median_seconds)}, "
    note += f"{size_name(report.batch_bytes)} of tokens each, on {report.machine['device']}"
    return plots.timelines_of(lines, note, start=0.0, stop=stop)
