"""The phases of a soak: each runs for its share of the time and returns what it found."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from scripts.benchmarks.proxy import NGINX
from scripts.processes import running
from scripts.soak_lib import cluster, containers
from scripts.soak_lib import hosts as namespaces
from scripts.soak_lib.load import NUM_ROWS, Load, right_tokens
from scripts.soak_lib.watching import MIB, Watch, percentiles
from tests.client.network.unreliable import run as run_simulation
from tests.corpora import some_tokens, write_raw
from tests.docker.proxy import RunningProxy
from tests.faults.test_description import described_server, explore
from tests.raw_http import RawConnection, get
from tests.server.http.fuzz import run_round
from tests.serving import ROOT, RunningServer, environment

UPLOAD_BYTES = 2**30
FUZZ_REQUESTS = 3000
SIMULATED_BATCHES = 1500
UPLOAD_SECONDS = 5.0
"""Without progress; then the server has stopped reading and waits for the caller to leave."""


@dataclass
class Outcome:
    """What a phase found.

    Args:
        name: of the phase.
        failures: what must not have happened; empty: all is well.
        lines: Markdown for the report.
    """

    name: str
    failures: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Soak:
    """How the phases are run.

    Args:
        seconds: that this phase may take.
        folder: for files, of this phase alone.
    """

    seconds: float
    seed: int
    folder: Path

    def server(self, name: str = "server", **options: object) -> RunningServer:
        """Return a server over one corpus of 40 MB."""
        path = self.folder / "web.bin"
        if not path.exists():
            write_raw(path, some_tokens(20_000_000, seed=self.seed))
        (self.folder / name).mkdir()
        return RunningServer({"web": path}, self.folder / name, **options)  # type: ignore[arg-type]


def mixed_load(soak: Soak) -> Outcome:
    """Loaders, other routes, mistakes, new plans, stalled and leaving readers: does memory level off?"""
    outcome = Outcome("mixed load")
    draw = random.Random(soak.seed)
    with soak.server(workers=2) as server:
        expected = right_tokens(server.url)

        def ask() -> None:
            """Ask what training does not ask for, right and wrong, each over a connection of its own."""
            step = draw.randrange(10**6)
            spelled = f"corpus=web&seq_len=512&batch_size=8&seed={draw.randrange(50)}"
            path = draw.choice(
                (
                    "/v1/corpora",
                    f"/v1/corpora/web/tokens?start={step}&count=2000&format=json",
                    f"/v1/indices?{spelled}&step={step}",
                    f"/v1/batches?{spelled}&step={step}&format=npy",
                    f"/v1/batches?{spelled}&step={step}&rank=7",
                    f"/v1/lookup?{spelled}&token={step}",
                    "/metrics",
                    "/v1/plans?limit=5",
                    "/nowhere",
                )
            )
            answer = server.get(path)
            assert answer.status in (200, 404, 422), (path, answer)
            time.sleep(0.02)

        def post() -> None:
            """Post a plan that nobody posted before; a process keeps 1,024 in memory: soon reached."""
            seed = draw.randrange(2**60)
            stage = {"global_batch_size": 8, "mixture": {"web": 1}}
            assert server.post_plan({"seq_len": 64, "seed": seed, "stages": [stage]}).status == 200
            time.sleep(0.05)

        def stall() -> None:
            """Ask for 4 MiB, read little, and leave in one of three ways."""
            connection = RawConnection(server, receive_buffer=4096)
            connection.send(get("/v1/batches?corpus=web&seq_len=1024&batch_size=64&step=1&count=32"))
            connection.await_some(1000)
            time.sleep(draw.choice((0.1, 2.0)))
            (connection.reset if draw.random() < 0.5 else connection.close)()

        with Load(server.url, expected, num_loaders=4) as load, Watch(server.worker_pids) as watch:
            for work in (ask, ask, post, stall, stall):
                load.add(work)
            time.sleep(soak.seconds)
        # What the heap keeps only for responses under way is free ten seconds later.
        with Watch(server.worker_pids) as idle:
            time.sleep(10)
        _conclude(outcome, load)
        outcome.lines += [
            "Memory is that of the largest of two workers, without what it shares with files; ten seconds "
            f"after the load has gone {idle.samples[-1].memory / MIB:.1f} MiB.",
            "",
        ]
        outcome.lines += watch.table()
        if "Traceback" in server.log():
            outcome.failures.append("the server logged a traceback")
    return outcome


def replicas_killed(soak: Soak) -> Outcome:
    """Two replicas behind the shipped nginx configuration under 64 workers, one killed every 5 s."""
    outcome = Outcome("replicas behind nginx, one killed every 5 s")
    if NGINX.find() is None:
        outcome.lines.append("left out: nginx is not installed")
        return outcome
    with ExitStack() as stack:
        replicas = [stack.enter_context(soak.server(name)) for name in "ab"]
        expected = right_tokens(replicas[0].url)
        (soak.folder / "proxy").mkdir()
        proxy = stack.enter_context(RunningProxy(replicas, soak.folder / "proxy"))
        load = stack.enter_context(Load(proxy.url, expected, num_loaders=NUM_ROWS, pause_seconds=0.5))
        end, num_kills = time.monotonic() + soak.seconds, 0
        while time.monotonic() < end:
            began = time.monotonic()
            replicas[num_kills % 2].restart()
            num_kills += 1
            time.sleep(max(0.0, 5.0 - (time.monotonic() - began)))
    _conclude(outcome, load)
    outcome.lines.append(f"{num_kills} kills, each followed by a start.")
    return outcome


def containers_killed(soak: Soak) -> Outcome:
    """The containers of `docker/compose.yaml` under 64 workers with tokens, a replica killed every 5 s."""
    return _deployed("containers of the compose file, a replica killed every 5 s", containers, soak.seconds)


def pods_replaced(soak: Soak) -> Outcome:
    """The pods of `docker/kubernetes` under 64 workers with tokens: restarted one by one, evicted, killed."""
    return _deployed("pods in Kubernetes, restarted, evicted and killed", cluster, soak.seconds)


class Deployed(Protocol):
    """Replicas that somebody else started."""

    URL: str
    CORPUS: str
    TOKEN: Path

    def why_not(self) -> str | None:
        """Return why there is nothing to disturb, or None."""

    def disturb(self, seconds: float) -> Counter[str]:
        """Take replicas away and give them back for so long; return how often what was done."""


def _deployed(name: str, there: Deployed, seconds: float) -> Outcome:
    outcome = Outcome(name)
    if (reason := there.why_not()) is not None:
        outcome.lines.append(f"left out: {reason}")
        return outcome
    token = there.TOKEN.read_text().strip()
    expected = right_tokens(there.URL, there.CORPUS, token)
    load = Load(
        there.URL, expected, num_loaders=NUM_ROWS, pause_seconds=0.5, corpus=there.CORPUS, token=token
    )
    with load:
        done = there.disturb(seconds)
    _conclude(outcome, load)
    outcome.lines.append(", ".join(f"{number} {what}" for what, number in done.items()) + ".")
    return outcome


def hosts(soak: Soak) -> Outcome:
    """Ten hosts train from two replicas, half through nginx; the network swallows one, then the other."""
    outcome = Outcome("hosts in network namespaces, a replica cut off and healed")
    nginx, reason = NGINX.find(), namespaces.why_not()
    if nginx is None or reason is not None:
        outcome.lines.append(f"left out: {reason or 'nginx is not installed'}")
        return outcome
    path = write_raw(soak.folder / "web.bin", some_tokens(2_000_000, seed=soak.seed))
    steps, pause = 400, soak.seconds / 400
    with ExitStack() as stack:
        here = stack.enter_context(namespaces.Hosts(13))
        replicas = [
            stack.enter_context(namespaces.server_on(here, number, path, soak.folder / f"{number}"))
            for number in range(2)
        ]
        proxy = stack.enter_context(namespaces.proxy_on(here, 2, (0, 1), nginx))
        workers = []
        for number in range(3, 13):
            urls = proxy if number % 2 else ",".join(replicas)
            words = [sys.executable, "-c", namespaces.WORKER, urls, str(steps), str(pause)]
            workers.append(stack.enter_context(running(here.command(number, words), stdout=subprocess.PIPE)))
        for number in (0, 1):
            time.sleep(soak.seconds / 5)
            here.link(number, "down")
            time.sleep(soak.seconds / 5)
            here.link(number, "up")
        said = []
        for number, worker in enumerate(workers):
            written, _ = worker.communicate(timeout=120 + soak.seconds)
            said.append(written.decode().split())
            if worker.returncode:
                outcome.failures.append(f"worker {number} ended with {worker.returncode}; it says why above")
    if len({each[0] for each in said if each}) > 1:
        outcome.failures.append("workers got different tokens")
    outcome.lines += ["| host | by | longest wait s |", "|--:|---|--:|"]
    for number, each in enumerate(said, start=3):
        how = "nginx" if number % 2 else "both replicas"
        outcome.lines.append(f"| {number} | {how} | {each[1] if each else 'failed'} |")
    return outcome


def overload(soak: Soak) -> Outcome:
    """Ten times the limit of answers at once; a refusal says so within 50 ms at the 99th percentile."""
    outcome = Outcome("overload")
    limit = 8
    target = "/v1/batches?corpus=web&seq_len=1024&batch_size=64&count=4&step="
    with soak.server(config=f"[server]\nmax_concurrent_answers = {limit}\n") as server:
        unloaded, _ = _burst(server, target, 1, min(5.0, soak.seconds / 4))
        with Watch(server.worker_pids) as watch:
            accepted, refused = _burst(server, target, 10 * limit, soak.seconds)
        memory = [each.memory for each in watch.samples]
    outcome.lines += [
        f"- alone: {percentiles(unloaded)}",
        f"- accepted, {10 * limit} at once for {limit} slots: {percentiles(accepted)}",
        f"- refused: {percentiles(refused)}",
        f"- memory of the worker grew by {(max(memory) - memory[0]) / MIB:.1f} MiB",
        "",
        "Clients and server share the cores of this machine, so the times include waits for a core.",
    ]
    if not refused:
        outcome.failures.append("nothing was refused")
    return outcome


def _burst(
    server: RunningServer, target: str, num_clients: int, seconds: float
) -> tuple[list[float], list[float]]:
    accepted: list[float] = []
    refused: list[float] = []
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        with contextlib.closing(server.connect()) as connection:
            step = number * 1000
            while time.monotonic() < end:
                step += 7
                began = time.monotonic()
                connection.request("GET", f"{target}{step}")
                response = connection.getresponse()
                response.read()
                (accepted if response.status == 200 else refused).append(time.monotonic() - began)
                if response.status != 200:
                    time.sleep(float(response.headers["Retry-After"]))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return accepted, refused


def uploads(soak: Soak) -> Outcome:
    """A body of 1 GiB to every route: how much is taken, and what it costs."""
    outcome = Outcome("1 GiB to every route")
    outcome.lines += ["| route | status | MiB taken | seconds | growth MiB |", "|---|--:|--:|--:|--:|"]
    with soak.server() as server:
        paths = server.get("/openapi.json").json()["paths"]
        for path in paths:
            target = re.sub(r"\{\w+\}", "0", path).replace("{plan_id}", 64 * "0")
            for method in ("GET", "POST"):
                with Watch(server.worker_pids) as watch:
                    began = time.monotonic()
                    status, taken = _upload(server, method, target)
                    seconds = time.monotonic() - began
                memory = [each.memory for each in watch.samples]
                growth = (max(memory) - memory[0]) / MIB
                outcome.lines.append(
                    f"| {method} {path} | {status} | {taken / MIB:.1f} | {seconds:.1f} | {growth:.1f} |"
                )
                if growth > 50 or status >= 500:
                    outcome.failures.append(f"{method} {path}: {status}, growth {growth:.0f} MiB")
    return outcome


def _upload(server: RunningServer, method: str, target: str) -> tuple[int, int]:
    """Send a body until it is refused; return the status, 0 if none came, and the bytes sent."""
    piece, sent = bytes(MIB), 0
    with contextlib.closing(
        socket.create_connection(("127.0.0.1", server.port), UPLOAD_SECONDS)
    ) as connection:
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {UPLOAD_BYTES}\r\n\r\n"
        connection.sendall(head.encode())
        with contextlib.suppress(OSError):
            while sent < UPLOAD_BYTES:
                sent += connection.send(piece)
        answer = b""
        with contextlib.suppress(OSError):
            answer = connection.recv(65_536)
    found = re.match(rb"HTTP/1\.1 (\d+)", answer)
    return int(found[1]) if found else 0, sent


def fuzzing(soak: Soak) -> Outcome:
    """Raw connections with requests in every interleaving, while files change."""
    outcome = Outcome("raw-socket fuzzing")
    counts: Counter[str] = Counter()
    end, number = time.monotonic() + soak.seconds, 0
    while time.monotonic() < end and not outcome.failures:
        try:
            counts += run_round(soak.seed, number, FUZZ_REQUESTS)
        except Exception as error:  # noqa: BLE001 - whatever it is goes into the report
            outcome.failures.append(f"round {number}: {error}")
        number += 1
    outcome.lines.append(f"{number} rounds; {dict(counts.most_common(12))}")
    return outcome


def description(soak: Soak) -> Outcome:
    """Schemathesis with every check, over and over with other seeds."""
    outcome = Outcome("Schemathesis")
    end, number = time.monotonic() + soak.seconds, 0
    with described_server(soak.folder) as server:
        while time.monotonic() < end and not outcome.failures:
            code, report = explore(server.url, num_examples=20, seed=soak.seed + number)
            number += 1
            outcome.lines += [line for line in report.splitlines() if "generated" in line]
            if code:
                outcome.failures.append(report[report.find("FAILURES") :][:3000])
    return outcome


def simulation(soak: Soak) -> Outcome:
    """The client's network half in simulated time: up to a million batches."""
    outcome = Outcome("the client in simulated time")
    end, number, num_faults, seconds = time.monotonic() + soak.seconds, 0, 0, 0.0
    seed = 10_000 * soak.seed
    while time.monotonic() < end and number * SIMULATED_BATCHES < 1_000_000:
        try:
            report = run_simulation(seed + number, SIMULATED_BATCHES)
        except AssertionError as error:
            outcome.failures.append(str(error))
        else:
            num_faults += report.num_faults
            seconds += report.seconds
        number += 1
    outcome.lines.append(
        f"{number * SIMULATED_BATCHES:,} batches, {num_faults:,} faults, {seconds / 3600:.1f} simulated hours"
    )
    return outcome


def suite(soak: Soak) -> Outcome:
    """The long forms of the suite's own tests: network faults, killed processes, a failing disk."""
    outcome = Outcome("long forms of the suite")
    tests = (
        *("tests/faults/test_network.py", "tests/faults/test_killers.py", "tests/faults/test_disk.py"),
        "tests/server/run/test_supervisor.py::test_workers_killed_at_random_are_replaced_at_once",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "--timeout", "900", *tests],
        cwd=ROOT,
        env=environment(CORPUS_SOAK_SECONDS=str(int(soak.seconds / 3)), CORPUS_FAULT_SEED=str(soak.seed)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if re.search(r"passed|failed|answers|steps, ", line)]
    outcome.lines += [f"- {line.lstrip('.')}" for line in said[-8:]]
    if done.returncode:
        outcome.failures.append(done.stdout[-3000:])
    return outcome


def _conclude(outcome: Outcome, load: Load) -> None:
    findings = load.findings
    outcome.lines += [
        f"- batches {percentiles(findings.waits)}",
        f"- right: {findings.num_right:,}, wrong: {findings.num_wrong}, errors: {len(findings.errors)}",
        "",
    ]
    outcome.failures += findings.errors[:5]
    if findings.num_wrong:
        outcome.failures.append(f"{findings.num_wrong} batches had wrong tokens")


PHASES: Sequence[tuple[float, Callable[[Soak], Outcome]]] = (
    (0.30, mixed_load),
    (0.20, replicas_killed),
    (0.05, containers_killed),
    (0.05, pods_replaced),
    (0.04, hosts),
    (0.12, fuzzing),
    (0.12, simulation),
    (0.10, suite),
    (0.05, description),
    (0.03, overload),
    (0.04, uploads),
)
"""Share of the time, and the phase."""
