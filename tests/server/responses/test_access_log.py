"""What becomes known of a request that was answered: counts, a line in the log, a trace."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from corpus_server.admission.request import Caller, RequestHead
from corpus_server.responses import requests as module
from corpus_server.responses.requests import MAX_LINES, SLOW_SECONDS, Requests
from corpus_server.responses.response import Answered

HEAD = RequestHead(
    "GET",
    b"/v1/x?secret",
    {},
    caller=Caller("me", frozenset()),
    request_id="id-1",
    trace_parent="00-a-b-01",
)
ANSWERED = Answered(request=HEAD, route="/v1/x", via="door", status=200, sent_bytes=5)
FAILED = replace(ANSWERED, status=500, problem_type="internal-error")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="corpus_server")


@pytest.mark.parametrize(
    ("status", "seconds", "is_notable"),
    [
        (200, 0.0, False),
        (200, SLOW_SECONDS, False),
        (200, SLOW_SECONDS + 0.001, True),
        (299, 0.0, False),
        (300, 0.0, True),
        (303, 0.0, True),
        (304, 0.0, False),
        (305, 0.0, True),
        (199, 0.0, True),
        (404, 0.0, True),
        (404, 9.0, True),
        (499, 0.0, False),
        (499, 9.0, False),
    ],
)
@pytest.mark.parametrize("logs", ["all", "notable", "off"])
def test_a_line_is_written_as_it_was_asked_for(
    caplog: pytest.LogCaptureFixture, logs: str, status: int, seconds: float, is_notable: bool
) -> None:
    Requests(logs).done(replace(ANSWERED, status=status, seconds=seconds))
    is_written = logs == "all" or (logs == "notable" and is_notable)
    assert lines(caplog) == ["request"] * is_written


def test_a_line_says_nothing_of_the_target(caplog: pytest.LogCaptureFixture) -> None:
    usual = set(vars(logging.makeLogRecord({})))
    for answered, more in ((replace(ANSWERED, seconds=0.12345678), {}), (FAILED, {"type": "internal-error"})):
        Requests("all").done(answered)
        (record,) = caplog.records
        caplog.clear()
        said = {key: value for key, value in vars(record).items() if key not in usual | {"message"}}
        assert said == {
            "request_id": "id-1",
            "method": "GET",
            "route": "/v1/x",
            "status": answered.status,
            "via": "door",
            "sent_bytes": 5,
            "seconds": 0.123457 if answered.seconds else 0.0,
            "token": "me",
            **more,
        }


def test_a_second_has_so_many_notable_lines(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    requests = Requests("notable")

    def fail(number: int) -> list[str]:
        for _ in range(number):
            requests.done(FAILED)
            requests.done(ANSWERED)
        return lines(caplog)

    assert fail(MAX_LINES) == ["request"] * MAX_LINES
    clock[0] += 0.9
    assert fail(3) == []
    clock[0] += 0.1
    assert fail(MAX_LINES) == ["3 more requests were not logged", *["request"] * MAX_LINES]
    clock[0] += 1.0
    assert fail(1) == ["request"]
    clock[0] += 1.0
    assert fail(MAX_LINES + 1) == ["request"] * MAX_LINES
    clock[0] += 60.0
    assert fail(1) == ["1 more requests were not logged", "request"]
