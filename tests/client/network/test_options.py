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
from corpus_client.network.control import ControlPlane
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Credentials, Network
from corpus_client.network.replicas import Replicas
from corpus_client.plan.document import make_plan
from corpus_client.plan.requests import StepRequests
from tests.client.reference_server import ReferenceServer

PLAN = make_plan(corpus="web", seq_len=16, global_batch_size=12, seed=0, order="sequential", stride=None)
SECRET = "s3cr3t-t0k3n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_seconds": 0}, "deadline_seconds must be above 0, got 0"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds must"),
        ({"progress_seconds": float("inf")}, "progress_seconds must"),
        ({"hedge_factor": 0.5}, "hedge_factor must be 0 or at least 1, got 0.5"),
        ({"in_flight": 0}, r"in_flight must be in \[1, 64\], got 0"),
        ({"in_flight": True}, "in_flight must"),
        ({"headers": {"X": "a\r\nb"}}, "single lines of Latin-1, got 'X'"),
        ({"headers": {"a b": "c"}}, "headers must"),
        ({"headers": {"authorization": "Basic x"}, "auth": "y"}, "give one"),
        ({"key_file": "key.pem"}, "key_file must come with cert_file"),
        ({"auth": ""}, "auth must give a token of ASCII without spaces, got an empty one"),
        ({"auth": f"{SECRET} x"}, "auth must give a token"),
        ({"auth": 7}, "auth must be a token, the path of a file or a function, got int"),
        ({"auth": Path("/no/such/file")}, "got '/no/such/file': FileNotFoundError"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message) as caught:
        Network(**options)
    assert SECRET not in str(caught.value)


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nonsense")
    with pytest.raises(errors.InvalidArgument, match=f"PEM files, got {path}"):
        Endpoint.parse("https://data", Network(ca_file=path))


def test_options_travel_to_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    network = Network(deadline_seconds=7, auth=tmp_path / "token", headers={"X": "1"})
    assert pickle.loads(pickle.dumps(network)) == network


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    for auth in (SECRET, tmp_path / "token", lambda: SECRET):
        network = Network(auth=auth, headers={"X-Key": SECRET})
        assert SECRET not in repr(network) + repr(Credentials(auth)) + str(vars(Credentials)) + f"{network}"


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
    path.unlink()
    assert credentials.header() == "Bearer two"
    path.write_text("three")
    assert credentials.header() == "Bearer three"


def test_a_function_that_fails_is_named_without_its_words() -> None:
    def auth() -> str:
        raise RuntimeError(SECRET)

    with pytest.raises(errors.InvalidArgument, match="the function of auth failed: RuntimeError") as caught:
        Credentials(auth).header()
    assert SECRET not in str(caught.value)


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
            replicas.ask(lambda control: control.receipt(plan.plan_id, 3))
        with closing(ControlPlane(Endpoint.parse(server.url, network), network)) as control:
            control.get("/v1/corpora")
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
        assert replicas.stopwatch.num_retries == 0
    assert "wr0ng" not in str(caught.value) + caplog.text


def test_a_token_that_changes_in_its_file_goes_on(server: ReferenceServer, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    server.token = "first"
    with Replicas([server.url], Network(auth=path)) as replicas:
        plan = replicas.bind(PLAN)
        filler = StepRequests(replicas, plan)
        buffer = memoryview(bytearray(12 * 17 * 2))
        filler.finish(filler.begin(0, 1, (12, 17)), buffer)
        path.write_text("second-one")
        server.token = "second-one"
        filler.finish(filler.begin(1, 1, (12, 17)), buffer)
        assert replicas.stopwatch.num_retries == 0
