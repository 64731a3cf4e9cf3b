"""Every response carries its request's id: the client's where that is well formed, else a new one."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ServedCorpus
from tests.raw_http import RawConnection, check_raw_problem
from tests.serving import RunningServer

BATCH = "/v1/batches?corpus=web&seq_len=16&batch_size=12&checksum=tail&step="
OK, NO_STEP, TOO_LONG = f"{BATCH}5", f"{BATCH}-1", f"{BATCH}{'9' * 9000}"

CASES = {
    "fast path": (f"GET {OK} HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\n\r\n", 200),
    "fast path, another case": (f"GET {OK} HTTP/1.1\r\nx-REQUEST-id:ID \r\nHost: x\r\n\r\n", 200),
    "fast path, problem": (f"GET {NO_STEP} HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\n\r\n", 422),
    "fast path, 414": (f"GET {TOO_LONG} HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\n\r\n", 414),
    "fast path, 431": (f"GET {OK} HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\nX: {'a' * 70_000}\r\n\r\n", 431),
    "application": ("GET /healthz HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\n\r\n", 200),
    "application, batch": (f"HEAD {OK} HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\n\r\n", 200),
    "application, 404": ("GET /nothing HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\n\r\n", 404),
    "application, 405": ("DELETE /healthz HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\n\r\n", 405),
    "application, refused": ("GET /healthz#x HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\n\r\n", 400),
    "no HTTP, 400": ("GET /healthz HTTP/1.1\r\nX-Request-Id: ID\r\nA b: c\r\n\r\n", 400),
    "application, 413": (
        "POST /v1/plans HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\nContent-Length: 99999999\r\n\r\n{",
        413,
    ),
    "application, 431": (f"PUT / HTTP/1.1\r\nHost: x\r\nX-Request-Id: ID\r\nX: {'a' * 70_000}\r\n\r\n", 431),
}


@pytest.mark.parametrize(("text", "status"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("given", ["9f3c2a7b51d0-17", "a" * 128])
def test_the_id_that_was_given_comes_back(server: RunningServer, text: str, status: int, given: str) -> None:
    with RawConnection(server) as connection:
        connection.send(text.replace("ID", given, 1).encode())
        response = connection.read(bodiless=text.startswith("HEAD"))
        assert response.headers["x-request-id"] == given
        assert response.status == status
        if status >= 400:
            check_raw_problem(response, status)


@pytest.mark.parametrize("path", [OK, "/healthz"])
def test_a_refusal_does_not_name_the_request_before_it(server: RunningServer, path: str) -> None:
    for bad in ("GET /healthz HTTP/1.1\r\nX-Request-Id: second\r\n\r\n", "nonsense\r\n\r\n"):
        with RawConnection(server) as connection:
            good = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: first\r\n\r\n"
            connection.send((good + bad).encode())
            assert connection.read().headers["x-request-id"] == "first"
            refused = connection.read()
            check_raw_problem(refused, 400)
            assert (refused.headers["x-request-id"] == "second") == ("second" in bad)
            assert refused.headers["x-request-id"] != "first"


@pytest.mark.parametrize("path", [OK, NO_STEP, "/healthz", "/nothing"])
@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "caf\xe9", '"quoted"', "a,b"])
def test_what_is_not_well_formed_is_replaced(server: RunningServer, path: str, given: str) -> None:
    with RawConnection(server) as connection:
        ids = set()
        for _ in range(2):
            connection.send(
                f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {given}\r\n\r\n".encode("latin-1")
            )
            ids.add(connection.read().headers["x-request-id"])
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{12}-[0-9a-f]+", each) for each in ids)


def test_a_continued_line_is_no_way_to_change_another_header(server: RunningServer) -> None:
    """Without its first line the continuation would belong to the line before."""
    with RawConnection(server) as connection:
        connection.send(f"GET {OK} HTTP/1.1\r\nHost: x\r\nX-Request-Id: abc\r\n  .evil\r\n\r\n".encode())
        assert connection.read().headers["x-request-id"] != "abc"


def test_requests_of_one_text_are_known_again_and_each_gets_its_own_id(
    corpora: dict[str, ServedCorpus], server: RunningServer
) -> None:
    """The responses made ahead serve clients whose requests differ in id and trace besides the step."""
    with RawConnection(server) as connection:
        seconds = []
        for step in range(40):
            lines = f"X-Request-Id: r-{step}\r\ntraceparent: 00-{step:032x}-{step:016x}-00\r\n"
            connection.send(f"GET {BATCH}{step} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
            response = connection.read()
            assert (response.status, response.headers["x-request-id"]) == (200, f"r-{step}")
            seconds.append(response.headers["server-timing"])
        right = server.get(f"{BATCH}39")
        assert response.body == right.body
    assert "X-Request-Id" in right.headers
