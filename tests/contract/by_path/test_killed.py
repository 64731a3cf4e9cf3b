"""The server of a path is started again after a kill, and no row is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.contract.by_path.processes import Corpora, Runtime, expected_lines
from tests.contract.conftest import Replicas
from tests.serving import ROOT, environment, wait_until

NUM_KILLS = int(os.environ.get("CORPUS_KILLS", "2"))
"""Of each kind of process."""
WORLD_SIZE = 3


class Ranks:
    """`ranks.py`, and what its ranks have written.

    Attributes:
        running: process by rank.
    """

    def __init__(self, source: str, folder: Path, world_size: int = WORLD_SIZE) -> None:
        self.world_size, self.folder = world_size, folder
        self.running: dict[int, int] = {}
        with (folder / f"said-{world_size}").open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.contract.by_path.ranks", json.dumps(source), str(world_size)],
                stdin=subprocess.PIPE,
                stdout=said,
                env=environment(PYTHONFAULTHANDLER="1"),
                cwd=ROOT,
                text=True,
            )

    def close(self) -> None:
        """End it, once its ranks have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def said(self) -> list[list[str]]:
        """Return the lines that it has printed."""
        text = (self.folder / f"said-{self.world_size}").read_text()
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def start(self, rank: int, stop: int) -> None:
        """Let a rank go on behind the last step that it has written; a line that is not whole is cut off."""
        before = len(self.said())
        assert self._process.stdin is not None
        file = self.file(rank)
        if file.exists():
            text = file.read_text()
            file.write_text(text[: text.rfind("\n") + 1])
        print("start", rank, len(self.lines(rank)), stop, file, file=self._process.stdin, flush=True)

        def started() -> list[int]:
            return [int(line[2]) for line in self.said()[before:] if line[:2] == ["started", str(rank)]]

        wait_until(started, "no rank was started")
        (self.running[rank],) = started()

    def file(self, rank: int) -> Path:
        """Return the file of a rank's lines."""
        return self.folder / f"{self.world_size}-{rank}"

    def lines(self, rank: int) -> list[str]:
        """Return the whole lines of a rank: of one that is being written, a part may be there."""
        if not self.file(rank).exists():
            return []
        text = self.file(rank).read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def kill(self, rank: int, stop: int) -> None:
        """Kill a rank as the kernel would, and let another process go on in its place."""
        pid = self.running[rank]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: ["ended", str(pid), "-9"] in self.said(), "the rank does not end")
        self.start(rank, stop)

    def wait(self) -> None:
        """Wait until all ranks have ended well."""
        for pid in self.running.values():
            wait_until(lambda pid=pid: any(each[:2] == ["ended", str(pid)] for each in self.said()))  # type: ignore[misc]
            assert ["ended", str(pid), "0"] in self.said()


def test_killed_processes_are_replaced_and_no_row_is_wrong(
    corpora: Corpora, replicas: Replicas, runtime: Runtime, tmp_path: Path
) -> None:
    """The server, its worker, the rank that started the server, another rank: each in turn, by SIGKILL."""
    ranks = Ranks(str(corpora["web"].path), tmp_path)
    stop, draw = 10**6, random.Random(5)
    for rank in range(WORLD_SIZE):
        ranks.start(rank, stop)

    def go_on(steps: int) -> None:
        """Wait until every rank is so many steps further, past all that it had fetched ahead."""
        before = {rank: len(ranks.lines(rank)) for rank in range(WORLD_SIZE)}
        wait_until(
            lambda: all(len(ranks.lines(rank)) >= before[rank] + steps for rank in before),
            lambda: f"stuck: {[log.read_text()[-2000:] for log in runtime.folder.rglob('log')]}",
        )

    def workers() -> list[int]:
        """Return the workers of the only server; none while there is no server, or two."""
        with contextlib.suppress(psutil.Error, ValueError):
            (server,) = runtime.servers()
            return [each.pid for each in psutil.Process(server).children() if each.name() == "corpus-worker"]
        return []

    go_on(20)
    for _ in range(NUM_KILLS):
        for victim in ("server", "worker", "starter", "other"):
            (server,) = runtime.servers()
            starter = psutil.Process(server).ppid()
            of = [rank for rank, pid in ranks.running.items() if (pid == starter) == (victim == "starter")]
            if victim == "server":
                os.kill(server, signal.SIGKILL)
            elif victim == "worker":
                os.kill(*workers(), signal.SIGKILL)
            else:  # a starter that was killed before has left the server to init
                ranks.kill(draw.choice(of or list(ranks.running)), stop)
            go_on(60)
            # Ranks know where the rows of some thousand steps lie, for which they need no server.
            wait_until(lambda: len(workers()) == 1, lambda: f"servers: {runtime.servers()}")
    last = max(len(ranks.lines(rank)) for rank in range(WORLD_SIZE)) + 60
    for rank in range(WORLD_SIZE):
        ranks.kill(rank, last)
    ranks.wait()
    ranks.close()
    runtime.check_nothing_left()
    for rank in range(WORLD_SIZE):
        lines = ranks.lines(rank)[:last]
        assert lines == expected_lines(replicas["1 worker"], rank, WORLD_SIZE, len(lines))


def test_all_killed_at_once_and_resumed_by_another_number_of_ranks(
    corpora: Corpora, replicas: Replicas, runtime: Runtime, tmp_path: Path
) -> None:
    """Nothing is left that hinders the next run, which needs no more than the step."""
    before = Ranks(str(corpora["web"].path), tmp_path)
    for rank in range(WORLD_SIZE):
        before.start(rank, 10**6)
    wait_until(lambda: all(len(before.lines(rank)) > 50 for rank in range(WORLD_SIZE)))
    for each in runtime.processes():  # the one that forks the ranks, the ranks, the server, its processes
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    before.close()
    step = min(len(before.lines(rank)) for rank in range(WORLD_SIZE))
    world_size = 4
    after = Ranks(str(corpora["web"].path), tmp_path, world_size)
    for rank in range(world_size):
        known = expected_lines(replicas["1 worker"], rank, world_size, step)
        after.file(rank).write_text("".join(f"{line}\n" for line in known))
        after.start(rank, step + 50)
    after.wait()
    after.close()
    for rank in range(world_size):
        assert after.lines(rank) == expected_lines(replicas["1 worker"], rank, world_size, step + 50)
