"""What `corpus-client doctor` looks at: this machine, servers, whether they are replicas, speed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Literal, TypeVar

import torch

from corpus_client import __version__, errors
from corpus_client.network import control, wire
from corpus_client.network.asking import HttpClient
from corpus_client.network.control import BoundPlan, Question
from corpus_client.network.endpoint import LOOPBACK, Endpoint
from corpus_client.network.options import Network
from corpus_client.network.transport import Connection
from corpus_client.observe.attribution import LoaderStats
from corpus_client.staging.ring import open_stager
from corpus_client.tools.copies import KINDS, to_device
from corpus_client.tools.machine import Gpu, links
from corpus_client.tools.measured import BenchResult
from corpus_client.tools.timing import Clock, Spread, seconds_name, size_name

T = TypeVar("T")

CORES_PER_LOADER = 2  # a training process and its loader's thread; the server, if it is here, needs one more
TRANSFER_BYTES = 16 << 20  # of one copy, as of a loader's slot
LEAST_OF_PINNED = 0.9  # of the bandwidth from torch's pinned memory

RECEIPT_STEPS = (0, 1, 1000)
"""A receipt is of a whole global batch: a few tell other tokens, or another order, from the same."""

REQUESTS = 100  # of each kind to measure latency, fewer if they take longer than two seconds
FAR_SECONDS = 0.01  # a round trip beyond which two requests on the wire no longer hide the way
HEADROOM = 1.25  # below it, a step that is a little slower than usual on the way makes the GPU wait

FIXES = {
    "server": "give the server more --workers (one per core), or more replicas; if the files were cold, "
    "run this again: the second time they are in its memory",
    "network": "use a faster link, or more replicas on other links; on the server's own host use uds://, and "
    "where a copy of the shards fits, read it instead of receiving tokens (local_root)",
    "host": "leave the loader a core of its own, and let the server run elsewhere; verify=False spares the "
    "checksum, dtype=torch.int32 or None half or all of the widening on the CPU",
    "transfer": "look at the GPU's PCIe link and at what else uses it, then run `corpus-client transfer`",
    "retry": "look at the server's log: requests failed and were repeated after a pause",
    "bucket": "fill the server's cache before the run (`corpus-server stage`), or compare the bandwidth of "
    "its object store with what training consumes (docs/stores.md)",
}
"""What to do, by the cause of a loader's waits (`WaitSeconds`)."""

MEANINGS = {
    "server": "the server's responses",
    "network": "the network",
    "host": "this machine's CPU: checksums and copies",
    "transfer": "copies to the device",
    "retry": "pauses after failures",
    "bucket": "the server's object store",
}
"""What a loader waited for, by the same names."""

Status = Literal["ok", "warn", "fail"]
STATUSES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
"""From the best to the worst, with the style of a terminal."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what is the case, what to do about it, and figures for machines."""

    name: str
    status: Status
    found: str
    advice: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """A check failed, or `status` says how it ended, and those that build on it cannot be made."""

    def __init__(self, name: str, found: str, advice: str, status: Status = "fail") -> None:
        super().__init__(found)
        self.check = Check(name, status, found, advice)


def check_cores(cores: float, loaders: int, *, server_here: bool) -> Check:
    """Count a core for each training process, each loader's thread, and a server that runs here."""
    needed = CORES_PER_LOADER * loaders + server_here
    found = f"{cores:g} for {loaders} loader{'s' * (loaders > 1)}{' and a server' * server_here}"
    advice = f"give this job {needed} cores: {CORES_PER_LOADER} for each training process and its loader"
    advice += ", one for the server" * server_here
    measured = {"cores": cores, "loaders": loaders, "needed": needed}
    enough = cores >= needed
    return Check("cores", "ok" if enough else "warn", found, "" if enough else advice, measured)


def check_pinning(num_bytes: int, device: torch.device) -> Check:
    """Page-lock as much memory as a loader's slots take, as the loader does it."""
    if device.type == "cpu":
        return Check("page-locking", "ok", "not needed without a GPU")
    locked = open_stager(device).host_memory(num_bytes).is_pinned()
    found = f"{size_name(num_bytes)} {'were' if locked else 'could not be'} page-locked"
    if locked:
        return Check("page-locking", "ok", found, measured={"pinned_bytes": num_bytes})
    advice = "copies to the device block; the warnings on stderr name what failed"
    return Check("page-locking", "warn", found, advice, {"pinned_bytes": 0})


def check_transfers(device: torch.device) -> Check:
    """Compare copies to the GPU from pageable, torch-pinned and the loader's own registered memory."""
    clock, ways = Clock(device), islice(to_device(TRANSFER_BYTES, device), len(KINDS))
    found = [clock.measure(name, TRANSFER_BYTES, call, repeats=20) for name, call in ways]
    speeds = {kind: each["bytes_per_second"] for kind, each in zip(KINDS, found, strict=True)}
    listed = ", ".join(f"{kind} {speed / 1e9:.1f} GB/s" for kind, speed in speeds.items())
    told = f"{size_name(TRANSFER_BYTES)} to {device}: {listed}"
    measured = {f"{kind}_bytes_per_second": speed for kind, speed in speeds.items()}
    if speeds["registered"] >= LEAST_OF_PINNED * speeds["torch-pinned"]:
        return Check("transfers", "ok", told, measured=measured)
    advice = (
        "the loader's memory is slower than torch's: please report this line, and what "
        "`corpus-client transfer --json` says"
    )
    return Check("transfers", "warn", told, advice, measured)


def check_gpu(driver: Sequence[Gpu]) -> Check:
    """Compare what torch sees with what the driver says; `driver`: of `list_gpus`."""
    seen = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    here, cuda = f"torch {torch.__version__}", torch.version.cuda
    version = driver[0].driver if driver else None
    measured = {"torch": torch.__version__, "cuda": cuda, "gpus": seen, "driver": version}
    if not seen and not driver:
        return Check("GPU", "ok", f"none; batches go to host memory ({here})", measured=measured)
    if not seen:
        found = f"{here} (CUDA {cuda}) sees none of the driver's {len(driver)}"
        advice = "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA"
        return Check("GPU", "fail", found, advice if cuda else "install a CUDA build of torch", measured)
    names = ", ".join(f"{seen.count(name)} x {name}" for name in dict.fromkeys(seen))
    found = f"{names}; {here}, CUDA {cuda}"
    if not driver:
        return Check("GPU", "ok", found, "install nvidia-smi to see driver and PCIe link", measured)
    found += f", driver {version}, {links(driver)}"
    if narrow := [gpu for gpu in driver if gpu.is_narrow]:
        found += f"; {len(narrow)} of them could have x{narrow[0].width_max}"
        advice = "look at slot, riser and BIOS (a virtual machine may show another link than there is)"
        return Check("GPU", "warn", found, advice, measured)
    return Check("GPU", "ok", found, measured=measured)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answered: one of its addresses, its version, its descriptions of corpora by name."""

    endpoint: Endpoint
    network: Network
    version: str = ""
    corpora: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Its URL as given on the command line."""
        return self.endpoint.url

    def ask(self, question: Question[T]) -> T:
        """Return its response; one that is silent is asked again until the deadline: it may only be busy."""
        deadline = time.monotonic() + self.network.deadline_seconds
        while True:
            with closing(HttpClient(self.endpoint, self.network)) as client:
                try:
                    return client.ask(question)
                except errors.NoProgress:
                    if time.monotonic() >= deadline:
                        raise


def look_at(endpoint: Endpoint, network: Network) -> tuple[Check, Server]:
    """Find out whether a server is there and ready; `Failed` if it cannot be asked for anything."""
    url = endpoint.url
    try:
        server = _reached([endpoint] if endpoint.address else endpoint.resolve(), network)
    except (errors.TransportError, errors.ReplicaUnusable) as error:
        raise Failed("server", f"not reachable: {error}", _where(endpoint)) from error
    except errors.ServerError as error:
        advice = "check that the URL is that of a corpus-server, and of its route prefix if it has one"
        raise Failed("server", f"{url}: something else answers: {error}", advice) from error
    try:
        server.ask(control.get("/readyz"))
        listed = server.ask(control.get("/v1/corpora"))["corpora"]
        corpora = {str(corpus["name"]): corpus for corpus in listed}
        there = str(server.ask(control.get("/openapi.json")).get("info", {}).get("version", "unknown"))
    except errors.CorpusClientError as error:
        advice = "mend what it says on the server, or leave it out; its log tells more"
        raise Failed("server", f"{url}: not ready: {error}", advice) from error
    found = f"{url}: ready, version {there}, corpora: {', '.join(corpora)}"
    measured = {"url": url, "version": there, "corpora": list(corpora)}
    return Check("server", "ok", found, measured=measured), replace(server, version=there, corpora=corpora)


def _reached(endpoints: Sequence[Endpoint], network: Network) -> Server:
    """Return the first address of a server at which one is alive."""
    for number, endpoint in enumerate(endpoints, 1):
        server = Server(endpoint, network)
        try:
            if server.ask(control.get("/healthz")).get("status") != "alive":
                raise errors.ResponseCorrupt(f"{endpoint.url}/healthz: not the response of a corpus-server")
        except errors.ConnectionFailed:
            if number == len(endpoints):
                raise
        else:
            return server
    raise errors.HostNotFound(f"{endpoints} has no address")


def compare_versions(servers: Sequence[Server]) -> Check:
    """Compare the servers' version with the client's, which is released with the same one."""
    there = sorted({server.version for server in servers})
    measured = {"client": __version__, "servers": there}
    if there == [__version__]:
        return Check("versions", "ok", f"{__version__} on both sides", measured=measured)
    advice = "install the same version everywhere; other pairs are not tested together"
    return Check("versions", "warn", f"client {__version__}, servers {', '.join(there)}", advice, measured)


def choose_corpus(servers: Sequence[Server], asked: str | None, options: Sequence[str]) -> tuple[Check, str]:
    """Return the corpus asked for, or the only one; `Failed` if not all servers have the same one.

    Where several are served and none is named, nothing is wrong, but there is nothing to measure; it is
    wrong where options say what to measure.
    """
    served = sorted(set.intersection(*(set(server.corpora) for server in servers)))
    name = asked if asked is not None else served[0] if len(served) == 1 else None
    if name is None:
        if served:
            advice = f"to compare and measure, name one of them: --corpus {served[0]}"
            found = f"served are {', '.join(served)}"
            if options:
                raise Failed("corpus", f"{found}: nothing was measured for {', '.join(options)}", advice)
            raise Failed("corpus", found, advice, "ok")
        advice = "give URLs of replicas, which serve the same corpora"
        raise Failed("corpus", "all servers have none in common", advice)
    if missing := [server.url for server in servers if name not in server.corpora]:
        advice = f"name one that is: {', '.join(served) or 'they have none in common'}"
        raise Failed("corpus", f"{name!r} is not served by {', '.join(missing)}", advice)
    fingerprints = {server.url: str(server.corpora[name]["fingerprint"]) for server in servers}
    if len(set(fingerprints.values())) > 1:
        listed = "; ".join(f"{url}: {value[:24]}..." for url, value in fingerprints.items())
        advice = "find the wrong one with `corpus-server verify`, copy it anew and restart there"
        raise Failed("corpus", f"{name!r} has other content on each: {listed}", advice)
    measured = {key: servers[0].corpora[name][key] for key in ("name", "num_tokens", "dtype", "fingerprint")}
    size, fingerprint = f"{measured['num_tokens']:,} {measured['dtype']}", measured["fingerprint"][:24]
    return Check("corpus", "ok", f"{name}: {size} tokens, {fingerprint}...", measured=measured), name


def compare_plans(servers: Sequence[Server], plan: Mapping[str, Any]) -> tuple[Check, BoundPlan]:
    """Compare what servers make of a plan: its id, and the tokens of some steps; `Failed` if they differ."""
    seen = {}
    for server in servers:
        try:
            bound = server.ask(control.post_plan(plan))
            receipts = [server.ask(control.receipt(bound.plan_id, step)) for step in RECEIPT_STEPS]
        except errors.CorpusClientError as error:
            advice = "change what it names: --seq-len, --batch-size, --world-size or the corpus"
            raise Failed("plan", f"{server.url}: {error}", advice) from error
        seen[server.url] = (bound.plan_id, *receipts)
    if len(set(seen.values())) > 1:
        listed = "; ".join(f"{url}: plan {ids[0][:12]}..., {ids[1]}" for url, ids in seen.items())
        advice = "run the same version over the same corpora everywhere; a loader would refuse one of them"
        raise Failed("plan", f"replicas do not agree: {listed}", advice)
    agreeing = f"{len(servers)} replicas agree on it" if len(servers) > 1 else "accepted"
    found = f"{bound.plan_id[:12]}...: {agreeing}, receipts of steps {', '.join(map(str, RECEIPT_STEPS))}"
    return Check("plan", "ok", found, measured={"plan_id": bound.plan_id}), bound


def _where(endpoint: Endpoint) -> str:
    if endpoint.socket_path is not None:
        return "is the server running with --uds and this path, and may this user enter its folder?"
    if endpoint.host in LOOPBACK:
        return "is the server running here, on this port?"
    return "is the server running, with --host 0.0.0.0, and does a firewall let this port through?"


def latency(server: Server, corpus: str, num_tokens: int) -> Check:
    """Measure round trips on one connection, unloaded: of a token, and of a row of tokens."""
    clock, dtype = Clock(torch.device("cpu")), str(server.corpora[corpus]["dtype"])
    with closing(Connection(server.endpoint, server.network)) as connection:

        def seconds(count: int) -> Spread:
            request = wire.tokens_request(corpus, 0, count, dtype)
            buffer = memoryview(bytearray(request.num_bytes))

            def ask() -> None:
                deadline = time.monotonic() + server.network.attempt_seconds
                connection.send(request.path, deadline=deadline)
                connection.receive_into(buffer, request, deadline=deadline)

            return clock.time(ask, repeats=REQUESTS)[0]

        token, row = seconds(1), seconds(num_tokens)
    far = token.median > FAR_SECONDS
    shown = [seconds_name(each) for each in (token.median, token.p99, row.median, row.p99)]
    times = f"a token {shown[0]}, {shown[1]}; {num_tokens} tokens {shown[2]}, {shown[3]} (p50, p99)"
    advice = "the server is far away: keep more requests on the wire with in_flight=" if far else ""
    measured = {"url": server.url, "token_seconds": asdict(token), "row_seconds": asdict(row)}
    return Check("latency", "warn" if far else "ok", f"{server.url}: {times}", advice, measured)


def bandwidth(found: BenchResult) -> Check:
    """Report a short run of a loader: data must arrive without being asked for twice."""
    stats, waits = found.stats, asdict(found.stats.wait)
    waited = sum(waits.values()) or 1.0
    causes = ", ".join(
        f"{_meant(name)} {each / waited:.0%}" for name, each in waits.items() if each >= 0.005 * waited
    )
    again = f", {stats.num_retries} requests repeated" if stats.num_retries else ""
    rates = f"{_rate(stats.tokens_per_second)}, {found.bytes_per_second / 1e6:,.0f} MB/s{again}"
    text = f"{rates}; this loop, which does nothing else, waited for {causes or 'nothing'}"
    advice = FIXES["retry"] if again else ""
    return Check("bandwidth", "warn" if again else "ok", text, advice, found.as_json())


def bottleneck(stats: LoaderStats, rank_tokens: float, step_seconds: float | None) -> Check:
    """Answer for one rank, which needs `rank_tokens` for a step: is data the bottleneck?

    stats: of a loader in a loop that does nothing but ask.
    step_seconds: of a step that never waits for data; None: not known.
    """
    delivered = stats.tokens_per_second
    cause = stats.wait.cause or "host"  # a loop that never waits is held by its own copy of each batch
    shortest = rank_tokens / delivered
    measured = {"delivered_tokens_per_second": delivered, "cause": cause, "shortest_step_seconds": shortest}
    if step_seconds is None:
        steps = f"steps of {seconds_name(shortest)} or longer ({rank_tokens:,.0f} tokens a rank)"
        found = f"data keeps up with {steps}; below that, {_meant(cause)} sets the pace"
        advice = (
            "is data the bottleneck? say how long a step takes with --step-seconds; if steps are shorter, "
        )
        advice += FIXES[cause]
        return Check("bottleneck", "ok", found, advice, measured)
    needed = rank_tokens / step_seconds
    measured |= {"needed_tokens_per_second": needed, "delivered_over_needed": delivered / needed}
    rates = (
        f"a rank needs {_rate(needed)}, {_rate(delivered)} arrive ({_figure(delivered / needed)} times that)"
    )
    if delivered >= HEADROOM * needed:
        return Check("bottleneck", "ok", f"data is not: {rates}", measured=measured)
    if delivered >= needed:
        found = f"data hardly keeps up: {rates}; the cause is {_meant(cause)}"
        return Check("bottleneck", "warn", found, FIXES[cause], measured)
    longer = f"so a step of {seconds_name(step_seconds)} takes {seconds_name(shortest)}"
    return Check(
        "bottleneck",
        "fail",
        f"data is: {rates}, {longer}; the cause is {_meant(cause)}",
        FIXES[cause],
        measured,
    )


def _meant(cause: str) -> str:
    """Return a cause by its name in `LoaderStats`, and in words."""
    return f"{cause} ({MEANINGS[cause]})"


def _rate(tokens_per_second: float) -> str:
    return f"{_figure(tokens_per_second / 1e6)} M tokens/s"


def _figure(value: float) -> str:
    """Return three digits as people write them: `0.984`, `2,020`."""
    return f"{float(f'{value:.3g}'):,.10g}"
