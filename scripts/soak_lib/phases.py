"""The phases of a soak: each runs for its share of the time and returns what it found.

What a test can do for longer is done by the test: `suite`. The others have no short form, or no end.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.soak_lib.load import MIB, NUM_ROWS, Load, growth_table, watched
from tests.client.network.unreliable import run as run_simulation
from tests.corpora import some_tokens, write_raw
from tests.faults.test_description import described_server, explore
from tests.raw_http import RawConnection, get
from tests.server.http.fuzz import run_round
from tests.serving import ROOT, RunningServer, environment

FUZZ_REQUESTS = 3000
SIMULATED_BATCHES = 1500
SECONDS_BETWEEN_DISTURBANCES = 5.0
LONG_FORMS = (
    "tests/faults/test_network.py",
    "tests/faults/test_killers.py",
    "tests/faults/test_disk.py",
    "tests/faults/test_hosts.py",
    "tests/docker/test_proxies.py::test_a_replica_killed_under_load_is_no_failure",
    "tests/server/run/test_supervisor.py::test_workers_killed_at_random_are_replaced_at_once",
)
"""Tests that CORPUS_SOAK_SECONDS makes longer."""

NUM_LONG = 5  # of their cases take that time each
LONGER = ("--timeout", "3600", "-o", "faulthandler_timeout=3660")  # than the suite's own 120 and 140 s


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

    def conclude(self, load: Load) -> None:
        """Take over what a load found."""
        failures, lines = load.found()
        self.failures += failures
        self.lines += lines


@dataclass(frozen=True, kw_only=True)
class Soak:
    """How the phases are run.

    Args:
        seconds: that this phase may take.
        folder: for files, of this phase alone.
        url, corpus, token_file: of replicas that run already.
        disturb: command of a shell that takes some of them away and gives them back.
    """

    seconds: float
    seed: int
    folder: Path
    url: str | None = None
    corpus: str = "train"
    token_file: Path | None = None
    disturb: str = "true"


def mixed_load(soak: Soak) -> Outcome:
    """Loaders, other routes, mistakes, new plans, stalled and leaving readers: does memory level off?"""
    outcome = Outcome("mixed load")
    draw = random.Random(soak.seed)
    path = write_raw(soak.folder / "web.bin", some_tokens(20_000_000, seed=soak.seed))
    (soak.folder / "server").mkdir()
    with RunningServer({"web": path}, soak.folder / "server", workers=2) as server:

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
            response = server.get(path)
            assert response.status in (200, 404, 422), (path, response)
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

        with Load(server.url, num_loaders=4) as load, watched(server.worker_pids) as samples:
            for work in (ask, ask, post, stall, stall):
                load.add(work)
            time.sleep(soak.seconds)
        # What the heap keeps only for responses under way is free ten seconds later.
        with watched(server.worker_pids) as idle:
            time.sleep(10)
        outcome.conclude(load)
        outcome.lines += [
            "Memory is that of the largest of two workers, without what it shares with files; ten seconds "
            f"after the load has gone {idle[-1].memory / MIB:.1f} MiB.",
            "",
            *growth_table(samples),
        ]
        if "Traceback" in server.log():
            outcome.failures.append("the server logged a traceback")
    return outcome


def deployed(soak: Soak) -> Outcome:
    """Replicas that run already, under 64 workers, while the command of `--disturb` runs over and over."""
    outcome = Outcome("replicas that run already")
    if soak.url is None:
        outcome.lines.append("left out: no --url names them")
        return outcome
    token = soak.token_file.read_text().strip() if soak.token_file else None
    with Load(soak.url, num_loaders=NUM_ROWS, pause_seconds=0.5, corpus=soak.corpus, token=token) as load:
        end, number = time.monotonic() + soak.seconds, 0  # now that the load knows what is right
        while time.monotonic() < end and not outcome.failures:
            done = subprocess.run(["sh", "-ec", soak.disturb], stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:  # what was not done must not count
                outcome.failures.append(f"the command ended with {done.returncode}: {done.stderr[-3000:]}")
            number += 1
            time.sleep(SECONDS_BETWEEN_DISTURBANCES)
    outcome.conclude(load)
    outcome.lines.append(f"{number} x `{soak.disturb}`")
    return outcome


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
    """The long forms of tests: faults of network, disk and hosts; killed workers, servers and replicas."""
    outcome = Outcome("long forms of the suite")
    seconds = str(max(1, int(soak.seconds / NUM_LONG)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", *LONGER, *LONG_FORMS],
        cwd=ROOT,
        env=environment(CORPUS_SOAK_SECONDS=seconds, CORPUS_FAULT_SEED=str(soak.seed)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if re.search(r"passed|failed|answers|steps, ", line)]
    outcome.lines += [f"- {line.lstrip('.')}" for line in said]
    if done.returncode:
        outcome.failures.append(done.stdout[-3000:])
    return outcome


PHASES: Sequence[tuple[float, Callable[[Soak], Outcome]]] = (
    (0.30, mixed_load),
    (0.25, suite),
    (0.10, deployed),
    (0.15, fuzzing),
    (0.15, simulation),
    (0.05, description),
)
"""Share of the time, and the phase."""
