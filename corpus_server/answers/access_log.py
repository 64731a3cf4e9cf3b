"""What becomes known of a request once it is answered: its counts, its line in the log, its trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from corpus_server import metrics
from corpus_server.admission.request import RequestHead
from corpus_server.answers import tracing

SLOW_SECONDS = 1.0
"""A response that took longer is notable; the median of small ones is below a millisecond."""

MAX_LINES = 20
"""Notable lines in a second of a process: what is refused must not fill the disk, and a line costs as much as
a refusal."""

MAX_METHOD = 32
"""Characters of a method in lines and spans; a client may send as many as fit into a head."""

_log = logging.getLogger("corpus_server")


# Not frozen: making one would cost as much as counting it.
@dataclass(kw_only=True, slots=True)
class Answered:
    """A request and its response, which was sent or cut.

    Args:
        request: what is known of its head.
        route: template of the path, `unknown` for none, `refused` for what its head alone decided.
        via: which path answered, `fast-path` or `application`.
        status: of the response.
        sent_bytes: of its body.
        seconds: from the request's head to the last byte handed to the kernel.
        problem_type: of a problem document.
        stages: seconds of each of `metrics.STAGES`, if they are known.
    """

    request: RequestHead
    route: str
    via: str
    status: int
    sent_bytes: int
    seconds: float = 0.0
    problem_type: str = ""
    stages: Sequence[float] = ()


class Requests:
    """Counts, logs and traces what was answered; for the event loop's thread.

    Args:
        logs: which requests get a line: `all`, `notable` for those that failed or were slow, or `off`. Lines
            for all cost 6 to 8 % of the throughput (`scripts/bench seeing`).
    """

    def __init__(self, logs: str) -> None:
        self._logs = logs
        self._second = 0
        self._num_lines = 0

    def done(self, answered: Answered) -> None:
        """Note a request that was answered."""
        status = answered.status
        metrics.count(answered.route, status, answered.sent_bytes, answered.seconds, via=answered.via)
        if answered.stages:
            metrics.count_stages(answered.stages)
        if answered.problem_type:
            metrics.REFUSALS.add(1, answered.problem_type)
        if tracing.is_on():
            _trace(answered)
        is_notable = answered.seconds > SLOW_SECONDS or not (200 <= status < 300 or status == 304)
        if self._logs == "all" or (is_notable and self._logs == "notable" and self._may_log()):
            _log.info("request", extra=_fields(answered))

    def _may_log(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            if self._num_lines > MAX_LINES:
                _log.info("%d more requests were not logged", self._num_lines - MAX_LINES)
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        return self._num_lines <= MAX_LINES


def _fields(answered: Answered) -> dict[str, object]:
    """Return what a line says: nothing that a client may choose but its id and method, and no secrets."""
    request = answered.request
    fields: dict[str, object] = {
        "request_id": request.request_id,
        "method": request.method[:MAX_METHOD],
        "route": answered.route,
        "status": answered.status,
        "via": answered.via,
        "sent_bytes": answered.sent_bytes,
        "seconds": round(answered.seconds, 6),
        "token": request.caller.name,
    }
    if answered.problem_type:
        fields["type"] = answered.problem_type
    return fields


def _trace(answered: Answered) -> None:
    request = answered.request
    method = request.method[:MAX_METHOD]
    tracing.record(
        f"{method} {answered.route}",
        trace_parent=request.trace_parent,
        seconds=answered.seconds,
        attributes={
            "http.request.method": method,
            "http.route": answered.route,
            "http.response.status_code": answered.status,
            "http.response.body.size": answered.sent_bytes,
            "corpus.request_id": request.request_id,
            "corpus.via": answered.via,
        },
        stages=dict(zip(metrics.STAGES, answered.stages, strict=False)),
        failed=answered.status >= 500,
    )
