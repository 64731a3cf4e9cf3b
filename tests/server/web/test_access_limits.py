"""What one token may use of a server, and what that leaves to the others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.corpora import some_tokens, write_raw
from tests.serving import Response, RunningServer, check_problem, host_and_port
from tests.tokens import Tokens, plan, post

STEP = {"corpus": "web", "seq_len": 16, "batch_size": 8, "step": 3}
BIG = {"corpus": "web", "seq_len": 1024, "batch_size": 64, "step": 0, "count": 400}  # 52 MB
LARGE = "/v1/batches?" + "&".join(f"{name}={value}" for name, value in BIG.items())


@contextlib.contextmanager
def stalled(server: RunningServer, tokens: Tokens, name: str, count: int) -> Iterator[None]:
    """Hold responses under way: ask for a large one, and read no further than its head."""
    authorization = tokens.header(name)["Authorization"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(contextlib.closing(socket.socket()))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(20)
            connection.connect(host_and_port(server.url))
            lines = [f"GET {LARGE} HTTP/1.1", "Host: x", f"Authorization: {authorization}"]
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            assert connection.recv(12) == b"HTTP/1.1 200"
        yield
    server.wait_until_idle(headers=tokens.header("free"))


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Tokens]]:
    folder = tmp_path_factory.mktemp("limited")
    corpora = {"web": write_raw(folder / "web.bin", some_tokens(200_000))}
    tokens = Tokens(folder / "tokens.toml")
    tokens.add("free", "read:*", "plans", "inspect", "metrics")
    tokens.add("two", "read:*", max_requests=2)
    tokens.add("bytes", "read:*", max_bytes=60_000_000)
    tokens.add("rate", "read:*", max_bytes_per_second=1_000_000)
    tokens.add("plans", "read:*", "plans", max_plans=2)
    arguments = [
        "--tokens",
        str(tokens.path),
        "--max-concurrent-responses",
        "10",
        "--send-timeout-seconds",
        "60",
    ]
    with RunningServer(corpora, folder, arguments=arguments) as server:
        yield server, tokens


def small(server: RunningServer, header: dict[str, str], **more: object) -> Response:
    return server.get("/v1/batches", **STEP, headers=header, **more)


@pytest.mark.parametrize(("name", "most"), [("two", 2), ("bytes", 2)])
def test_a_token_at_its_limit_is_told_when_to_come_back(
    limited: tuple[RunningServer, Tokens], name: str, most: int
) -> None:
    server, tokens = limited
    for _ in range(2):  # what was held is given back
        with stalled(server, tokens, name, most):
            for form in ("raw", "json"):
                refused = small(server, tokens.header(name), format=form)
                check_problem(refused, 429, "too-many-requests")
                assert int(refused.headers["Retry-After"]) >= 1
            assert small(server, tokens.header("free")).status == 200
            assert server.get("/v1/corpora", headers=tokens.header(name)).status == 200
        assert small(server, tokens.header(name)).status == 200


def test_what_was_not_sent_is_not_of_a_token_s_bytes(limited: tuple[RunningServer, Tokens]) -> None:
    """One HEAD of it would be half a minute of them."""
    server, tokens = limited
    header = tokens.header("rate")
    for _ in range(2):
        assert server.get(LARGE, method="HEAD", headers=header).status == 200
        assert server.get(LARGE, headers={**header, "If-None-Match": "*"}).status == 304
    assert server.get(LARGE, headers=header).status == 200
    refused = small(server, header)
    check_problem(refused, 429, "too-many-requests")
    assert int(refused.headers["Retry-After"]) > 10


def test_a_token_keeps_so_many_plans(limited: tuple[RunningServer, Tokens]) -> None:
    server, tokens = limited

    def post_seed(seed: int, name: str) -> str:
        return str(post(server, {**plan("web"), "seed": seed}, tokens.header(name)).json()["id"])

    def listed() -> set[str]:
        return {each["id"] for each in server.get("/v1/plans", headers=tokens.header("free")).json()["plans"]}

    others = post_seed(1, "free")
    own = [post_seed(seed, "plans") for seed in range(10, 15)]
    assert listed() == {others, *own[-2:]}
