"""What one stranger's few hundred bytes may cost: processor, memory, disk, and other callers' patience.

Processor time is the server's own (`psutil`), so that a loaded machine makes no difference. Bounds are
several times what a healthy server needs, and a small part of what was once seen.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.corpora import some_tokens, write_raw
from tests.raw_http import RawConnection, get, post
from tests.reference import one_source
from tests.serving import RunningServer, check_problem

MIB = 2**20
CPU_SECONDS = 1.0
"""For one request; four times what a server may spend outside admission."""

OTHERS_SECONDS = 30.0
"""Within which other callers must be served, on a loaded machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server over a small corpus and one of 2^32 tokens that takes no disk space; to be maltreated."""
    folder = tmp_path_factory.mktemp("costs")
    with (folder / "huge.bin").open("wb") as file:
        file.truncate(2**33)
    small = write_raw(folder / "small.bin", some_tokens(300_000))
    with RunningServer({"huge": folder / "huge.bin", "small": small}, folder) as running:
        for corpus in ("huge", "small"):
            assert running.get("/v1/batches", corpus=corpus, seq_len=64, batch_size=4, step=0).status == 200
        yield running


def cpu_seconds(server: RunningServer) -> float:
    """Return the processor time that the server has used."""
    times = psutil.Process(server.worker_pid).cpu_times()
    return times.user + times.system


def memory_bytes(server: RunningServer, name: str = "VmRSS") -> int:
    """Return a line of /proc/PID/status: `VmRSS` now, `VmHWM` at most since `forget_peak`."""
    status = Path(f"/proc/{server.worker_pid}/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@contextlib.contextmanager
def peak_growth_below(server: RunningServer, num_bytes: int) -> Iterator[None]:
    """Check that the server's memory never grows by more than this, however short the peak."""
    Path(f"/proc/{server.worker_pid}/clear_refs").write_text("5")  # proc(5): resets the peak
    before = memory_bytes(server)
    yield
    growth = memory_bytes(server, "VmHWM") - before
    assert growth < num_bytes, f"grew by {growth / MIB:.0f} MiB, at most {num_bytes / MIB:.0f} are allowed"


def check_becomes_idle(server: RunningServer) -> None:
    """Check that the server does nothing any more, before it has used much of the processor."""
    used = [cpu_seconds(server)]
    while len(used) < 2 or used[-1] - used[-2] >= 0.1:
        assert used[-1] - used[0] < 2 * CPU_SECONDS, "the callers left, and the server still works for them"
        time.sleep(0.3)
        used.append(cpu_seconds(server))


def check_others_are_served(server: RunningServer) -> None:
    """Check that another caller gets descriptions and tokens; a short refusal is no response."""
    for path in ("/healthz", "/v1/corpora/small"):
        began = time.monotonic()
        assert server.get(path).status == 200
        assert time.monotonic() - began < OTHERS_SECONDS, f"{path} had to wait"
    deadline = time.monotonic() + OTHERS_SECONDS
    with RawConnection(server, timeout=OTHERS_SECONDS) as connection:
        while True:
            connection.send(get("/v1/batches", corpus="small", seq_len=64, batch_size=4, step=7))
            if connection.read().status == 200:
                return
            assert time.monotonic() < deadline, "others get no tokens, and /readyz says " + str(
                server.get("/readyz").status
            )
            time.sleep(0.05)


def stages(count: int, **fields: object) -> dict[str, object]:
    """Return a plan of many stages over both corpora."""
    listed = [
        {
            "from_step": 10 * k,
            "global_batch_size": 1 + k % 7,
            "mixture": {"huge": 1 + k % 3, "small": 1 + k % 5},
            **fields,
        }
        for k in range(count)
    ]
    return {"seq_len": 64, "stages": listed}


# Plans.


def test_a_plan_of_100_000_stages_is_refused(server: RunningServer) -> None:
    before = cpu_seconds(server)
    document = check_problem(server.post_plan(stages(100_000)), 422, "invalid-plan")
    assert "stages" in document["detail"]
    assert cpu_seconds(server) - before < 3 * CPU_SECONDS  # most of that reads 10 MB of JSON
    check_others_are_served(server)


@pytest.fixture
def skipping(server: RunningServer) -> str:
    """The id of a plan with 10^4 skipped ranges, in two stages."""
    skipped = [[3 * k + 10, 3 * k + 11] for k in range(10_000)]
    document = stages(2) | {"skip_steps": skipped}
    response = server.post_plan(document)
    assert response.status == 200, response.body
    return str(response.json()["id"])


def test_usage_over_many_skipped_ranges_costs_little(server: RunningServer, skipping: str) -> None:
    before = cpu_seconds(server)
    response = server.get(f"/v1/plans/{skipping}/usage", step=40_000)
    if response.status == 200:
        assert response.json()["skipped"]["steps"] == 10_000
    else:
        assert check_problem(response, 422, "response-too-large")["remedy"]
    assert cpu_seconds(server) - before < CPU_SECONDS / 2


def test_large_plans_at_once_grow_within_bounds(server: RunningServer) -> None:
    """Four of 19 MB, more than a million skipped steps each."""
    count = 1_130_000
    skipped = ",".join(f"[{2 * k + 10},{2 * k + 11}]" for k in range(count))

    def ask(seed: int) -> int:
        head = json.dumps({**one_source("small", 16, 4), "seed": seed})[:-1]
        body = f'{head}, "skip_steps": [{skipped}]}}'.encode()
        assert len(body) > 19e6
        with RawConnection(server, timeout=100) as connection:
            connection.send(post("/v1/plans", body))
            return connection.read().status

    with ThreadPoolExecutor(4) as pool, peak_growth_below(server, 600 * MIB):
        statuses = set(pool.map(ask, range(4)))
    assert statuses <= {200, 413, 422, 503}
    check_others_are_served(server)


def test_unfinished_bodies_grow_within_bounds(server: RunningServer) -> None:
    """Sixty that announce 30 MB and send 8."""
    part = b" " * MIB
    head = get("/v1/plans", f"Content-Length: {30 * MIB}", method="POST")
    with ExitStack() as opened, peak_growth_below(server, 250 * MIB):
        for _ in range(60):
            caller = opened.enter_context(RawConnection(server, timeout=0.5))
            with contextlib.suppress(OSError):  # refused, or made to wait
                caller.send(head)
                for _ in range(8):
                    caller.send(part)
        check_others_are_served(server)
    deadline = time.monotonic() + OTHERS_SECONDS
    while server.post_plan(one_source("small", 16, 4)).status != 200:
        assert time.monotonic() < deadline, "callers that left still hold their place"
        time.sleep(0.05)


# Questions.

DEAR = {
    "lookup": get(
        "/v1/lookup", corpus="small", seq_len=1, batch_size=4, start=0, stop=98, epochs=10_000, limit=100_000
    ),
    "lookup-one-token": get(
        "/v1/lookup", corpus="small", seq_len=64, batch_size=4, token=5, epochs=10_000, limit=100_000
    ),
    "short-rows": get("/v1/batches", corpus="huge", seq_len=1, batch_size=2**20, count=16, step=0),
    "short-rows-random": get(
        "/v1/batches", corpus="huge", seq_len=1, batch_size=2**20, count=16, step=0, order="random"
    ),
    "json": get("/v1/batches", corpus="huge", seq_len=1023, batch_size=1024, step=0, format="json"),
    "json-short-rows": get("/v1/batches", corpus="small", seq_len=1, batch_size=2**19, step=0, format="json"),
    "indices": get(
        "/v1/indices", corpus="huge", seq_len=64, batch_size=1024, count=4096, step=0, format="raw"
    ),
    "indices-json": get(
        "/v1/indices", corpus="huge", seq_len=64, batch_size=128, count=4096, step=0, format="json"
    ),
    "checksum": get("/v1/batches", corpus="huge", seq_len=2**20 - 1, batch_size=32, step=0, checksum="true"),
}


@pytest.mark.parametrize("question", DEAR)
def test_a_dear_question_waits_for_nobody_and_stops_with_its_caller(
    server: RunningServer, question: str
) -> None:
    """Refused, or cheap, or in slices: others are served meanwhile, and it ends when the caller leaves."""
    with ExitStack() as opened:
        callers = [opened.enter_context(RawConnection(server)) for _ in range(6)]
        for each in callers:
            each.send(DEAR[question])
        time.sleep(0.2)
        check_others_are_served(server)
    check_becomes_idle(server)


@pytest.mark.parametrize("question", ["indices", "indices-json", "lookup", "json", "checksum"])
def test_a_dear_question_grows_within_bounds(server: RunningServer, question: str) -> None:
    """Four responses of up to 64 MiB at once cost no more than one and a half times their size."""
    check_becomes_idle(server)

    def ask(number: int) -> int:
        with RawConnection(server, timeout=100) as connection:
            connection.send(DEAR[question])
            return connection.read().status

    with ThreadPoolExecutor(4) as pool, peak_growth_below(server, 400 * MIB):
        assert set(pool.map(ask, range(4))) <= {200, 422, 503}
