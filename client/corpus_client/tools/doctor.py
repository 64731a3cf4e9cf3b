"""`corpus-client doctor`: is everything as it should be, and is data the bottleneck?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from corpus_client import errors
from corpus_client.network.endpoint import LOOPBACK, Endpoint
from corpus_client.network.options import Network
from corpus_client.plan.document import make_plan
from corpus_client.plan.world import ranks_on_host
from corpus_client.staging.options import PREFETCH_BYTES
from corpus_client.staging.ring import find_device, runtime_of
from corpus_client.tools import checks, report
from corpus_client.tools.bench import measure
from corpus_client.tools.checks import STATUSES, Check, Failed, Server
from corpus_client.tools.machine import list_gpus, num_cores


def doctor(
    urls: Annotated[list[str], typer.Argument(help=report.URLS)],
    corpus: Annotated[str | None, typer.Option(help="name of the corpus; default: the only one")] = None,
    seq_len: Annotated[int, typer.Option(help="inputs per row")] = 1024,
    batch_size: Annotated[int, typer.Option(help="rows per global batch")] = 64,
    world_size: Annotated[int, typer.Option(help="ranks among which a batch is divided", min=1)] = 1,
    step_seconds: Annotated[
        float | None, typer.Option(help="length of a training step that never waits for data")
    ] = None,
    seconds: Annotated[float, typer.Option(help="how long to measure bandwidth", min=0.1)] = 3.0,
    header: report.Header = None,
    token_file: report.TokenFile = None,
    device: report.Device = None,
    as_json: report.AsJson = False,
) -> None:
    """Check servers, replicas and this machine, and answer: is data my bottleneck?

    Exit code 1 if a check fails.

    Example: corpus-client doctor localhost:8000 --corpus fineweb --step-seconds 0.25
    """

    def servers(endpoints: Sequence[Endpoint], network: Network, place: torch.device) -> Iterator[Check]:
        """Look at each server; and at those that answered: whether they agree, and what they deliver."""
        reached: list[Server] = []
        for endpoint in endpoints:
            try:
                check, server = checks.look_at(endpoint, network)
                reached.append(server)
            except Failed as failed:
                check = failed.check
            yield check
        if not reached:
            return
        try:
            yield checks.compare_versions(reached)
            check, name = checks.choose_corpus(reached, corpus)
            yield check
            plan = make_plan(corpus=name, seq_len=seq_len, global_batch_size=batch_size)
            check, bound = checks.compare_plans(reached, plan)
            yield check
            for server in reached:
                yield checks.latency(server, name, seq_len + 1)
            with report.open_loader(
                [server.url for server in reached],
                plan=bound.whole,
                network=network,
                world_size=world_size,
                device=place,
            ) as loader:
                delivered = measure(loader, seconds)
            yield checks.bandwidth(delivered)
            yield checks.bottleneck(delivered.stats, batch_size * seq_len / world_size, step_seconds)
        except Failed as failed:
            yield failed.check
        except (errors.TransportError, errors.ServerError, errors.DeadlineExceeded) as error:
            advice = "run it again; if it fails again, the server's log tells why"
            yield Check("speed", "fail", f"cannot be measured: {error}", advice)

    def examine() -> report.Report:
        if batch_size % world_size:
            raise errors.InvalidArgument(
                f"world_size must divide batch_size, got {world_size} and {batch_size}"
            )
        if step_seconds is not None and not step_seconds > 0:
            raise errors.InvalidArgument(f"step_seconds must be above 0, got {step_seconds}")
        endpoints, place = [Endpoint.parse(url) for url in report.whole_urls(urls)], find_device(device)
        network = replace(
            report.read_network("doctor", header, token_file), deadline_seconds=report.RESPONSE_SECONDS
        )
        made = [*servers(endpoints, network, place)]
        here = any(each.socket_path or each.host in LOOPBACK for each in endpoints)
        num_loaders = ranks_on_host(otherwise=max(1, torch.cuda.device_count()))
        made.append(checks.check_cores(num_cores(), num_loaders, server_here=here))
        made.append(checks.check_pinning(PREFETCH_BYTES, place))
        if runtime_of(place) is not None:
            made.append(checks.check_transfers(place))
        made.append(checks.check_gpu(list_gpus()))
        worst = max((check.status for check in made), key=list(STATUSES).index)
        return report.Report(
            data={"status": worst, "checks": [asdict(check) for check in made]}, shown=[_table(made)]
        )

    if report.run(examine, as_json=as_json).data["status"] == "fail":
        raise typer.Exit(1)


def _table(made: Sequence[Check]) -> Table:
    """Return a table: a row for each check, and one for each advice."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in made:
        style = STATUSES[check.status]
        table.add_row(f"[{style}]{check.status}[/]", escape(check.name), escape(check.found))
        if check.advice:
            table.add_row("", "", f"[{style}]->[/] {escape(check.advice)}")
    return table
