"""`corpus-client bench`: what a server delivers to a training loop on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corpus_client.staging.options import Staging
from corpus_client.tools import report

if TYPE_CHECKING:
    from rich.table import Table

    from corpus_client.tools.measured import BenchResult


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
        import torch

        from corpus_client.tools.measured import measure

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


def _table(found: BenchResult) -> Table:
    from rich.table import Table

    from corpus_client.tools.timing import seconds_name

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
