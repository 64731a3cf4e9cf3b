"""What becomes known of a request that was answered: counts, a line in the log, a trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest

from corpus_server import metrics
from corpus_server.admission.access import Caller
from corpus_server.admission.request import RequestHead
from corpus_server.answers import access_log as module
from corpus_server.answers import tracing
from corpus_server.answers.access_log import MAX_LINES, SLOW_SECONDS, Answered, Requests

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
def counts() -> Iterator[dict[str, Mock]]:
    """What is counted, without counting it."""
    names = ("count", "count_stages", "add")
    with patch.multiple(metrics, **{name: Mock() for name in names}):
        yield {name: getattr(metrics, name) for name in names}


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


def test_an_answer_is_what_it_is_unless_more_is_known() -> None:
    assert (ANSWERED.seconds, ANSWERED.problem_type, ANSWERED.stages) == (0.0, "", ())


def test_an_answer_is_counted(counts: dict[str, Mock]) -> None:
    Requests("off").done(replace(ANSWERED, seconds=0.5))
    counts["count"].assert_called_once_with("/v1/x", 200, 5, 0.5, via="door")
    counts["count_stages"].assert_not_called()
    counts["add"].assert_not_called()


def test_stages_and_refusals_are_counted(counts: dict[str, Mock]) -> None:
    Requests("off").done(replace(FAILED, stages=(1.0, 2.0, 3.0, 4.0)))
    counts["count_stages"].assert_called_once_with((1.0, 2.0, 3.0, 4.0))
    counts["add"].assert_called_once_with("corpus_refusals", 1, "internal-error")


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
    ],
)
@pytest.mark.parametrize("logs", ["all", "notable", "off"])
@pytest.mark.usefixtures("counts")
def test_a_line_is_written_as_it_was_asked_for(
    caplog: pytest.LogCaptureFixture, logs: str, status: int, seconds: float, is_notable: bool
) -> None:
    Requests(logs).done(replace(ANSWERED, status=status, seconds=seconds))
    is_written = logs == "all" or (logs == "notable" and is_notable)
    assert lines(caplog) == ["request"] * is_written


@pytest.mark.usefixtures("counts")
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


@pytest.mark.usefixtures("counts")
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


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize(("status", "failed"), [(200, False), (499, False), (500, True), (503, True)])
def test_a_span_is_recorded_where_traces_are_on(status: int, failed: bool) -> None:
    answered = replace(ANSWERED, status=status, seconds=1.5, stages=(1.0, 2.0, 3.0, 4.0))
    with patch.object(tracing, "record") as record:
        Requests("off").done(answered)
        record.assert_not_called()
        with patch.object(tracing, "is_on", return_value=True):
            Requests("off").done(answered)
            Requests("off").done(replace(answered, stages=()))
    assert [call.args for call in record.call_args_list] == [("GET /v1/x",)] * 2
    stages = [call.kwargs.pop("stages") for call in record.call_args_list]
    assert stages == [{"wait": 1.0, "locate": 2.0, "gather": 3.0, "send": 4.0}, {}]
    assert record.call_args.kwargs == {
        "trace_parent": "00-a-b-01",
        "seconds": 1.5,
        "attributes": {
            "http.request.method": "GET",
            "http.route": "/v1/x",
            "http.response.status_code": status,
            "http.response.body.size": 5,
            "corpus.request_id": "id-1",
            "corpus.via": "door",
        },
        "failed": failed,
    }
