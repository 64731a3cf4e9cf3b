"""What the control plane takes for a response: of the right plan, step and length, and with its checksum."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from contextlib import closing
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_client import errors
from corpus_client.network import control
from corpus_client.network.asking import HttpClient
from corpus_client.network.control import BoundPlan, Question, ShardDescription, StageDescription
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Network
from tests.client.network.scripted import ScriptedServer

PLAN = "ab" * 32
DIGEST = "xxh3-64=" + "0" * 16
BODY = bytes(range(32))
TAIL = xxhash.xxh3_64_digest(BODY)


URL = "http://127.0.0.1:1"


def ask(
    question: Question[Any],
    status: int = 200,
    *,
    json: object = None,
    content: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Return what the control plane makes of a response, whose URL in errors is `URL`."""
    body = content if json is None else dumps(json).encode()
    lines = {"Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return ask_of([f"HTTP/1.1 {status} x\r\n{head}\r\n".encode() + body], question)


def ask_at(url: str, question: Question[Any], **options: Any) -> Any:
    """Return the response of the server there."""
    with closing(HttpClient(Endpoint.parse(url), Network(**options))) as client:
        return client.ask(question)


def ask_of(script: list[Any], question: Question[Any], **options: Any) -> Any:
    """Return what the control plane makes of what a scripted server sends; errors name `URL`."""
    with closing(ScriptedServer(script)) as server:
        try:
            return ask_at(server.url, question, **options)
        except errors.CorpusClientError as error:
            told = str(error.args[0]).replace(server.url, URL)
            error.args = (re.sub("; request [0-9a-f]{16}$", "", told),)
            raise


@pytest.mark.parametrize("value", ["caf\xe9", "a", "x\ty"])
def test_a_header_goes_out_in_latin_1(value: str) -> None:
    with closing(ScriptedServer()) as server, pytest.raises(errors.ConnectionFailed):
        ask_at(server.url, control.get("/"), headers={"X-Job": value})
    assert b"\r\nX-Job: " + value.encode("latin-1") + b"\r\n" in server.requests[0]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PACKED = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 7\r\n\r\nno gzip"


@pytest.mark.parametrize(
    "script",
    [
        [CHUNKED + b'4;a=b\r\n{"a"\r\n3\r\n:1}\r\n0\r\n\r\n'],
        [CHUNKED, 0.01, b"7\r", 0.01, b'\n{"a":', 0.01, b"1}\r\n", 0.01, b"0\r\n\r\n"],
        [b'HTTP/1.1 200 OK\r\n\r\n{"a":1}', "close"],
        [b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.0 200\r\nContent-Length: 7\r\n\r\n", 0.01, b'{"a":1}'],
    ],
    ids=["chunks", "chunks in pieces", "up to the end", "after a hint"],
)
def test_a_proxy_may_frame_a_response_as_it_likes(script: list[Any]) -> None:
    assert ask_of(script, control.get("/")) == {"a": 1}


def test_plain_http_makes_no_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is made OpenSSL holds locks, and a DataLoader's worker that is forked then hangs on them."""
    monkeypatch.setattr(ssl, "SSLContext", None)
    assert ask(control.get("/"), json={"a": 1}) == {"a": 1}


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches do not go through it either."""
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:1")
    assert ask(control.get("/"), json={"a": 1}) == {"a": 1}


@pytest.mark.parametrize("weight", [np.float32(0.5), float("nan"), {1}], ids=["NumPy", "NaN", "set"])
def test_a_plan_that_json_cannot_say_is_refused_by_name(weight: object) -> None:
    plan = {"seq_len": 16, "stages": [{"mixture": {"web": weight}}]}
    with pytest.raises(errors.InvalidArgument, match="plan must hold JSON values alone"):
        control.post_plan(plan)


SHARD = {
    "corpus": "web",
    "name": "a/0.bin",
    "file": "a/0.bin",
    "num_tokens": 5,
    "dtype": "uint16",
    "data_offset": 8,
}
STAGE = {"first_step": None, "global_batch_size": 4, "seq_len": 16}
DESCRIBED = {
    "id": PLAN,
    "plan": {"seed": 7},
    "dtype": "uint16",
    "sources": {"web": {"eot": 3}, "code": {"eot": 3}},
    "shards": [{**SHARD, "size_bytes": 18, "of_tomorrow": 1}],
    "stages": [{**STAGE, "of_tomorrow": 1}],
    "num_steps": 9,
}


POST = control.post_plan({"seed": 7})


@pytest.mark.parametrize(
    ("sources", "eot_id"),
    [
        ({"web": {"eot": 3}}, 3),
        ({"web": {"eot": 3}, "code": {"eot": 3}}, 3),
        ({"web": {"eot": 3}, "code": {"eot": 4}}, None),
        ({"web": {"eot": 3}, "code": {}}, None),
        ({"web": {"eot": None}}, None),
        ({}, None),
    ],
)
def test_a_plan_is_what_the_server_describes(sources: dict[str, Any], eot_id: int | None) -> None:
    """One end-of-text id counts for all sources; what this client does not know is left out."""
    assert ask(POST, json={**DESCRIBED, "sources": sources}) == BoundPlan(
        plan_id=PLAN,
        document={"seed": 7},
        dtype="uint16",
        shards=(
            ShardDescription(
                corpus="web",
                name="a/0.bin",
                file="a/0.bin",
                num_tokens=5,
                dtype="uint16",
                data_offset=8,
                size_bytes=18,
            ),
        ),
        stages=(StageDescription(first_step=None, global_batch_size=4, seq_len=16),),
        eot_id=eot_id,
        num_steps=9,
        sources=tuple(sources),
    )


@pytest.mark.parametrize(
    "change",
    [
        *({"sources": []}, {"sources": {"web": None}}, {"plan": "ab"}, {"plan": 7}),
        *({"shards": None}, {"shards": [SHARD]}, {"stages": [{}]}, {"stages": 7}),
    ],
    ids=str,
)
def test_what_describes_no_plan_is_refused(change: dict[str, object]) -> None:
    response = {**DESCRIBED, **change}
    with pytest.raises(errors.ResponseCorrupt) as caught:
        ask(POST, json=response)
    assert str(caught.value) == f"{URL}: not the description of a plan: {response}"


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_description_that_lacks_something_is_refused(name: str) -> None:
    with pytest.raises(errors.ResponseCorrupt, match="not the description of a plan"):
        ask(POST, json={key: value for key, value in DESCRIBED.items() if key != name})


@pytest.mark.parametrize(
    ("question", "method", "path", "body"),
    [
        (control.get("/v1/corpora"), "GET", "/v1/corpora", b""),
        (POST, "POST", "/v1/plans", b'{"seed":7}'),
        (control.plan_step(PLAN, 5), "GET", f"/v1/plans/{PLAN}/usage?step=5", b""),
        (control.receipt(PLAN, 5), "GET", f"/v1/plans/{PLAN}/receipt?step=5", b""),
        (
            control.places(PLAN, 5),
            "GET",
            f"/v1/indices?plan={PLAN}&step=5&count=1&rank=0&world_size=1&format=raw&checksum=tail",
            b"",
        ),
        (
            control.tokens("a/b", 7, 16),
            "GET",
            "/v1/corpora/a%2Fb/tokens?start=7&count=16&format=raw&checksum=tail",
            b"",
        ),
    ],
    ids=["get", "plan", "plan step", "receipt", "places", "tokens"],
)
def test_each_question_has_its_path(question: Question[Any], method: str, path: str, body: bytes) -> None:
    refusal = b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"
    with closing(ScriptedServer([refusal])) as server:
        with pytest.raises(errors.ServerError, match=r"HTTP 404: no response of corpus-server.*a proxy"):
            ask_at(server.url, question)
        [asked] = server.requests
    head, _, sent = asked.partition(b"\r\n\r\n")
    assert head.startswith(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode())
    assert re.search(rb"\r\nAccept-Encoding: identity\r\n(.*\r\n)*x-request-id: [0-9a-f]{16}(\r\n|$)", head)
    assert sent == body


@pytest.mark.parametrize("status", [302, 404, 503])
def test_only_a_response_of_success_is_taken(status: int) -> None:
    with pytest.raises(errors.ServerError) as caught:
        ask(POST, status, json=DESCRIBED)
    assert caught.value.status == status
    assert ask(POST, 201, json=DESCRIBED).plan_id == PLAN


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ([1.0], errors.NoProgress, "nothing came in time (timed out)"),
        (["reset"], errors.ConnectionFailed, "Connection reset by peer"),
        (["close"], errors.ConnectionFailed, "RemoteProtocolError: Server disconnected"),
        ([CHUNKED + b"-1\r\n"], errors.ConnectionFailed, "RemoteProtocolError: illegal chunk header"),
        ([CHUNKED + b"5\r\nab", "close"], errors.ConnectionFailed, "RemoteProtocolError: peer closed"),
        ([PACKED], errors.ResponseCorrupt, "Error -3 while decompressing data"),
    ],
    ids=["slow", "cut", "closed", "negative length", "cut in a chunk", "no gzip"],
)
def test_what_goes_wrong_on_the_way_is_named(script: list[Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        ask_of(script, control.get("/"), deadline_seconds=2.0)
    assert str(caught.value).startswith(f"{URL}: {message}")


def test_a_unix_socket_that_accepts_nobody_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(errors.ConnectionFailed, match=f"^uds://{path}: Resource temporarily unavailable"):
            ask_at(f"uds://{path}", control.get("/"))


@pytest.mark.parametrize(
    "change", [{"plan": "cd" * 32}, {"step": 6}, {"digest": "xxh3-64=0"}, {"digest": None}, {"digest": 7}]
)
def test_only_the_receipt_of_the_step_is_taken(change: dict[str, object]) -> None:
    receipt = control.receipt(PLAN, 5)
    right = {"plan": PLAN, "step": 5, "digest": DIGEST}
    assert ask(receipt, json=right) == DIGEST
    response = {**right, **change}
    with pytest.raises(errors.ResponseCorrupt) as caught:
        ask(receipt, json=response)
    assert str(caught.value) == f"{URL}: not the receipt of step 5 of plan {PLAN}: {response}"


@pytest.mark.parametrize("found", [4, "5", None, 5.0])
def test_a_plan_step_is_never_before_its_training_step(found: object) -> None:
    for step in (5, 6):
        assert ask(control.plan_step(PLAN, 5), json={"plan_step": step}) == step
    with pytest.raises(errors.ResponseCorrupt) as caught:
        ask(control.plan_step(PLAN, 5), json={"plan_step": found})
    assert str(caught.value) == f"{URL}: plan_step must be 5 or more, got {found!r}"


@pytest.mark.parametrize("wrong", ["step", "checksum"])
def test_places_are_those_of_the_step_and_whole(wrong: str) -> None:
    places = control.places(PLAN, 5)
    headers = {"Corpus-Plan": PLAN, "ETag": f'"{PLAN}.indices.5.1.0.1.raw+tail"'}
    assert ask(places, content=BODY + TAIL, headers=headers) == BODY
    if wrong == "step":
        headers["ETag"] = f'"{PLAN}.indices.6.1.0.1.raw+tail"'
    tail = bytes(8) if wrong == "checksum" else TAIL
    with pytest.raises(errors.ResponseCorrupt, match="etag" if wrong == "step" else "checksum"):
        ask(places, content=BODY + tail, headers=headers)


@pytest.mark.parametrize("wrong", ["Corpus-Shape", "Corpus-Dtype", "checksum"])
def test_tokens_are_as_many_as_were_asked_for_and_whole(wrong: str) -> None:
    tokens = control.tokens("web", 0, 16)
    headers = {"Corpus-Shape": "16", "Corpus-Dtype": "uint16", "Corpus-Checksum": "xxh3-64=tail"}
    assert ask(tokens, content=BODY + TAIL, headers=headers) == ("uint16", BODY)
    tail = bytes(8) if wrong == "checksum" else TAIL
    headers |= {wrong: "15" if wrong == "Corpus-Shape" else "int8"} if wrong in headers else {}
    with pytest.raises(errors.ResponseCorrupt, match=wrong.lower()):
        ask(tokens, content=BODY + tail, headers=headers)


def test_a_response_nested_too_deeply_is_no_object() -> None:
    content = b"[" * 200_000
    with pytest.raises(errors.ResponseCorrupt, match="must be a JSON object"):
        ask(control.get("/v1/corpora"), content=content)


def test_a_response_without_an_end_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus_client.network.asking.MAX_RESPONSE_BYTES", 1000)
    with pytest.raises(errors.ResponseCorrupt, match="must answer at most 1,000 bytes, got more"):
        ask(control.get("/v1/corpora"), content=b"x" * 5000)


@pytest.mark.parametrize("status", [204, 304])
def test_a_response_without_a_body_is_not_read(status: int) -> None:
    with pytest.raises(
        errors.ServerError, match=rf"HTTP {status}: no response of corpus-server.*another program"
    ):
        ask(control.get("/v1/corpora"), status)


def test_a_part_of_a_response_is_refused_without_its_bytes() -> None:
    with pytest.raises(errors.ServerError) as caught:
        ask(
            control.get("/v1/corpora"),
            206,
            content=b"\x00\xff" * 50,
            headers={"Content-Type": "application/octet-stream"},
        )
    assert "HTTP 206: no response of corpus-server" in str(caught.value)
