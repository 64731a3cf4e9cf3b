"""Abuse of the running service: refused at once, and nothing but the served files is ever open."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from tests.conftest import ServedCorpus
from tests.reference import one_source
from tests.serving import RunningServer, check_problem, host_and_port

WEB = {"corpus": "web", "seq_len": 16, "batch_size": 12}
STEP = {**WEB, "step": 0}


NO_INTEGERS = [
    *("", " ", "-1", "+1", " 1", "1 ", "1.0", "1e3", "0x10", "1_000", "NaN", "inf", "-0", "null", "true"),
    *(
        "[1]",
        "{}",
        "\uff11",
        "\u0663",
        "1\n",
        "1\x00",
        "18446744073709551616",
        "9" * 30,
        "9" * 5000,
        "-" + "9" * 30,
    ),
]


INTEGERS = ("step", "count", "rank", "world_size", "seq_len", "batch_size", "seed", "stride")


@pytest.mark.parametrize("parameter", INTEGERS)
def test_what_is_no_integer_in_range_is_refused(server: RunningServer, parameter: str) -> None:
    """Catalogue row 25: boolean, NaN, negative, huge; each names the parameter, the value and the range."""
    for value in NO_INTEGERS:
        response = server.get("/v1/batches", **{**STEP, parameter: value})
        document = check_problem(response, 422, "invalid-parameter", parameter=parameter)
        assert document["detail"].startswith(f"{parameter} must be an integer in [")
        assert document["received"].removesuffix("...") == value[:200]
        assert document["accepted"].startswith("an integer in [")


@pytest.mark.parametrize("parameter", ["start", "count"])
def test_a_range_is_checked_likewise(server: RunningServer, parameter: str) -> None:
    for value in NO_INTEGERS:
        response = server.get("/v1/corpora/web/tokens", **{parameter: value})
        check_problem(response, 422, "invalid-parameter", parameter=parameter)


def private_bytes(server: RunningServer) -> int:
    """Return what the workers hold in memory of their own."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in server.worker_pids())


HUGE = {"seq_len": 2**20, "batch_size": 2**20, "step": 2**40 - 4096, "count": 4096}


@pytest.mark.parametrize(
    "query",
    [
        {"corpus": "sparse", **HUGE},
        {"corpus": "sparse", **HUGE, "format": "npy"},
        {"corpus": "sparse", **HUGE, "format": "json"},
        {"corpus": "sparse", **HUGE, "format": "text"},
        {"corpus": "sparse", **HUGE, "seq_len": 1},
        {"corpus": "sparse", **HUGE, "world_size": 1024},
        {"corpus": "sparse", "seq_len": 2**20, "batch_size": 32, "step": 0},
    ],
    ids=["raw", "npy", "json", "text", "short", "ranks", "just-above"],
)
@pytest.mark.parametrize("route", ["batches", "indices"])
def test_a_huge_product_is_refused_before_it_is_allocated(
    sparse: RunningServer, route: str, query: dict[str, Any]
) -> None:
    """Catalogue row 25: each factor is in range, together they are petabytes."""
    before = private_bytes(sparse)
    for _ in range(5):
        response = sparse.get(f"/v1/{route}", **query)
        if route == "indices" and query["batch_size"] == 32:
            assert response.status == 200
        elif route == "indices" and query.get("format") == "text":
            check_problem(response, 422, response.json()["type"])
        else:
            document = check_problem(response, 422, "response-too-large", parameter="count")
            limit, unit = document["accepted"].removeprefix("at most ").split(" ", 1)
            assert int(limit) == {"bytes": 2**26, "rows": 2**22}.get(unit, 2**20), unit
            assert document["received"] > int(limit)
            assert document["remedy"]
    assert private_bytes(sparse) - before < 2**24


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server over a file that is large enough for every range, and takes no disk space."""
    folder = tmp_path_factory.mktemp("sparse")
    with (folder / "sparse.bin").open("wb") as file:
        file.truncate(2**33)
    with RunningServer({"sparse": folder / "sparse.bin"}, folder) as running:
        running.get("/v1/batches", corpus="sparse", seq_len=2, batch_size=2, step=0)
        yield running


NAMES = [
    *("..", ".", "../web", "../../etc/passwd", "/etc/passwd", "web/../web", "web/1.bin", "1.bin", "web/"),
    *(
        "WEB",
        "web ",
        " web",
        "web\x00",
        "\x00",
        "web\n",
        "we\u200bb",
        "\uff57eb",
        "w\u0435b",
        "\u202eweb",
        "web.",
        "~",
    ),
    *("file:///etc/passwd", "%2e%2e", "..%2f..%2fetc%2fpasswd", "web;", "web?", "web#", "😀", "a" * 128),
]


@pytest.mark.parametrize("suffix", ["", "/tokens", "/documents/0"])
def test_names_that_are_not_served_are_not_found(
    server: RunningServer, corpora: dict[str, ServedCorpus], suffix: str
) -> None:
    """Catalogue row 26: traversal, NUL, look-alikes; and nothing but the served files is ever open."""
    for name in NAMES:
        for spelled in (quote(name, safe=""), quote(name, safe="/.")):
            response = server.get(f"/v1/corpora/{spelled}{suffix}")
            assert response.status == 404, spelled
            check_problem(response, 404, response.json()["type"])
    allowed = [corpora["web"].path.parent, server.folder]
    for pid in server.worker_pids():
        opened = [Path(file.path) for file in psutil.Process(pid).open_files()]
        assert len(opened) >= 8
        assert [path for path in opened if not any(path.is_relative_to(root) for root in allowed)] == []


@pytest.mark.parametrize("name", NAMES)
def test_names_in_parameters_and_plans_are_not_found_either(server: RunningServer, name: str) -> None:
    document = check_problem(server.get("/v1/batches", **{**STEP, "corpus": name}), 404, "unknown-corpus")
    assert document["accepted"] == "web, mixed, docs, text, words"
    check_problem(server.post_plan(one_source(name, 16, 12)), 404, "unknown-corpus")


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/corpora/\xff\xfe",
        b"/v1/corpora/%ff%fe/tokens",
        b"/v1/corpora/%",
        b"/v1/corpora/%zz",
        b"/v1/corpora/%00",
        b"/v1/corpora/%ed%a0%80",
        b"/../../etc/passwd",
        b"/v1/corpora/web/../../../../etc/passwd",
        b"//etc/passwd",
        b"/v1/corpora?name=\xc3\x28",
        b"*",
        b"http://example.org/etc/passwd",
    ],
    ids=repr,
)
def test_odd_bytes_in_a_target_end_in_a_4xx(server: RunningServer, target: bytes) -> None:
    pids = server.worker_pids()
    with socket.create_connection(host_and_port(server.url), timeout=30) as connection:
        connection.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200 OK")), received[:200]
    if b"name=" not in target:
        assert received.startswith(b"HTTP/1.1 4")
    assert server.worker_pids() == pids


def test_what_is_echoed_is_short(server: RunningServer) -> None:
    response = server.get("/v1/batches", **{**STEP, "corpus": "x" * 100, "order": "y" * 5000})
    assert len(response.body) < 1500
    assert json.loads(response.body)["received"] == "y" * 200 + "..."
