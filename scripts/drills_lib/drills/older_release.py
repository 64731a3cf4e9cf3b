"""A server of an older release and one of this tree share a state folder, in turn and at once."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.servers import checked_out
from scripts.drills_lib.drill import Found, Skipped
from scripts.drills_lib.training import Loop, Web, train
from scripts.processes import ROOT
from tests.corpora import write_megatron_lengths
from tests.reference import one_source
from tests.serving import RunningServer

ROWS = (12, 34, 58)
COUNT = "4 turns of 12 plans; at once 200 plans, and 8 workers killed"
SECONDS = 90
ORACLE = "what the server answered that took the plan"
RULE = (
    "each reads the other's plans or refuses them in a line, nothing is lost, the database is not set aside"
)
OLDER = "121a166"
"""Its database has the same version, and fewer tables and columns; it knows version 1 of plans alone."""
NUM_STEPS = 5
NUM_AT_ONCE = 100
REFUSALS = {400, 404, 409, 422, 503}


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    if RunningServer.tree != ROOT:
        raise Skipped("it compares this tree with a release of its own")
    with ExitStack() as stack:
        try:
            tree = stack.enter_context(checked_out(OLDER))
        except SystemExit as error:  # a copy without history
            raise Skipped(str(error)) from None
        web = Web(folder)
        docs = write_megatron_lengths(
            folder / "docs", np.random.default_rng(0).integers(2, 48, 20_000), eot=9
        )
        corpora: dict[str, Path | str] = {"web": web.path, "docs": f"{docs},eot=9"}
        older, newer = (_made(corpora, folder, name) for name in ("older", "newer"))
        older.tree, newer.tree = tree, ROOT
        pair = Pair(found, older, newer)
        for number, server in enumerate((older, newer, older, newer)):
            with server:
                pair.read_all(server)
                pair.take(server, _plans(1000 * number))
                pair.check(server)
                found.expect(server.stop() == 0, f"{pair.name(server)}: SIGTERM did not end it with 0")
        with older, newer:
            loop = train(web, [older.url, newer.url], pair.at_once)
            for server in (older, newer):
                pair.read_all(server)
                pair.check(server)
    pair.tell(loop)


def _made(corpora: Mapping[str, Path | str], folder: Path, name: str) -> RunningServer:
    server = RunningServer(corpora, folder / name, workers=2)
    server.state_dir = folder / "state"
    return server


def _plans(seed: int) -> Iterator[dict[str, Any]]:
    """Return plans of all kinds, two of each; mixtures are of the newest version that the server knows."""
    for number in (seed, seed + 1):
        yield one_source("web", 16, 4, seed=number)
        yield one_source("web", 16, 4, seed=number, order="sequential")
        yield one_source("docs", 64, 8, seed=number, rows={"documents": {}})
        for version in ({}, {"version": 1}):
            stage = {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 0.7, "docs": 0.3}}
            later = {**stage, "from_step": 3, "mixture": {"web": 0.2, "docs": 0.8}}
            yield {"seq_len": 16, "seed": number, "stages": [stage, later], **version}
        yield {**one_source("web", 16, 4, seed=number, version=1), "is_continued": True}


class Pair:
    """Two servers on one state folder, and the plans that either has taken."""

    def __init__(self, found: Found, older: RunningServer, newer: RunningServer) -> None:
        self._found, self._older, self._newer = found, older, newer
        self._taken: dict[str, tuple[RunningServer, list[bytes]]] = {}
        self._counts: Counter[str] = Counter()

    def name(self, server: RunningServer) -> str:
        """Return which of the two a server is."""
        return "older" if server is self._older else "newer"

    def take(self, server: RunningServer, plans: Iterator[dict[str, Any]]) -> None:
        """Have a server take plans, and note the rows that it gives."""
        for document in plans:
            is_continued = document.pop("is_continued", False)
            plan_id = self._post(server, document)
            if plan_id and is_continued:
                link = {"from_step": 2, "global_batch_size": 8, "mixture": {"web": 0.5, "docs": 0.5}}
                plan_id = self._post(server, {"parent": plan_id, "stages": [link]})
            if plan_id:
                rows = [server.get("/v1/batches", plan=plan_id, step=step) for step in range(NUM_STEPS)]
                statuses = {each.status for each in rows}
                self._found.expect(statuses == {200}, f"{self.name(server)}: own plan {statuses}")
                self._taken[plan_id] = server, [each.body for each in rows]

    def _post(self, server: RunningServer, document: dict[str, Any]) -> str:
        response = server.post_plan(document)
        if response.status not in (200, 201):
            what = f"{self.name(server)}: {response.status} {response.body!r} for {document}"
            self._found.expect(False, what)
            return ""
        plan_id: str = response.json()["id"]
        return plan_id

    def read_all(self, server: RunningServer) -> None:
        """Ask a server for all plans."""
        for plan_id in self._taken:
            self._read(server, plan_id)

    def _read(self, server: RunningServer, plan_id: str) -> None:
        """Ask a server for the rows of a plan, which may be refused if the other has taken it."""
        taker, expected = self._taken[plan_id]
        name, statuses = self.name(server), set()
        what = f"{name}, plan {plan_id[:12]} of the {self.name(taker)} one"
        for step, rows in enumerate(expected):
            response = server.get("/v1/batches", plan=plan_id, step=step)
            statuses.add(response.status)
            if response.status == 200:
                self._found.expect(response.body == rows, f"{what}: other rows of step {step}")
                continue
            says = response.json()
            is_line = "\n" not in says["detail"] and response.status in REFUSALS and taker is not server
            self._found.expect(is_line, f"{what}: {response.status} {says}")
            self._counts[f"refused by the {name} one ({response.status} {says['type']})"] += 1
        self._counts[f"read by the {name} one"] += statuses == {200}

    def check(self, server: RunningServer) -> None:
        """Look at the log of a server, its readiness and the database."""
        name, ready = self.name(server), server.get("/readyz")
        self._found.expect(ready.status == 200, f"{name}: readiness says {ready.body!r}")
        self._found.expect("Traceback" not in server.log(), f"{name}: the log has a traceback")
        files = {each.name for each in server.state_dir.glob("plans.sqlite*")}
        aside = files - {"plans.sqlite", "plans.sqlite-wal", "plans.sqlite-shm", "plans.sqlite.lock"}
        self._found.expect(not aside, f"{name}: set aside: {aside}")
        with closing(sqlite3.connect(server.state_dir / "plans.sqlite")) as database:
            said = database.execute("PRAGMA integrity_check").fetchone()
        self._found.expect(said == ("ok",), f"{name}: the database is damaged: {said}")

    def at_once(self) -> None:
        """Have both take plans, each read by both at once; now and then a worker is killed."""
        for number in range(NUM_AT_ONCE):
            for server in (self._older, self._newer):
                if number % 25 == 24:
                    server.kill_worker()
                known = set(self._taken)
                self.take(
                    server,
                    iter([one_source("web", 16, 4, seed=10_000 + 2 * number + (server is self._newer))]),
                )
                for plan_id in self._taken.keys() - known:
                    self._read(self._older, plan_id)
                    self._read(self._newer, plan_id)

    def tell(self, loop: Loop) -> None:
        """Note the figures."""
        self._found.figure("plans", len(self._taken), least=NUM_AT_ONCE)
        for name, count in sorted(self._counts.items()):
            self._found.figure(name, count)
        loop.tell(self._found, longest=2.0)
