"""Options are checked where they are made, and what they hold of secrets is never shown."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from corpus_client import errors
from corpus_client.network import control
from corpus_client.network.asking import HttpClient
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Credentials, Network
from corpus_client.network.replicas import Replicas
from corpus_client.plan.document import make_plan
from corpus_client.plan.requests import StepRequests
from tests.client.reference_server import ReferenceServer

PLAN = make_plan(corpus="web", seq_len=16, global_batch_size=12, seed=0, order="sequential", stride=None)
SECRET = "s3cr3t-t0k3n"


TOKEN_WANTED = "auth must give a token of ASCII without spaces, got"
BOTH = "auth= and an Authorization header say the same; give one"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_seconds": 0}, "deadline_seconds must be above 0, got 0"),
        ({"deadline_seconds": -0.5}, "deadline_seconds must be above 0, got -0.5"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds must be above 0, got nan"),
        ({"deadline_seconds": True}, "deadline_seconds must be above 0, got True"),
        ({"progress_seconds": 0.0}, "progress_seconds must be above 0, got 0.0"),
        ({"progress_seconds": float("inf")}, "progress_seconds must be above 0, got inf"),
        ({"in_flight": 0}, "in_flight must be in [1, 64], got 0"),
        ({"in_flight": 65}, "in_flight must be in [1, 64], got 65"),
        ({"in_flight": 1.5}, "in_flight must be in [1, 64], got 1.5"),
        ({"in_flight": True}, "in_flight must be in [1, 64], got True"),
        ({"verify": "no"}, "verify must be True or False, got 'no'"),
        ({"verify": None}, "verify must be True or False, got None"),
        ({"verify": 0}, "verify must be True or False, got 0"),
        ({"headers": {"X": "a\r\nb"}}, "headers must be single lines of Latin-1, got 'X'"),
        ({"headers": {"X": "a", "x": "b"}}, "headers must name each header once, got 'X' twice"),
        ({"headers": {"X": 7}}, "headers must be single lines of Latin-1, got 'X'"),
        ({"headers": {"X": "\u20ac"}}, "headers must be single lines of Latin-1, got 'X'"),
        ({"headers": {"a b": "c"}}, "headers must be single lines of Latin-1, got 'a b'"),
        ({"headers": {"X": "a", "": "c"}}, "headers must be single lines of Latin-1, got ''"),
        ({"headers": {"authorization": "Basic x"}, "auth": "y"}, BOTH),
        ({"headers": {"X": "a", "AUTHORIZATION": "Basic x"}, "auth": "y"}, BOTH),
        ({"deadline_seconds": "300"}, "deadline_seconds must be above 0, got '300'"),
        (
            {"reach_seconds": 301},
            "reach_seconds must be at most deadline_seconds, 300, within which a request ends; raise both, "
            "got 301",
        ),
        ({"progress_seconds": None}, "progress_seconds must be above 0, got None"),
        ({"headers": [("X", "a")]}, "headers must be a mapping of names to values, got a list"),
        ({"headers": {7: "a"}}, "headers must be single lines of Latin-1, got 7"),
        ({"headers": {"Host": "data"}}, "headers must leave Host to the client; the URL names the host"),
        ({"headers": {"content-length": "5"}}, "headers must leave content-length to the client"),
        ({"headers": {"Expect": "100-continue"}}, "headers must leave Expect to the client"),
        ({"key_file": "key.pem"}, "key_file must come with cert_file, got key_file alone"),
        ({"ca_file": ""}, "ca_file must be the path of a PEM file, got ''"),
        ({"cert_file": True}, "cert_file must be the path of a PEM file, got True"),
        ({"auth": ""}, f"{TOKEN_WANTED} an empty one"),
        ({"auth": f"{SECRET} x"}, f"{TOKEN_WANTED} something else"),
        ({"auth": "\xe4"}, f"{TOKEN_WANTED} something else"),
        ({"auth": 7}, "auth must be a token, the path of a file or a function, got int"),
        (
            {"auth": Path("/no/such/file")},
            "auth must name a file with a token, got '/no/such/file': No such file or directory",
        ),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        Network(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("deadline", "attempt", "connect"), [(300, 75, 10), (40, 10, 10), (20, 5, 5), (0.4, 0.1, 0.1)]
)
def test_an_attempt_takes_a_quarter_of_the_deadline_and_connecting_ten_seconds(
    deadline: float, attempt: float, connect: float
) -> None:
    network = Network(deadline_seconds=deadline)
    assert (network.attempt_seconds, network.connect_seconds) == (attempt, connect)


def test_options_travel_to_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    network = Network(deadline_seconds=7, auth=tmp_path / "token", headers={"X": "1"})
    there = pickle.loads(pickle.dumps(network))
    assert there == network
    assert there.credentials.header() == f"Bearer {SECRET}"
    assert Network(deadline_seconds=7) != network


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    for auth in (SECRET, tmp_path / "token", lambda: SECRET):
        network = Network(auth=auth, headers={"X-Key": SECRET})
        assert SECRET not in repr(network) + repr(Credentials(auth)) + str(vars(Credentials)) + f"{network}"
        assert repr(network).endswith("verify=True, ca_file=None, cert_file=None, key_file=None)")


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one\n")
    credentials = Credentials(path)
    assert credentials.header() == "Bearer one"
    (tmp_path / "new").write_text("two\n")
    os.replace(tmp_path / "new", path)  # noqa: PTH105 - as secret stores do it
    assert credentials.header() == "Bearer two"
    path.write_text("")  # being written
    assert credentials.header() == "Bearer two"
    path.write_bytes(b"\xff")
    assert credentials.header() == "Bearer two"
    path.unlink()
    assert credentials.header() == "Bearer two"
    path.write_text("three")
    assert credentials.header() == "Bearer three"


def test_a_function_that_fails_is_named_without_its_words() -> None:
    def auth() -> str:
        raise RuntimeError(SECRET)

    with pytest.raises(errors.InvalidArgument) as caught:
        Credentials(auth).header()
    assert str(caught.value) == "the function of auth failed: RuntimeError"


@pytest.mark.parametrize(
    ("token", "what"), [("", "an empty one"), (f"{SECRET}\n", "something else"), (7, "something else")]
)
def test_what_a_function_returns_must_be_a_token(token: Any, what: str) -> None:
    """It is asked when a request is sent, and not before."""
    credentials = Network(auth=lambda: token).credentials
    message = f"the function of auth must give a token of ASCII without spaces, got {what}"
    with pytest.raises(errors.InvalidArgument) as caught:
        credentials.header()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file {!r} of auth must give a token of ASCII without spaces, got an empty one"),
        (b" \n", "the file {!r} of auth must give a token of ASCII without spaces, got an empty one"),
        (b"a b", "the file {!r} of auth must give a token of ASCII without spaces, got something else"),
        (b"\xff", "auth must name a file with a token, got {!r}: it is not UTF-8 text"),
    ],
)
def test_a_file_must_hold_a_token_from_the_first(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(errors.InvalidArgument) as caught:
        Network(auth=path)
    assert str(caught.value) == message.format(str(path))


def text(path: Path) -> str:
    path.write_text(SECRET)
    return SECRET


def file(path: Path) -> Path:
    path.write_text(SECRET + "\n")
    return path


def function(path: Path) -> Callable[[], str]:
    return lambda: SECRET


@pytest.mark.parametrize("make", [text, file, function])
def test_every_request_carries_the_token_and_the_headers(
    make: Callable[[Path], Any], server: ReferenceServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.token = SECRET
    network = Network(auth=make(tmp_path / "token"), headers={"X-Run": "7"})
    with caplog.at_level(logging.DEBUG):
        with Replicas([server.url], network) as replicas:
            plan = replicas.bind(PLAN)
        server.plans.clear()  # the plan is posted again in the middle of reading
        with Replicas([server.url], network, plan=plan) as replicas:
            filler = StepRequests(replicas, plan)
            filler.finish(filler.begin(3, 2, (12, 17)), memoryview(bytearray(2 * 12 * 17 * 2)))
            replicas.ask(control.receipt(plan.plan_id, 3))
        with closing(HttpClient(Endpoint.parse(server.url, network), network)) as client:
            client.ask(control.get("/v1/corpora"))
    assert len(server.headers) >= 6
    assert {each["Authorization"] for each in server.headers} == {f"Bearer {SECRET}"}
    assert {each["X-Run"] for each in server.headers} == {"7"}
    assert SECRET not in caplog.text


def test_a_token_that_is_not_accepted_fails_at_once(
    server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first question, and in the middle of reading, without a retry."""
    server.token = "right"
    with (
        Replicas([server.url], Network(auth="wr0ng")) as replicas,
        pytest.raises(errors.AccessDenied, match=r"HTTP 401: no valid token \(auth= gives") as caught,
    ):
        replicas.bind(PLAN)
    assert caught.value.status == 401
    with Replicas([server.url], Network(auth="right")) as replicas:
        plan = replicas.bind(PLAN)
        filler = StepRequests(replicas, plan)
        server.token = "another"
        with pytest.raises(errors.AccessDenied):
            filler.finish(filler.begin(0, 1, (12, 17)), memoryview(bytearray(12 * 17 * 2)))
        assert replicas.recorder.num_retries == 0
    assert "wr0ng" not in str(caught.value) + caplog.text
