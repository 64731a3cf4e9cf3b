"""`corpus-client doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from corpus_client import errors
from corpus_client.buffers import RingSize, ring_size
from corpus_client.control import BoundPlan, ControlPlane
from corpus_client.device import STORED_DTYPES
from corpus_client.doctor import bottleneck, host, servers
from corpus_client.doctor.delivery import bandwidth, deliver
from corpus_client.doctor.findings import Check, report, table, worst
from corpus_client.doctor.speed import latency, stages
from corpus_client.endpoint import LOOPBACK, Endpoint
from corpus_client.loader import PREFETCH_BYTES
from corpus_client.plan import make_plan
from corpus_client.remote import RankSlice
from corpus_client.tools.failure import exit_on
from corpus_client.tools.gpus import list_gpus
from corpus_client.tools.machine import find_device, num_cores

IN_FLIGHT = 2
"""What a loader has by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """What was asked on the command line."""

    urls: Sequence[str]
    corpus: str | None
    seq_len: int
    batch_size: int
    loaders: int | None
    demand: bottleneck.Demand
    seconds: float
    requests: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise errors.InvalidArgument(
                f"world_size must divide batch_size, got {self.world_size} and {self.batch_size}"
            )

    @property
    def world_size(self) -> int:
        """Ranks; the first one's part is measured."""
        return self.demand.world_size


def doctor(
    urls: Annotated[
        list[str], typer.Argument(help="http://host:port or uds:///path of the server, or of its replicas")
    ],
    corpus: Annotated[str | None, typer.Option(help="name of the corpus; default: the only one")] = None,
    seq_len: Annotated[int, typer.Option(help="inputs per row")] = 1024,
    batch_size: Annotated[int, typer.Option(help="rows per global batch")] = 64,
    world_size: Annotated[int, typer.Option(help="ranks among which a batch is divided", min=1)] = 1,
    loaders: Annotated[
        int | None, typer.Option(help="training processes on this host; default: one per GPU", min=1)
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(help="how long a training step takes that never waits for data")
    ] = None,
    tokens_per_step: Annotated[
        float | None, typer.Option(help="trained on by all ranks; default: batch_size x seq_len")
    ] = None,
    seconds: Annotated[float, typer.Option(help="how long to run a loader", min=0.1)] = 3.0,
    requests: Annotated[int, typer.Option(help="for each latency", min=1)] = 50,
    device: Annotated[str | None, typer.Option(help="default: cuda where there is one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False,
) -> None:
    """Check servers, replicas and this machine, and answer: is data my bottleneck?

    Exit code 1 if a check fails.
    """
    status = Console(stderr=True)
    try:
        asked = Questions(
            urls=urls,
            corpus=corpus,
            seq_len=seq_len,
            batch_size=batch_size,
            loaders=loaders,
            demand=bottleneck.Demand(
                tokens_per_step=batch_size * seq_len if tokens_per_step is None else tokens_per_step,
                step_seconds=step_seconds,
                world_size=world_size,
            ),
            seconds=seconds,
            requests=requests,
            device=find_device(device),
        )
        with status.status("looking at servers, then at speed"):
            checks = list(examine(asked))
    except errors.CorpusClientError as error:
        raise exit_on(error) from error
    if as_json:
        typer.echo(json.dumps(report(checks)))
    else:
        Console().print(table(checks), highlight=False)
    if worst(checks) == "fail":
        raise typer.Exit(1)


def examine(asked: Questions) -> Iterator[Check]:
    """Every check that the ones before it leave possible.

    Raises:
        InvalidArgument: a question that cannot be asked.
    """
    endpoints = [Endpoint.parse(url) for url in asked.urls]
    with ExitStack() as stack:
        reached = []
        for endpoint in endpoints:
            control = stack.enter_context(ControlPlane(endpoint))
            check, server = servers.look_at(control)
            yield check
            if server is not None:
                reached.append(server)
        bound = None
        if reached:
            yield servers.compare_versions(reached)
            check, corpus = servers.choose_corpus(reached, asked.corpus)
            yield check
            if corpus is not None:
                check, bound = servers.compare_plans(reached, _plan(asked, corpus))
                yield check
        ring = None
        if bound is not None:
            ring = _ring(asked, bound)
            yield from _speed(asked, [server.control.endpoint for server in reached], bound, ring)
    loaders = host.num_loaders(asked.loaders)
    here = any(each.socket_path or each.host in LOOPBACK for each in endpoints)
    yield host.check_cores(num_cores(), loaders, server_here=here)
    if ring is not None:
        yield host.check_memory(ring, loaders)
        yield host.check_pinning(ring)
    yield host.check_gpu(list_gpus())


def _speed(
    asked: Questions, endpoints: Sequence[Endpoint], plan: BoundPlan, ring: RingSize
) -> Iterator[Check]:
    """Latency of each replica, delivery of all, and what follows for training."""
    part = RankSlice(rank=0, world_size=asked.world_size)
    try:
        for endpoint in endpoints:
            yield latency(endpoint, plan, asked.requests)
        spent = stages(endpoints[0], plan, part, ring, asked.device)
        delivered = deliver([each.url for each in endpoints], plan, part, asked.device, asked.seconds)
    except (errors.TransportError, errors.ServerError, errors.DeadlineExceeded) as error:
        advice = "run it again; if it fails again, the server's log tells why"
        yield Check(name="speed", status="fail", found=f"cannot be measured: {error}", advice=advice)
        return
    yield bandwidth(delivered, spent)
    yield bottleneck.diagnose(delivered.tokens_per_second, spent, asked.demand)
    everybody = bottleneck.servers_for_all(spent, asked.demand, len(endpoints))
    if everybody is not None:
        yield everybody


def _plan(asked: Questions, corpus: str) -> dict[str, Any]:
    return make_plan(
        corpus=corpus,
        seq_len=asked.seq_len,
        global_batch_size=asked.batch_size,
        seed=0,
        order="shuffle",
        stride=None,
    )


def _ring(asked: Questions, plan: BoundPlan) -> RingSize:
    """The slots that a loader of this plan would have."""
    seq_len, rows = int(plan.document["seq_len"]), asked.batch_size // asked.world_size
    return ring_size(
        batch_bytes=rows * (seq_len + 1) * STORED_DTYPES[plan.dtype].itemsize,
        prefetch_bytes=PREFETCH_BYTES,
        in_flight=IN_FLIGHT,
    )
