"""Check servers, replicas and this machine, for `doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
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
from corpus_client.tools.checks import STATUSES, Check, Failed, Server
from corpus_client.tools.machine import list_gpus, num_cores
from corpus_client.tools.measured import measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run of training asks of servers: that of the options of `doctor`.

    Attributes:
        corpus: None: the only one.
        options: those that were given of what follows, by the names of the command line.
        step_seconds: length of a training step that never waits for data, if it is known.
        seconds: how long bandwidth is measured.
    """

    corpus: str | None
    options: Sequence[str]
    seq_len: int
    batch_size: int
    world_size: int
    step_seconds: float | None
    seconds: float

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise errors.InvalidArgument(
                f"world_size must divide batch_size, got {self.world_size} and {self.batch_size}"
            )
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise errors.InvalidArgument(f"step_seconds must be above 0, got {self.step_seconds}")


def examine(run: Run, urls: Sequence[str], network: Network, device: str | None) -> report.Report:
    """Check everything; the worst status of all is that of the report."""
    endpoints, place = [Endpoint.parse(url) for url in report.whole_urls(urls)], find_device(device)
    made = [*_servers(run, endpoints, network, place)]
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


def _servers(
    run: Run, endpoints: Sequence[Endpoint], network: Network, place: torch.device
) -> Iterator[Check]:
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
        check, name = checks.choose_corpus(reached, run.corpus, run.options)
        yield check
        plan = make_plan(corpus=name, seq_len=run.seq_len, global_batch_size=run.batch_size)
        check, bound = checks.compare_plans(reached, plan)
        yield check
        for server in reached:
            yield checks.latency(server, name, run.seq_len + 1)
        with report.open_loader(
            [server.url for server in reached],
            plan=bound.whole,
            network=network,
            world_size=run.world_size,
            device=place,
        ) as loader:
            delivered = measure(loader, run.seconds)
        yield checks.bandwidth(delivered)
        yield checks.bottleneck(
            delivered.stats, run.batch_size * run.seq_len / run.world_size, run.step_seconds
        )
    except Failed as failed:
        yield failed.check
    except (errors.TransportError, errors.ServerError, errors.DeadlineExceeded) as error:
        advice = "run it again; if it fails again, the server's log tells why"
        yield Check("speed", "fail", f"cannot be measured: {error}", advice)


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
