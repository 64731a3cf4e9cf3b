"""Measure how long one turn of a worker's event loop takes, and what a small request waits, beside loaders.

A turn is what the loop does between two waits for events: for as long as it takes, all connections of the
worker wait. `turns.c` stands between the server and the C library and writes down each one: how long it took,
how much of that it ran (CPU), and how long it waited for the interpreter's lock. In the rest it waited for a
core. A lone client asks for `/healthz` and 8 x 129 tokens, a millisecond after each response. Loads and
servers take turns. Then questions of other kinds are asked of this tree's server, one by one, alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.benchmarks import corpus
from scripts.benchmarks.axes.rows import NUM_TOKENS, QUICK_TOKENS, documents, served
from scripts.benchmarks.clients import NUM_SMALL, PACKED, Clients, Job, connected
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.contest import BEFORE, NOW, shapes_of
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.expected import document_of
from scripts.benchmarks.lone import Lone
from scripts.benchmarks.measure import CPU, SPEED, Rounds, cpu_seconds
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import Server, checked_out, serving
from scripts.benchmarks.turns import Recorded, recorded, recorder, recording
from scripts.processes import connect

HELP = "the longest turn of a worker's event loop, and what small requests wait, beside loaders and questions"

SMALL = Shape(rows=8, length=129)
PAUSE_SECONDS = 0.001
RUN_OF_SECONDS = 2.0  # times --seconds: 3 s by default for each load, server and round
QUESTIONS = "questions"
NOTHING, READERS = "nothing", f"{NUM_SMALL} readers of {SMALL}"
READ_EVERY_SECONDS = 0.25
RAN_MS = 2.0
HEALTH, BATCH = "/healthz", str(SMALL)
NUM_EXCLUDED, QUICK_EXCLUDED = 62_500, 100  # ranges of the large plan
BODY_BYTES = 40 << 20  # more than a plan may have
TURNS = {
    "took_p999": ("turn p99.9 ms", ".2f"),
    "took": ("longest turn ms", ".2f"),
    "ran_p999": ("CPU of a turn p99.9 ms", ".2f"),
    "ran": ("most CPU ms", ".2f"),
    "waited_p999": ("wait for the lock p99.9 ms", ".2f"),
    "waited": ("longest ms", ".2f"),
    SPEED: ("loader M tokens/s", ",.0f"),
    CPU: ("server's CPU s / 10^9", ".2f"),
}
PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "longest": 100.0}
WAITS = {f"{what} {name}": (f"{what} {name} ms", ".2f") for what in (HEALTH, BATCH) for name in PERCENTILES}
ASKED = {
    "response": ("response ms", ".1f"),
    **{name: TURNS[name] for name in ("took", "ran", "waited")},
}

Loads = Mapping[str, Callable[[Server], Job | None]]


@dataclass
class Watched:
    """A server, the turns of its worker, and what a lone client asks it for."""

    server: Server
    turns: Recorded
    lone: Mapping[str, Lone]


def measure(options: Options) -> Report:
    """Measure every server beside every load; then ask the questions."""
    path = documents(options.cache, QUICK_TOKENS if options.quick else NUM_TOKENS)
    corpus.warm(path)
    loops, waits = Rounds("turns of the event loop", TURNS), Rounds("a lone client", WAITS)
    asked = Rounds("questions, alone", ASKED)
    loads = _loads(path, options)
    chosen = options.chosen([*loads, QUESTIONS])
    with ExitStack() as stack:
        watched = {NOW: stack.enter_context(_watched(path))}
        if options.before is not None:
            tree = stack.enter_context(checked_out(options.before))
            watched[BEFORE] = stack.enter_context(_watched(path, tree=tree))
        pairs = [(load, name) for load in loads if load in chosen for name in watched]
        clients = dict[tuple[str, str], Clients | None]()
        for load, name in pairs:
            job = loads[load](watched[name].server)
            clients[load, name] = stack.enter_context(connected([job]) if job else nullcontext())
        for number in range(options.rounds):
            for load, name in pairs if number % 2 == 0 else reversed(pairs):
                turns, requests = _beside(watched[name], clients[load, name], loads[load], options)
                loops.add(f"{name}, {load}", turns)
                waits.add(f"{name}, {load}", requests)
            for what, figures in _ask_all(watched[NOW], number, options) if QUESTIONS in chosen else ():
                asked.add(what, figures)
    compared = [(f"{NOW}, {load}", f"{BEFORE}, {load}") for load, name in pairs if name == BEFORE]
    measured = [rounds for rounds in (loops, waits, asked) if rounds.values]
    bounded = [(loops, f"{NOW}, {load}") for load, name in pairs if name == NOW]
    if asked.values:
        bounded.append((asked, max(asked.values, key=lambda what: asked.spread(what, "ran")["median"])))
    tables = [rounds.table() for rounds in measured]
    tables += [rounds.ratio_table(compared) for rounds in (loops, waits) if compared]
    return Report(
        data={rounds.title: rounds.summary() for rounds in measured},
        tables=tables,
        targets=[rounds.target(name, "ran", "at most", RAN_MS) for rounds, name in bounded],
    )


def _loads(path: Path, options: Options) -> Loads:
    """Return what a client does beside the lone one, by name."""

    def packed(shape: Shape) -> Callable[[Server], Job]:
        return lambda server: Job(
            kind="packed", at=server.url, path=str(path), rows=shape.rows, length=shape.length
        )

    def readers(server: Server) -> Job:
        return Job(
            kind="small",
            at=str(server.port),
            rows=SMALL.rows,
            length=SMALL.length,
            period_seconds=READ_EVERY_SECONDS,
        )

    named = {f"packed rows, {shape}": packed(shape) for shape in shapes_of(options)}
    return {NOTHING: lambda _: None, READERS: readers, **named}


@contextmanager
def _watched(path: Path, **of_serving: Any) -> Iterator[Watched]:
    batch = f"/v1/batches?corpus={NAME}&seq_len={SMALL.length - 1}&batch_size={SMALL.rows}&step={{step}}"
    with ExitStack() as stack:
        folder = stack.enter_context(recorder())
        with recording(folder):
            server = stack.enter_context(serving({NAME: served(path)}, **of_serving))
        turns = recorded(folder, server.pids)
        lone = {
            what: stack.enter_context(closing(Lone(server.port, server.pids, asks)))
            for what, asks in {HEALTH: HEALTH, BATCH: batch}.items()
        }
        yield Watched(server, turns, lone)


def _beside(
    its: Watched, clients: Clients | None, load: Callable[[Server], Job | None], options: Options
) -> tuple[dict[str, float], dict[str, float]]:
    """Return figures of the turns, and of the lone client, while clients have a turn."""
    seconds = RUN_OF_SECONDS * options.seconds
    took: dict[str, list[float]] = {what: [] for what in its.lone}
    with ThreadPoolExecutor(1) as pool:
        pids = its.server.pids
        cpu, mark, began = cpu_seconds(pids) - cpu_seconds([]), its.turns.mark(), time.monotonic()
        under_way = pool.submit(clients.turn, began + seconds) if clients else None
        while time.monotonic() < began + seconds:
            for what, lone in its.lone.items():
                asked = time.perf_counter()
                lone.ask()
                took[what].append(time.perf_counter() - asked)
                time.sleep(PAUSE_SECONDS)
        figures = _figures(its.turns.since(mark))
        cpu = cpu_seconds(pids) - cpu_seconds([]) - cpu
        job = load(its.server)
        if under_way is not None and job is not None and job.kind == "packed":
            num_tokens = under_way.result()[0]["batches"] * job.rows * job.length
            figures |= {SPEED: num_tokens / seconds / 1e6, CPU: cpu / num_tokens * 1e9}
    waits = {
        f"{what} {name}": float(np.percentile(seconds_each, each)) * 1e3
        for what, seconds_each in took.items()
        for name, each in PERCENTILES.items()
    }
    return figures, waits


def _figures(turns: npt.NDArray[Any]) -> dict[str, float]:
    """Return the longest and the p99.9 of what turns took, ran and waited, in milliseconds."""
    found = {}
    for name in ("took", "ran", "waited"):
        found[name] = float(turns[name].max()) / 1e6
        found[f"{name}_p999"] = float(np.percentile(turns[name], 99.9)) / 1e6
    return found


def _ask_all(its: Watched, number: int, options: Options) -> Iterator[tuple[str, dict[str, float]]]:
    """Ask questions of every kind, of plans that the server does not know; yield what each cost."""
    ids: dict[str, str] = {}

    def document(name: str, **fields: Any) -> bytes:
        shape = Shape(rows=64, length=1025)
        return json.dumps(document_of(shape, seed=1 + number, **fields)).encode()

    size = QUICK_EXCLUDED if options.quick else NUM_EXCLUDED
    ranges = [[1000 * k, 1000 * k + 10] for k in range(QUICK_TOKENS // 1000 if options.quick else size)]
    large = json.loads(document("large"))
    large["stages"][0]["exclude"] = {NAME: ranges}
    family = {"seed": 7, "leave_out": 0.15, "member": 3}
    posts = {
        "windows bound": document("windows"),
        "packed rows bound": document("packed", **PACKED),
        "a family's member bound": document("family", family=family),
        f"a plan of {len(ranges):,} excluded ranges bound": json.dumps(large).encode(),
        "a body of 40 MiB refused": bytes(BODY_BYTES),
    }
    for what, body in posts.items():
        status, figures, response = _ask(its, "POST", "/v1/plans", body)
        if status == 200:
            ids[what] = json.loads(response)["id"]
        yield what, figures
    windows, packed, member, excluded = ids.values()
    gets = {
        "the page": "/",
        "/metrics": "/metrics",
        "/readyz": "/readyz",
        "the corpus": f"/v1/corpora/{NAME}",
        "a document": f"/v1/corpora/{NAME}/documents/5",
        "10 rows with their documents": f"/v1/plans/{packed}/rows?step=3&count=10",
        "the plan of many ranges": f"/v1/plans/{excluded}",
        "usage": f"/v1/plans/{excluded}/usage?step=1000",
        "a look-up of a document": f"/v1/lookup?plan={packed}&document=9",
        "10,000 places of a document": f"/v1/lookup?plan={windows}&start=0&stop=640&epochs=1000&limit=10000",
        "1,000 members": f"/v1/plans/{member}/members?document=12",
        "shards of 4,096 steps": f"/v1/plans/{packed}/shards?step=0&count=4096",
        "a receipt": f"/v1/plans/{packed}/receipt?step=2",
        "2^20 tokens as JSON": f"/v1/corpora/{NAME}/tokens?count=1048576&format=json",
        "indices of 1,024 steps": f"/v1/indices?plan={packed}&step=0&count=1024",
        "a count of 10^9 refused": f"/v1/batches?plan={packed}&step=0&count=1000000000",
        "a head of 60 KiB refused": f"/v1/batches?plan={packed}&step=0&" + "x" * 60_000,
    }
    for what, path in gets.items():
        yield what, _ask(its, "GET", path)[1]


def _ask(its: Watched, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, float], bytes]:
    """Ask one thing on a connection of its own; return the status, what it cost, and the response."""
    with closing(connect(its.server.url)) as connection:
        mark, began = its.turns.mark(), time.perf_counter()
        try:
            connection.request(method, path, body or None)
            response = connection.getresponse()
            received = response.read()
        except BrokenPipeError:  # refused before all of the body was sent
            status, received = 0, b""
        else:
            status = response.status
        took = time.perf_counter() - began
        its.lone[HEALTH].ask()  # so that the last turn has ended
        turns = its.turns.since(mark)
    return status, {"response": took * 1e3, **_figures(turns)}, received
