"""What the supervisor does when workers die, hang or are to be replaced, and how a server ends.

CORPUS_SOAK_SECONDS=60 runs the long form of the test that kills workers, with its strict limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import psutil
import pytest

from corpus_server.run.process import BEAT, WorkerProcess
from tests.conftest import ServedCorpus
from tests.corpora import some_tokens, write_raw
from tests.faults.signals import ENDING, end_by
from tests.serving import RunningServer, ask, wait_until

SOAK_SECONDS = float(os.environ.get("CORPUS_SOAK_SECONDS", "0"))
TARGETS = ("/v1/corpora/web/tokens?count=100", "/v1/batches?corpus=web&seq_len=16&batch_size=8&step=1")


class Load:
    """Clients that keep their connections, from entering to leaving.

    Attributes:
        failures: what went wrong, as text.
        gap: longest time in seconds without a response.
    """

    def __init__(self, server: RunningServer, *, pauses: tuple[float, ...] = (0.0, 0.003, 0.02, 0.3)) -> None:
        self._server = server
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(pause,)) for pause in pauses]
        self._last = time.monotonic()
        self.failures: list[str] = []
        self.gap = 0.0
        self.answered = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._note()

    def _ask(self, pause: float) -> None:
        with contextlib.closing(self._server.connect()) as connection:
            number = 0
            while not self._over.wait(pause):
                number += 1
                try:
                    response = ask(connection, TARGETS[number % len(TARGETS)])
                    assert response.status == 200, response
                except (OSError, http.client.HTTPException, AssertionError) as error:
                    self.failures.append(f"request {number} with pauses of {pause} s: {error!r}")
                    connection.close()
                else:
                    self._note()

    def _note(self) -> None:
        with self._lock:
            now = time.monotonic()
            self.gap = max(self.gap, now - self._last)
            self._last = now
            self.answered += 1


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def web(corpora: dict[str, ServedCorpus]) -> dict[str, Path]:
    return {"web": corpora["web"].path}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"large": write_raw(tmp_path_factory.mktemp("large") / "a.bin", some_tokens(20_000_000))}


def test_workers_killed_at_random_are_replaced_at_once(web: dict[str, Path], tmp_path: Path) -> None:
    """Catalogue row 32; some are killed while they start."""
    chance = random.Random(1)
    with RunningServer(web, tmp_path, workers=4) as server, Load(server) as load:
        end = time.monotonic() + (SOAK_SECONDS or 4)
        while time.monotonic() < end:
            time.sleep(1.0 if SOAK_SECONDS else chance.uniform(0.5, 1.0))
            if pids := server.worker_pids():
                kill(chance.choice(pids))
        answered = load.answered
        wait_until(lambda: load.answered > answered, "nobody answers any more", seconds=100)
    print(f"{load.answered} answers, longest gap {load.gap:.2f} s, {len(load.failures)} lost connections")
    # A supervisor that looks away took a minute.
    assert load.gap < (1 if SOAK_SECONDS else 15)


def test_workers_killed_while_they_start_do_not_delay_the_others(
    web: dict[str, Path], tmp_path: Path
) -> None:
    with RunningServer(web, tmp_path, workers=2) as server:
        first, second = server.worker_pids()
        kill(first)
        seen = {first, second}
        for _ in range(3):
            wait_until(lambda: set(server.worker_pids()) - seen, "no new worker was started")
            (new,) = set(server.worker_pids()) - seen
            seen.add(new)
            kill(new)
        kill(second)

        def all_are_new_and_ready() -> bool:
            pids, log = server.worker_pids(), server.log()
            are_ready = all(f"worker {pid} is ready\n" in log for pid in pids)
            return len(pids) == 2 and not seen & set(pids) and are_ready

        wait_until(all_are_new_and_ready, server.log)
        assert server.get("/readyz").status == 200
        assert server.stop() == 0


def test_a_worker_that_hangs_is_replaced(web: dict[str, Path], tmp_path: Path) -> None:
    """Within 5 s on a machine with time to spare: after four beats that did not come."""
    with RunningServer(web, tmp_path) as server:
        (hung,) = server.worker_pids()
        os.kill(hung, signal.SIGSTOP)
        wait_until(lambda: f"worker {hung} ended with SIGKILL" in server.log(), "it was not noticed")
        assert server.get("/healthz").status == 200


def test_a_worker_that_hangs_while_it_starts_is_replaced(web: dict[str, Path], tmp_path: Path) -> None:
    prelude = "import corpus_server.run.supervisor as s; s.START_SECONDS = 20"
    with RunningServer(web, tmp_path, workers=2, prelude=prelude) as server:
        before = set(server.worker_pids())
        kill(min(before))
        wait_until(lambda: set(server.worker_pids()) - before, "no new worker was started")
        (hung,) = set(server.worker_pids()) - before
        os.kill(hung, signal.SIGSTOP)
        assert server.get("/healthz").status == 200
        wait_until(lambda: f"worker {hung} ended with SIGKILL" in server.log(), "it was not noticed")
        wait_until(lambda: server.log().count(" is ready\n") == 3, "it was not replaced")


def test_a_template_has_one_thread_and_nothing_of_a_corpus(web: dict[str, Path], tmp_path: Path) -> None:
    """A fork copies neither threads nor locks that they hold; a map would outlive the corpus."""
    with RunningServer(web, tmp_path, workers=2) as server:
        server.kill_worker()
        (template,) = server.templates()
        assert template.num_threads() == 1
        assert str(web["web"]) not in Path(f"/proc/{template.pid}/maps").read_text()
        files = [str(each.readlink()) for each in Path(f"/proc/{template.pid}/fd").iterdir()]
        assert sum(each.startswith("socket:") for each in files) == 1
        assert not [each for each in files if "eventpoll" in each]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_template_that_is_gone_or_stopped_is_replaced(
    web: dict[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    with RunningServer(web, tmp_path) as server:
        (before,) = server.templates()
        os.kill(before.pid, number)
        server.kill_worker()
        assert [each.pid for each in server.templates()] != [before.pid]
        assert server.get("/readyz").status == 200
        assert server.stop() == 0


def test_each_worker_makes_request_ids_of_its_own(web: dict[str, Path], tmp_path: Path) -> None:
    """Copies of one process have the same random numbers unless somebody sees to it."""
    with RunningServer(web, tmp_path, workers=4) as server:
        ids = {
            server.get("/healthz", headers={"X-Request-Id": ""}).headers["X-Request-Id"] for _ in range(64)
        }
    assert len(ids) == 64


@pytest.mark.parametrize("number", ENDING, ids=lambda number: f"signal-{int(number)}")
def test_a_signal_that_ends_a_process_ends_the_server_as_sigterm_does(
    web: dict[str, Path], tmp_path: Path, number: int
) -> None:
    """The failure was: the workers and the folder of metrics were left behind."""
    end_by(number, web, tmp_path)


def test_a_beat_that_comes_together_with_a_timeout_is_heard() -> None:
    """Both are due in one turn of the loop. A beat that were lost then would be lost every second."""
    worker = object.__new__(WorkerProcess)
    worker._channel, theirs = socket.socketpair()
    worker._channel.setblocking(False)
    worker.kill = lambda: None  # type: ignore[method-assign]

    def hold_up() -> None:
        time.sleep(0.3)
        theirs.send(BEAT)

    async def hear() -> bytes:
        asyncio.get_running_loop().call_later(0.9, hold_up)
        return await worker.hear(2)

    with theirs, worker._channel:
        assert asyncio.run(hear()) == BEAT


def test_workers_do_not_outlive_their_supervisor(web: dict[str, Path], tmp_path: Path) -> None:
    with RunningServer(web, tmp_path, workers=2) as server:
        pids = server.worker_pids()
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address):
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not any(map(psutil.pid_exists, pids)), "a worker is left")
        with socket.socket() as successor:
            successor.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            successor.bind(address)
            successor.listen()


@contextmanager
def stubborn_clients(server: RunningServer) -> Iterator[None]:
    """A head that is half sent, an idle connection, and a reader that takes nothing of a large response."""
    with ExitStack() as stack:
        for sent in (
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Half",
            b"",
            b"GET /v1/corpora/large/tokens?count=20000000 HTTP/1.1\r\nHost: x\r\n\r\n",
        ):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(sent)
        client.recv(1)
        yield


PATIENT = "[server]\nhead_timeout_seconds = 3600\nsend_timeout_seconds = 3600\nkeep_alive_seconds = 3600"
"""Of a server that stubborn clients would keep running for an hour."""

HANGING = "import corpus_server.run.process as s; s.TEMPLATE_MODULE = 'tests.server.run.hanging_worker'"


@pytest.mark.parametrize(
    ("workers", "prelude"), [(1, HANGING), (2, "")], ids=["hung-threads", "stubborn-clients"]
)
def test_sigterm_ends_within_the_grace(
    large: dict[str, Path], tmp_path: Path, workers: int, prelude: str
) -> None:
    """Catalogue row 32."""
    arguments = ["--grace-seconds", "2", "--drain-seconds", "0.2"]
    with (
        RunningServer(
            large, tmp_path, workers=workers, config=PATIENT, arguments=arguments, prelude=prelude
        ) as server,
        stubborn_clients(server),
    ):
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began > 1
        assert list((server.state_dir / "metrics").iterdir()) == []


def test_a_second_sigterm_ends_at_once(large: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["--grace-seconds", "600", "--drain-seconds", "0"]
    with (
        RunningServer(large, tmp_path, config=PATIENT, arguments=arguments) as server,
        stubborn_clients(server),
    ):
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: "a second signal ends at once" in server.log(), server.log)
        time.sleep(0.5)
        assert psutil.Process(server.pid).status() != psutil.STATUS_ZOMBIE
        assert server.stop() == 0


class Unasked(RunningServer):
    """A server that nobody asks whether it is ready."""

    def _ready(self) -> bool:
        return "running on" in self.log() and self._num_ready() == self.workers


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_nobody_asks_ends_without_a_drain(
    web: dict[str, Path], tmp_path: Path, workers: int
) -> None:
    """Whoever stops it would wait for an hour else, for the sake of a load balancer that is not there."""
    arguments = ["--drain-seconds", "3600", "--grace-seconds", "3600"]
    with Unasked(web, tmp_path, workers=workers, arguments=arguments) as server:
        assert server.stop() == 0


def test_sigterm_says_so_before_it_stops_to_answer(web: dict[str, Path], tmp_path: Path) -> None:
    """Catalogue row 10: readiness turns 503 first; whoever asks is answered and told to go elsewhere."""
    with (
        RunningServer(web, tmp_path, workers=2, arguments=["--drain-seconds", "60"]) as server,
        contextlib.closing(server.connect()) as kept,
    ):
        assert ask(kept, TARGETS[0]).headers["Connection"] is None
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: server.get("/readyz").status == 503, "readiness did not change")
        assert "shutting down" in server.get("/readyz").json()["detail"]
        for target in TARGETS:
            response = server.get(target)
            assert (response.status, response.headers["Connection"]) == (200, "close")
        assert ask(kept, TARGETS[0]).headers["Connection"] == "close"
        assert server.stop() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_every_connection_that_a_server_takes_before_it_ends_gets_a_response(
    web: dict[str, Path], tmp_path: Path, workers: int
) -> None:
    """Clients that connect anew for each request, all the time, are answered or find the port closed."""
    cut: list[str] = []
    refused, answered = threading.Event(), [0]

    def ask_anew(server: RunningServer) -> None:
        while not refused.is_set():
            with contextlib.closing(server.connect()) as connection:
                try:
                    connection.connect()
                except OSError:
                    refused.set()
                    return
                try:
                    assert ask(connection, TARGETS[1]).status == 200
                    answered[0] += 1
                except (OSError, http.client.HTTPException, AssertionError) as error:
                    cut.append(repr(error))

    arguments = ["--drain-seconds", "0.3"]
    with RunningServer(web, tmp_path, workers=workers, arguments=arguments) as server:
        clients = [threading.Thread(target=ask_anew, args=(server,)) for _ in range(16)]
        for client in clients:
            client.start()
        wait_until(lambda: answered[0] > 20, "nobody is answered")
        assert server.stop() == 0
        for client in clients:
            client.join()
    assert (cut, refused.is_set()) == ([], True)


def test_a_response_in_flight_completes_at_sigterm(large: dict[str, Path], tmp_path: Path) -> None:
    with (
        RunningServer(large, tmp_path, arguments=["--drain-seconds", "0"]) as server,
        contextlib.closing(server.connect()) as connection,
    ):
        connection.request("GET", "/v1/corpora/large/tokens?count=20000000")
        response = connection.getresponse()
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(1)
        assert len(response.read()) == 40_000_000
        assert server.stop() == 0


def test_whatever_ends_a_worker_it_gets_a_successor(web: dict[str, Path], tmp_path: Path) -> None:
    """Metrics that another release wrote, or that nobody can read; a start that fails in a way that nobody
    foresaw."""
    ends = {signal.SIGSEGV: "{}", signal.SIGKILL: '{"corpus_x": [[[], [1.0]]]}', signal.SIGABRT: "["}
    second_fails = (
        "import itertools, corpus_server.run.process as p; count, ask = itertools.count(), p.Template.ask; "
        "p.Template.ask = lambda *a: [].pop() if next(count) == 1 else ask(*a)"
    )
    with RunningServer(web, tmp_path, prelude=second_fails) as server:
        for end, counted in ends.items():
            folder = server.state_dir / "metrics" / str(server.pid)
            (folder / "999999999-1.ended").write_text(counted)  # as of a worker that has ended
            with server.replacing():
                os.kill(server.worker_pid, end)
        for said in (
            "with SIGSEGV",
            "with SIGKILL",
            "with SIGABRT",
            "cannot start a worker: pop from empty",
        ):
            assert said in server.log()
        wait_until(lambda: not list(folder.glob("*.ended")), "what they counted is not added up")
        assert server.stop() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_replaces_the_workers_without_a_failed_request(
    web: dict[str, Path], tmp_path: Path, workers: int
) -> None:
    """Catalogue row 10; a connection that is idle meanwhile is not closed either."""
    with (
        RunningServer(web, tmp_path, workers=workers, arguments=["--grace-seconds", "30"]) as server,
        contextlib.closing(server.connect()) as idle,
    ):
        assert ask(idle, TARGETS[0]).status == 200
        with Load(server) as load:
            for number in (1, 2):
                before = set(server.worker_pids())
                os.kill(server.pid, signal.SIGHUP)
                while server.log().count("all workers were replaced") < number:
                    time.sleep(0.02)
                assert ask(idle, TARGETS[0]).status == 200
            wait_until(lambda: len(server.worker_pids()) == workers, "an old one is left")
            assert not before & set(server.worker_pids())
            wait_until(lambda: load.answered > 100 or load.failures, "no request is answered")
        assert server.log().count("SIGHUP: reading the configuration") == 2
        assert load.failures == []
        assert server.stop() == 0


def test_a_sighup_during_the_start_does_not_end_it(web: dict[str, Path], tmp_path: Path) -> None:
    prelude = (
        "import os, signal, corpus_server.run.supervisor as s; listen = s.listening; "
        "s.listening = lambda settings: (os.kill(os.getpid(), signal.SIGHUP), listen(settings))[1]"
    )
    with RunningServer(web, tmp_path, prelude=prelude) as server:
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: "all workers were replaced" in server.log(), server.log)


def test_a_state_folder_that_was_deleted_costs_no_worker(web: dict[str, Path], tmp_path: Path) -> None:
    """The second death shows that successors are watched, also of workers that replaced others."""
    with RunningServer(web, tmp_path, workers=2) as server:
        shutil.rmtree(server.state_dir)
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: "all workers were replaced" in server.log(), server.log)
        wait_until(lambda: len(server.worker_pids()) == 2, "an old worker is left")
        for number in range(2):
            kill(server.worker_pids()[0])
            wait_until(lambda: server.log().count(" is ready") == 5 + number, "no new worker is ready")  # noqa: B023
        assert "Traceback" not in server.log()
        for route in ("/metrics", "/v1/live", "/readyz"):
            assert [server.get(route).status for _ in range(6)] == [200] * 6


def test_a_full_state_folder_costs_no_worker(web: dict[str, Path], tmp_path: Path) -> None:
    """What was counted is shared again when there is room."""

    def count() -> float:
        lines = server.get("/metrics").body.decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("corpus_workers "))

    state = tmp_path / "state"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(state)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        with RunningServer(web, tmp_path, workers=2) as server:
            with contextlib.suppress(OSError), (state / "filler").open("wb", buffering=0) as filler:
                while filler.write(b"x" * 4096):
                    pass
            wait_until(
                lambda: "sharing counts with other workers failed: No space left" in server.log(),
                "nobody met the full disk",
            )
            assert [server.get("/metrics").status for _ in range(6)] == [200] * 6
            kill(server.worker_pids()[0])
            wait_until(lambda: "ended with SIGKILL" in server.log(), "no worker ended")
            (state / "filler").unlink()
            wait_until(lambda: server.log().count(" is ready") == 3, "no new worker is ready")
            kill(server.worker_pids()[0])
            wait_until(lambda: server.log().count(" is ready") == 4, "no new worker is ready")
            wait_until(lambda: {count() for _ in range(6)} == {2.0}, "the workers do not know of each other")
    finally:
        subprocess.run(["umount", "-l", state], check=True)
