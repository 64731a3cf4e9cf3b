"""`corpus-client bench`: what a server delivers to a training loop on this machine."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from corpus_client.loader import CorpusLoader
from corpus_client.observe.attribution import LoaderStats
from corpus_client.staging.options import Staging
from corpus_client.tools import report
from corpus_client.tools.timing import Spread, seconds_name

WARM_UP_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """One measurement: a loader's counters, seconds waited for a batch, this process's CPU seconds.

    bytes_per_second: of the tokens as they are stored.
    """

    stats: LoaderStats
    wait: Spread
    bytes_per_second: float
    cpu_seconds: float
    steps_per_request: int

    def as_json(self) -> dict[str, Any]:
        """Return the figures with those that follow from the loader's counters."""
        rates = {"tokens_per_second": self.stats.tokens_per_second, "wait_share": self.stats.wait_share}
        return {**asdict(self), **rates}


def bench(
    urls: Annotated[list[str], typer.Argument(help=report.URLS)],
    corpus: Annotated[str, typer.Option(help="name of the corpus")],
    seq_len: Annotated[int, typer.Option(help="inputs per row")] = 1024,
    batch_size: Annotated[int, typer.Option(help="rows per batch")] = 64,
    seconds: Annotated[float, typer.Option(help="how long to measure", min=0.1)] = 5.0,
    order: Annotated[str, typer.Option(help="an order without fields, see docs/plans.md")] = "shuffle",
    stored: Annotated[bool, typer.Option(help="tokens as stored instead of int64")] = False,
    local_root: Annotated[Path | None, typer.Option(help="read a local copy; ask for indices only")] = None,
    in_flight: Annotated[int, typer.Option(help="requests on the wire at a time")] = 2,
    verify: Annotated[bool, typer.Option(help="check every response's checksum")] = True,
    header: report.Header = None,
    token_file: report.TokenFile = None,
    device: report.Device = None,
    as_json: report.AsJson = False,
) -> None:
    """Measure batches as a training loop sees them, which does nothing but ask for the next.

    Example: corpus-client bench localhost:8000 --corpus fineweb --batch-size 64
    """

    def measured() -> report.Report:
        with report.open_loader(
            report.whole_urls(urls),
            device=device,
            corpus=corpus,
            seq_len=seq_len,
            global_batch_size=batch_size,
            order=order,
            dtype=None if stored else torch.int64,
            network=replace(
                report.read_network("bench", header, token_file),
                deadline_seconds=report.RESPONSE_SECONDS,
                in_flight=in_flight,
                verify=verify,
            ),
            staging=Staging(local_root=local_root),
        ) as loader:
            found = measure(loader, seconds)
        return report.Report(data=found.as_json(), shown=[_table(found)])

    report.run(measured, as_json=as_json)


def measure(loader: CorpusLoader, seconds: float) -> BenchResult:
    """Iterate for a while, after a short warm-up that is not counted."""
    _iterate(loader, min(WARM_UP_SECONDS, seconds))
    before, cpu_before = loader.stats(), time.process_time()
    waits = _iterate(loader, seconds)
    stats = loader.stats().since(before)
    return BenchResult(
        stats=stats,
        wait=Spread.of(waits),
        bytes_per_second=stats.tokens_per_second * loader.prepared.steps.dtype.itemsize,
        cpu_seconds=time.process_time() - cpu_before,
        steps_per_request=loader.prepared.steps_per_request,
    )


def _iterate(loader: CorpusLoader, seconds: float) -> list[float]:
    """Return how long each batch was waited for."""
    waits: list[float] = []
    asked = time.perf_counter()
    end = asked + seconds
    for _ in loader:
        now = time.perf_counter()
        waits.append(now - asked)
        if now >= end:
            break
        asked = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return waits


def _table(found: BenchResult) -> Table:
    stats, table = found.stats, Table("", "", show_header=False)
    table.add_row("tokens/s", f"{stats.tokens_per_second / 1e6:,.1f} M")
    table.add_row("MB/s", f"{found.bytes_per_second / 1e6:,.1f}")
    table.add_row("wait per batch, p50", seconds_name(found.wait.median))
    table.add_row("wait per batch, p99", seconds_name(found.wait.p99))
    table.add_row("share of time waiting", f"{stats.wait_share:.0%}")
    table.add_row("steps per request", f"{found.steps_per_request}")
    table.add_row("CPU s per 10^9 tokens", f"{found.cpu_seconds * 1e9 / stats.num_tokens:.2f}")
    table.add_row("batches", f"{stats.num_batches:,} in {stats.seconds:.1f} s")
    table.add_row("retries", f"{stats.num_retries}")
    return table
