"""`corpus-client bench`: what a server delivers to a training loop on this machine."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from corpus_client import errors
from corpus_client.loader import PREFETCH_BYTES, CorpusLoader
from corpus_client.tools.failure import exit_on

WARM_UP_SECONDS = 0.5
PREFETCH_MIB = PREFETCH_BYTES >> 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """One measurement; waits are per batch, CPU seconds are this process's.

    Args:
        tokens: windows' tokens received, rows x (seq_len + 1) per batch.
        bytes: of the answers' bodies those tokens are in.
    """

    seconds: float
    batches: int
    tokens: int
    bytes: int
    tokens_per_second: float
    bytes_per_second: float
    wait_p50_seconds: float
    wait_p99_seconds: float
    wait_share: float
    steps_per_request: int
    cpu_seconds_per_billion_tokens: float
    retries: int


def bench(
    urls: Annotated[
        list[str], typer.Argument(help="http://host:port or uds:///path of the server, or of its replicas")
    ],
    corpus: Annotated[str, typer.Option(help="name of the corpus")],
    seq_len: Annotated[int, typer.Option(help="inputs per row")] = 1024,
    batch_size: Annotated[int, typer.Option(help="rows per global batch")] = 64,
    seconds: Annotated[float, typer.Option(help="how long to measure", min=0.1)] = 5.0,
    seed: Annotated[int, typer.Option(help="of the plan")] = 0,
    order: Annotated[str, typer.Option(help="shuffle, sequential or random")] = "shuffle",
    rank: Annotated[int, typer.Option(help="which rank's part")] = 0,
    world_size: Annotated[int, typer.Option(help="number of ranks")] = 1,
    device: Annotated[str | None, typer.Option(help="default: cuda where there is one")] = None,
    stored: Annotated[bool, typer.Option(help="tokens as stored instead of int64")] = False,
    local_root: Annotated[Path | None, typer.Option(help="read a local copy; ask for indices only")] = None,
    in_flight: Annotated[int, typer.Option(help="requests on the wire at a time")] = 2,
    prefetch_mib: Annotated[int, typer.Option(help="memory for what is fetched ahead")] = PREFETCH_MIB,
    verify: Annotated[bool, typer.Option(help="check every answer's checksum")] = True,
    deadline_seconds: Annotated[float, typer.Option(help="for each request, retries included")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False,
) -> None:
    """Measure batches as a training loop sees them, which does nothing but ask for the next."""
    console = Console(stderr=as_json)
    source: Literal["batches", "indices"] = "batches" if local_root is None else "indices"
    try:
        with (
            CorpusLoader(
                urls,
                corpus=corpus,
                seq_len=seq_len,
                global_batch_size=batch_size,
                seed=seed,
                order=order,
                rank=rank,
                world_size=world_size,
                device=device,
                dtype=None if stored else torch.int64,
                source=source,
                local_root=local_root,
                in_flight=in_flight,
                prefetch_bytes=prefetch_mib << 20,
                verify=verify,
                deadline_seconds=deadline_seconds,
            ) as loader,
            console.status("receiving batches"),
        ):
            result = measure(loader, seconds)
    except errors.CorpusClientError as error:
        raise exit_on(error) from error
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        console.print(table(result, f"{corpus}: {batch_size} x {seq_len + 1}, source {source}"))


def measure(loader: CorpusLoader, seconds: float) -> BenchResult:
    """Iterate for a while, after a short warm-up that is not counted."""
    waits: list[float] = []
    num_tokens = 0
    before, cpu_before, started = loader.stats(), time.process_time(), time.perf_counter()
    warm_until = time.perf_counter() + min(WARM_UP_SECONDS, seconds)
    end = warm_until + seconds
    asked = time.perf_counter()
    for batch in loader:
        now = time.perf_counter()
        if now < warm_until:
            before, cpu_before, started = loader.stats(), time.process_time(), time.perf_counter()
        else:
            waits.append(now - asked)
            num_tokens += batch.tokens.numel()
            if now >= end:
                break
        asked = time.perf_counter()
    if batch.tokens.is_cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_before
    stats = loader.stats()
    num_bytes = num_tokens * loader.stored_itemsize
    p50, p99 = np.percentile(waits, [50, 99])
    return BenchResult(
        seconds=elapsed,
        batches=len(waits),
        tokens=num_tokens,
        bytes=num_bytes,
        tokens_per_second=num_tokens / elapsed,
        bytes_per_second=num_bytes / elapsed,
        wait_p50_seconds=float(p50),
        wait_p99_seconds=float(p99),
        wait_share=min(1.0, (stats.wait_seconds - before.wait_seconds) / elapsed),
        steps_per_request=loader.steps_per_request,
        cpu_seconds_per_billion_tokens=cpu_seconds * 1e9 / num_tokens,
        retries=stats.retries,
    )


def table(result: BenchResult, title: str) -> Table:
    """The measurement for a person."""
    shown = Table("", "", title=title, show_header=False)
    for name, value in (
        ("tokens/s", f"{result.tokens_per_second / 1e6:,.1f} M"),
        ("MB/s", f"{result.bytes_per_second / 1e6:,.1f}"),
        ("wait per batch, p50", f"{result.wait_p50_seconds * 1e3:.3f} ms"),
        ("wait per batch, p99", f"{result.wait_p99_seconds * 1e3:.3f} ms"),
        ("share of time waiting", f"{result.wait_share:.0%}"),
        ("steps per request", f"{result.steps_per_request}"),
        ("CPU s per 10^9 tokens", f"{result.cpu_seconds_per_billion_tokens:.2f}"),
        ("batches", f"{result.batches:,} in {result.seconds:.1f} s"),
        ("retries", f"{result.retries}"),
    ):
        shown.add_row(name, value)
    return shown
