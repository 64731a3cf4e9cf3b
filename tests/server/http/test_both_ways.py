"""The application gives the same bytes and headers under its own server and under another."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import pytest
import uvicorn

from corpus_server.corpus_spec import CorpusSpec
from corpus_server.responses.tokens import BatchesQuery
from corpus_server.settings import Settings
from corpus_server.web.app import create_app
from tests.conftest import ServedCorpus
from tests.reference import one_source
from tests.serving import Response, RunningServer, ask

SPELLED = "corpus=web&seq_len=16&batch_size=12"
MIXED = "corpus=mixed&seq_len=32&batch_size=8&order=sequential&seed=3"
VALUES = {
    name: schema.get("enum") or [schema["minimum"], schema["maximum"]]
    for name, field in BatchesQuery.model_json_schema()["properties"].items()
    for schema in field.get("anyOf", [field])
    if "enum" in schema or "minimum" in schema
}
"""Choices, or the least and the largest number, that each parameter accepts."""

QUERIES = [
    f"{SPELLED}&step=5",
    f"{SPELLED}&step=5&count=7",
    f"{SPELLED}&step=5&rank=2&world_size=4",
    f"{SPELLED}&step=5&order=random",
    f"{SPELLED}&step=5&stride=17&seed=18446744073709551615",
    f"{MIXED}&step=11",
    f"{SPELLED}&step=1099511627776",
    *(f"{SPELLED}&step=5&{name}={value}" for name, values in VALUES.items() for value in values),
    f"{SPELLED}&step=5&format=raw&checksum=tail",
    f"{SPELLED}&step=5&format=npy&checksum=tail",
    *(f"{SPELLED}&step=5&with=sources&format={chosen}" for chosen in ("raw", "npy", "json", "text")),
    f"{SPELLED}&step=5&count=3&with=sources&format=raw&checksum=tail",
    f"{SPELLED}&step=5&with=",
    "corpus=words&seq_len=16&batch_size=4&step=5&format=text",
    "corpus=text&seq_len=16&batch_size=4&step=5&format=text",
    "plan={plan}&step=5",
    "plan={plan}&step=12&count=2",
    "plan={plan}&step=5&seq_len=16",
    f"plan={'0' * 64}&step=5",
    "plan=1234&step=5",
    SPELLED,
    f"{SPELLED}&step=5&step=6",
    f"{SPELLED}&step=5&stepp=6",
    f"{SPELLED}&step=-1",
    f"{SPELLED}&step=5&count=4096&seq_len=1000000",
    f"{SPELLED}&step=5&rank=4&world_size=4",
    f"{SPELLED}&step=5&world_size=5",
    "corpus=nothing&seq_len=16&batch_size=12&step=5",
    "corpus=web&seq_len=100000&batch_size=12&step=5",
    "%73tep=5&corpus=web&seq_len=16&batch_size=12",
    f"{SPELLED}&step=%35",
    f"{SPELLED}&step=5&seed=",
    f"{SPELLED}&step=5&",
    "",
    "step",
    f"{SPELLED}&step=5#",
    f"{SPELLED}&step=5{'&x=1' * 3000}",
]
HEADERS: list[dict[str, str]] = [
    {},
    {"Accept": "application/json;q=0.5, application/x-npy"},
    {"If-None-Match": "*"},
]
OWN = {"date", "server", "server-timing", "connection", "content-length"}
"""Headers in which the two may differ; the body has the length."""


@pytest.fixture(scope="module")
def under_uvicorn(
    corpora: dict[str, ServedCorpus], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int]]:
    """The application under uvicorn's h11 protocol; yields its address."""
    specs = tuple(CorpusSpec(name=name, path=corpus.path) for name, corpus in corpora.items())
    app = create_app(Settings(corpora=specs, state_dir=tmp_path_factory.mktemp("state")))
    server = uvicorn.Server(uvicorn.Config(app, port=0, http="h11", log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def plan_id(server: RunningServer, under_uvicorn: tuple[str, int]) -> str:
    document = one_source("web", 16, 12, seed=4, skip_steps=[[8, 10]])
    with closing(HTTPConnection(*under_uvicorn, timeout=20)) as other:
        posted = ask(other, "/v1/plans", method="POST", body=json.dumps(document).encode())
    assert posted.json()["id"] == server.post_plan(document).json()["id"]
    return str(posted.json()["id"])


def compared(response: Response) -> tuple[int, dict[str, str], bytes]:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return response.status, {name: headers[name] for name in headers.keys() - OWN}, response.body


OTHERS = ["corpora", "corpora/words", "corpora/web/tokens?count=9&format=raw", "nowhere", "plans/{plan}"]


@pytest.mark.parametrize("headers", HEADERS, ids=["plain", "accept", "condition"])
@pytest.mark.parametrize(
    "target",
    [*(f"{route}?{query}" for route in ("batches", "indices") for query in QUERIES), *OTHERS],
    ids=lambda target: target[-60:],
)
def test_the_own_server_and_another_response_alike(
    server: RunningServer,
    under_uvicorn: tuple[str, int],
    plan_id: str,
    target: str,
    headers: dict[str, str],
) -> None:
    target = f"/v1/{target.replace('{plan}', plan_id)}"
    headers = {**headers, "X-Request-Id": "same"}
    with closing(HTTPConnection(*under_uvicorn, timeout=20)) as other:
        expected = ask(other, target, headers=headers)
        for method in ("GET", "HEAD"):
            own = server.get(target, headers=headers, method=method)
            if method == "GET":
                assert compared(own) == compared(expected)
            else:
                assert (own.status, own.body) == (expected.status, b"")
    assert expected.status in (200, 304, 400, 404, 414, 422)
