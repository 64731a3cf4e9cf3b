"""What becomes known of a request that was answered: counts, a line in the log, a trace."""

from __future__ import annotations

import logging
import time

from corpus_server import metrics
from corpus_server.responses import tracing
from corpus_server.responses.response import Answered

SLOW_SECONDS = 1.0
"""A response that took longer is notable; the median of small ones is below a millisecond."""

CLIENT_LEFT = 499
"""nginx's number for a client that closed the connection; only the metrics see it."""

MAX_LINES = 20
"""Notable lines in a second of a process: what is refused must not fill the disk, and a line costs as much as
a refusal."""

_log = logging.getLogger("corpus_server")


class Requests:
    """Counts, logs and traces what was answered; for the event loop's thread.

    Args:
        logs: which requests get a line: `all`, `notable` for those that failed or were slow, or `off`. Lines
            for all cost 6 to 8 % of the throughput.
    """

    def __init__(self, logs: str) -> None:
        self._logs = logs
        self._second = 0
        self._num_lines = 0

    def done(self, answered: Answered) -> None:
        """Note a request that was answered."""
        status = answered.status
        seconds, stages = answered.seconds, answered.stages
        metrics.count(answered.route, status, answered.sent_bytes, seconds, stages, via=answered.via)
        if answered.problem_type:
            metrics.REFUSALS.add(1, answered.problem_type)
        if tracing.provider is not None:
            tracing.trace(answered)
        # A loader that closes leaves the responses that it prefetched: 499, and nothing to look into.
        is_fine = 200 <= status < 300 or status in (304, CLIENT_LEFT)
        is_notable = not is_fine or (answered.seconds > SLOW_SECONDS and status != CLIENT_LEFT)
        if self._logs == "all" or (is_notable and self._logs == "notable" and self._may_log()):
            # Nothing that a client may choose but its id, run and method, and no secrets.
            fields = {
                "request_id": answered.request.request_id,
                "method": answered.request.method[: tracing.MAX_METHOD],
                "route": answered.route,
                "status": status,
                "via": answered.via,
                "sent_bytes": answered.sent_bytes,
                "seconds": round(answered.seconds, 6),
                "token": answered.request.caller.name,
            }
            more = {"run": answered.request.run, "type": answered.problem_type}
            _log.info("request", extra=fields | {name: value for name, value in more.items() if value})

    def _may_log(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            if self._num_lines > MAX_LINES:
                _log.info("%d more requests were not logged", self._num_lines - MAX_LINES)
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        return self._num_lines <= MAX_LINES
