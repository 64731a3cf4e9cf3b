"""The door and the application give the same bytes and the same headers to every request."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.reference import one_source
from tests.serving import Answer, RunningServer, ask

SPELLED = "corpus=web&seq_len=16&batch_size=12"
MIXED = "corpus=mixed&seq_len=32&batch_size=8&order=sequential&seed=3"
QUERIES = [
    f"{SPELLED}&step=5",
    f"{SPELLED}&step=5&count=7",
    f"{SPELLED}&step=5&rank=2&world_size=4",
    f"{SPELLED}&step=5&order=random",
    f"{SPELLED}&step=5&stride=17&seed=18446744073709551615",
    f"{MIXED}&step=11",
    f"{SPELLED}&step=1099511627776",
    *(f"{SPELLED}&step=5&format={chosen}" for chosen in ("raw", "npy", "json", "text", "xml")),
    *(f"{SPELLED}&step=5&format=raw&checksum={place}" for place in ("true", "tail", "false", "no")),
    f"{SPELLED}&step=5&format=npy&checksum=tail",
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
OWN = {"date", "server-timing", "corpus-via", "connection"}
"""Headers in which the two may differ: a refusal by the application ends its connection."""


@pytest.fixture(scope="module")
def plan_id(server: RunningServer) -> str:
    return str(server.post_plan(one_source("web", 16, 12, seed=4, skip_steps=[[8, 10]])).json()["id"])


def compared(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return answer.status, {name: headers[name] for name in headers.keys() - OWN}, answer.body


@pytest.mark.parametrize("headers", HEADERS, ids=["plain", "accept", "condition"])
@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[-60:])
@pytest.mark.parametrize("route", ["batches", "indices"])
def test_the_door_and_the_application_answer_alike(
    server: RunningServer, plan_id: str, route: str, query: str, headers: dict[str, str]
) -> None:
    target = f"/v1/{route}?{query.replace('{plan}', plan_id)}"
    with closing(server.connect()) as through_door, closing(server.connect()) as handed_over:
        assert ask(handed_over, "/healthz").status == 200  # from here on the application answers
        door = ask(through_door, target, headers=headers)
        application = ask(handed_over, target, headers=headers)
    assert (door.headers["Corpus-Via"], application.headers["Corpus-Via"]) == ("door", "application")
    assert compared(door) == compared(application)
    assert door.status in (200, 304, 400, 404, 414, 422)
