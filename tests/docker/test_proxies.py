"""What both shipped proxy configurations do: real nginx and HAProxy over two real replicas.

Catalogue rows 19, 22 to 24: slow heads, stalled readers, what is too large, replicas that go away.
CORPUS_SOAK_SECONDS=60 kills replicas for so long.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import RemoteDisconnected
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import ServedCorpus
from tests.contract.conftest import make_loader, take
from tests.corpora import some_tokens, write_raw
from tests.docker.proxy import HAPROXY, NGINX, Proxy, RunningProxy
from tests.raw_http import RawConnection, check_raw_problem, get
from tests.serving import Response, RunningServer, check_problem, wait_until
from tests.stores import WebServer

INLINE = "/v1/batches?corpus=web&seq_len=16&batch_size=8&step=7"
NUM_SLOW = 500
SOAK_SECONDS = float(os.environ.get("CORPUS_SOAK_SECONDS", "0"))
SHORTER = {
    "nginx": {
        "client_header_timeout 5s": "client_header_timeout 2s",
        " send_timeout 30s": " send_timeout 2s",
    },
    "haproxy": {
        "timeout http-request 5s": "timeout http-request 2s",
        "timeout client 30s": "timeout client 2s",
    },
}
"""Time-outs of heads and readers; the shipped ones would make the tests longer."""


def a_proxy(proxy: Proxy) -> object:
    missing = pytest.mark.skipif(proxy.find() is None, reason=f"{proxy.name} is not installed here")
    return pytest.param(proxy, id=proxy.name, marks=missing)


PROXIES = [a_proxy(NGINX), a_proxy(HAPROXY)]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    """Two replicas that nobody kills, over a corpus that is large enough for a reader to stall."""
    folder = tmp_path_factory.mktemp("replicas")
    web = write_raw(folder / "web.bin", some_tokens(12_000_000))
    with ExitStack() as stack:
        servers = []
        for name in "ab":
            (folder / name).mkdir()
            servers.append(stack.enter_context(RunningServer({"web": web}, folder / name)))
        yield servers


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    request: pytest.FixtureRequest, replicas: list[RunningServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningProxy]:
    """A proxy with shorter time-outs."""
    folder = tmp_path_factory.mktemp(request.param.name)
    with RunningProxy(replicas, folder, request.param, SHORTER[request.param.name]) as proxy:
        yield proxy


def dial(proxy: RunningProxy, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=20, source_address=(source, 0))


def was_closed(peer: socket.socket, *, drip: bool) -> bool:
    """Look whether the other side has ended the connection; `drip`: after one more byte of the head."""
    peer.setblocking(False)
    try:
        if drip:
            peer.sendall(b"x")
        return peer.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_500_slow_heads_do_no_harm(proxy: RunningProxy) -> None:
    """Catalogue row 23: half of them drip, half say nothing; others are answered, and all are closed."""
    with ExitStack() as stack:
        # From several addresses: those of one would be refused by their number.
        slow = [stack.enter_context(dial(proxy, f"127.0.0.{2 + number % 4}")) for number in range(NUM_SLOW)]
        dripping = set(slow[::2])
        for peer in dripping:
            peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        began = time.monotonic()
        left = set(slow)
        while left and time.monotonic() - began < 60:
            assert proxy.get(INLINE).status == 200
            left -= {peer for peer in left if was_closed(peer, drip=peer in dripping)}
            time.sleep(0.1)
        assert not left


def test_stalled_readers_are_dropped(proxy: RunningProxy) -> None:
    """Catalogue row 22: they took the head of a large response, and nothing more.

    nginx has taken all of it from the server; HAProxy has not, and lets the kernel send the rest.
    """
    target = "/v1/corpora/web/tokens?count=12000000"
    with ExitStack() as stack:
        stalled = []
        for _ in range(8):
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.settimeout(20)
            peer.connect(("127.0.0.1", proxy.port))
            peer.sendall(get(target))
            assert peer.recv(12) == b"HTTP/1.1 200"
            stalled.append(peer)
        deadline = time.monotonic() + 40
        while proxy.active_requests() > 0 or (proxy.proxy is NGINX and not all(map(was_reset, stalled))):
            assert time.monotonic() < deadline, "a reader that stalled is still waited for"
            assert proxy.get(INLINE).status == 200
            time.sleep(0.2)


def was_reset(peer: socket.socket) -> bool:
    """Look whether the other side has reset the connection, without reading what came before."""
    poll = select.poll()
    poll.register(peer, 0)
    return bool(poll.poll(0))


@pytest.mark.parametrize("kind", PROXIES)
def test_one_address_gets_no_more_than_its_share(
    kind: Proxy, replicas: list[RunningServer], tmp_path: Path
) -> None:
    """And others are answered. HAProxy counts connections, nginx requests under way."""
    changes = {"addresses 256;": "addresses 4;"} if kind is NGINX else {"conn_cur gt 256": "conn_cur gt 4"}
    with RunningProxy(replicas, tmp_path, kind, changes) as proxy, ExitStack() as stack:
        request = get("/v1/corpora/web/tokens?count=12000000")
        for _ in range(4):
            greedy = stack.enter_context(socket.socket())
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            greedy.bind(("127.0.0.9", 0))
            greedy.settimeout(20)
            greedy.connect(("127.0.0.1", proxy.port))
            greedy.sendall(request)
            assert greedy.recv(12) == b"HTTP/1.1 200"
        received = b""
        # HAProxy resets the connection, perhaps before it is known here to be made.
        with contextlib.suppress(ConnectionError), dial(proxy, "127.0.0.9") as refused:
            refused.sendall(get("/healthz"))
            received = refused.recv(4096)
        assert not received or received.startswith(b"HTTP/1.1 503")
        assert proxy.get(INLINE).status == 200


@pytest.mark.parametrize(
    ("request_", "statuses"),
    [
        (get("/v1/batches?" + "a" * 8500), (414,)),
        (get("/v1/batches?" + "a" * 65536), (400, 414)),
        (get("/healthz", "X: " + "a" * 30_000, "Y: " + "b" * 30_000), (400, 431)),
        (get("/v1/plans", f"Content-Length: {2**30}", method="POST"), (413,)),
        (get("/v1/batches", f"Content-Length: {2**30}"), (413,)),
        (b"GET /healthz HTTP/1.1\r\nHost x\r\n\r\n", (400,)),
        (b"nonsense\r\n\r\n", (400,)),
        (get("/access"), (404,)),  # nginx keeps this place for itself
        (get("/healthz", method="TRACE"), (400, 405)),
        (get("/healthz", "Transfer-Encoding: gzip"), (400,)),
        (get("/healthz", version="3"), (400,)),
    ],
    ids=[
        *("url", "long-url", "head", "plan", "body", "header", "nonsense"),
        *("internal", "trace", "encoding", "version"),
    ],
)
def test_what_the_proxy_refuses_is_a_problem_document_too(
    proxy: RunningProxy, request_: bytes, statuses: tuple[int, ...]
) -> None:
    """Catalogue row 24."""
    with RawConnection(proxy) as client:
        client.send(request_)
        response = client.read()
        assert response.status in statuses
        if response.headers["content-type"] != "text/html" or proxy.proxy is NGINX:
            check_raw_problem(response, response.status)
            assert response.headers["cache-control"] == "no-store"
        else:  # what HAProxy cannot parse at all
            assert response.status == 400
    assert proxy.get(INLINE).status == 200


@pytest.mark.parametrize("target", ["/healthz", INLINE])
def test_http_1_0_without_a_host_is_answered(proxy: RunningProxy, target: str) -> None:
    """As many probes send it. The failure was: nginx passed the lack on as HTTP/1.1, which got 400 or 502."""
    with RawConnection(proxy) as client:
        client.send(get(target, version="1.0", host=False))
        assert client.read().status == 200


def test_a_plan_that_one_replica_has_not_seen_is_asked_of_the_other(
    proxy: RunningProxy, replicas: list[RunningServer]
) -> None:
    plan = {"seq_len": 16, "seed": 77, "stages": [{"global_batch_size": 4, "mixture": {"web": 1}}]}
    identity = replicas[0].post_plan(plan).json()["id"]
    for step in range(12):
        assert proxy.get("/v1/batches", plan=identity, step=step).status == 200


@pytest.fixture
def web(corpora: dict[str, ServedCorpus]) -> Path:
    return corpora["web"].path


def start(stack: ExitStack, path: Path, folder: Path) -> RunningServer:
    folder.mkdir()
    return stack.enter_context(RunningServer({"web": path}, folder))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("kind", PROXIES)
def test_a_replica_killed_under_load_is_no_failure(web: Path, tmp_path: Path, kind: Proxy) -> None:
    """Catalogue row 19: four ranks train through the proxy while each replica is killed and started again."""
    over = threading.Event()
    with ExitStack() as stack:
        replicas = [start(stack, web, tmp_path / name) for name in "ab"]
        proxy = stack.enter_context(RunningProxy(replicas, tmp_path, kind))
        pool = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(over.set)

        def train(rank: int) -> list[tuple[int, np.ndarray]]:
            received = []
            with make_loader(proxy.url, rank=rank, world_size=4, prefetch_bytes=16_384) as loader:
                while not over.wait(0.02):
                    received += take(loader, 10)
            return received

        ranks = [pool.submit(train, rank) for rank in range(4)]
        end = time.monotonic() + SOAK_SECONDS
        for number in count():
            if number >= 2 and time.monotonic() >= end:
                break
            replica = replicas[number % 2]
            time.sleep(0.3)
            replica.kill()
            time.sleep(0.3)
            replica.start()
            wait_for(proxy, replica)  # with none left, the loaders would wait for as long as tests let them
        over.set()
        with make_loader(replicas[0].url) as reference:
            expected = take(reference, max(len(each.result()) for each in ranks))
        for rank, received in enumerate(each.result() for each in ranks):
            assert len(received) >= 20
            for (step, tokens), (expected_step, whole) in zip(received, expected, strict=False):
                assert step == expected_step
                np.testing.assert_array_equal(tokens, whole[6 * rank : 6 * rank + 6])


@pytest.mark.parametrize("kind", PROXIES)
def test_a_replica_that_hangs_fails_no_plain_request(web: Path, tmp_path: Path, kind: Proxy) -> None:
    """SIGSTOP: connecting works, nothing is answered. The other replica is asked in time."""
    shorter = {
        "nginx": {f"proxy_read_timeout {each};": "proxy_read_timeout 1s;" for each in ("2s", "7500ms")},
        "haproxy": {"timeout server 8s": "timeout server 1s"},
    }
    with ExitStack() as stack:
        replicas = [start(stack, web, tmp_path / name) for name in "ab"]
        proxy = stack.enter_context(RunningProxy(replicas, tmp_path, kind, shorter[kind.name]))
        for replica in replicas:
            wait_for(proxy, replica)
        hung = [psutil.Process(pid) for pid in (replicas[0].pid, *replicas[0].worker_pids())]
        for process in hung:
            stack.callback(process.resume)
            process.suspend()
        for step in range(6):
            status = 0
            while status != 200:
                began = time.monotonic()
                response = proxy.get(INLINE.replace("step=7", f"step={step}"))
                status = response.status
                # Where a busy machine gave the other one no processor either, both were waited for.
                assert status == 200 or time.monotonic() - began >= 2, response.body


@pytest.mark.parametrize("kind", PROXIES)
def test_a_replica_that_stages_can_say_so(tmp_path: Path, kind: Proxy) -> None:
    """The proxy gives up later than the replica, whose 503 says what it waits for and when to ask again.

    Otherwise it asks all replicas one after another, and each of them stages the same.
    """
    pytest.importorskip("obstore")
    goes_on = threading.Event()
    with WebServer({"/web.bin": some_tokens(100_000).tobytes()}) as store, ExitStack() as stack:
        replicas = [
            stack.enter_context(
                RunningServer(
                    {"web": f"{store.url}/web.bin"},
                    tmp_path / name,
                    arguments=("--cache-dir", str(tmp_path / name / "cache")),
                )
            )
            for name in "ab"
        ]
        proxy = stack.enter_context(RunningProxy(replicas, tmp_path, kind))
        stack.callback(goes_on.set)
        store.fault = lambda path, reply: goes_on.wait(60) and None
        response = proxy.get(INLINE)
        check_problem(response, 503, "not-staged")


@pytest.mark.parametrize("kind", PROXIES)
def test_a_replica_that_ends_fails_no_plain_request(web: Path, tmp_path: Path, kind: Proxy) -> None:
    """SIGTERM, and a start again, while a client without retries asks on; then none is left, then all are."""
    with ExitStack() as stack:
        replicas = [start(stack, web, tmp_path / name) for name in "ab"]
        proxy = stack.enter_context(RunningProxy(replicas, tmp_path, kind))
        for replica in replicas:
            pids = [replica.pid, *replica.worker_pids()]
            os.kill(replica.pid, signal.SIGTERM)
            while any(map(is_alive, pids)):
                assert proxy.get(INLINE).status == 200
            assert proxy.get(INLINE).status == 200
            replica.restart()
            wait_for(proxy, replica)
        for replica in replicas:
            replica.kill()
        response = refusal_of(proxy)
        check_problem(response, response.status, "no-replica")
        assert response.status >= 502
        assert response.headers["Retry-After"] == "1"
        replicas[0].start()
        wait_until(lambda: proxy.get(INLINE).status == 200)


def refusal_of(proxy: RunningProxy) -> Response:
    """Ask until there is a response.

    If the connections that HAProxy kept to replicas die under a request and its retries, HAProxy closes the
    client's connection without a response, for the client to ask again.
    """
    deadline = time.monotonic() + 40
    while True:
        try:
            return proxy.get(INLINE)
        except RemoteDisconnected:
            assert time.monotonic() < deadline


def wait_for(proxy: RunningProxy, replica: RunningServer) -> None:
    """Wait until the proxy asks a replica."""
    before = num_responses(replica)
    deadline = time.monotonic() + 40
    while num_responses(replica) == before:
        assert proxy.get(INLINE).status == 200
        assert time.monotonic() < deadline
        # Asked every 20 ms, HAProxy was seen to close the next client's connection without a response, once
        # both replicas were killed.
        time.sleep(0.05)


def num_responses(replica: RunningServer) -> str:
    lines = replica.get("/metrics").body.decode().splitlines()
    return next(
        (line for line in lines if line.startswith('corpus_requests_total{route="/v1/batches",status="200"')),
        "",
    )


@pytest.mark.parametrize("kind", PROXIES)
def test_the_shipped_file_is_valid_as_it_is(tmp_path: Path, kind: Proxy) -> None:
    """But for the names of its replicas, which only a deployment can resolve."""
    text = (
        kind.configuration.read_text().replace("server-1:", "127.0.0.1:").replace("server-2:", "127.0.0.1:")
    )
    file = tmp_path / kind.configuration.name
    file.write_text(text)
    options = ["-t", "-p", tmp_path, "-e", "stderr"] if kind is NGINX else []
    command = [str(kind.find()), "-c", *([] if kind is NGINX else ["-f"]), file, *options]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "warn" not in said.stderr.lower()
