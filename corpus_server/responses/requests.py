"""What becomes known of a request that was answered: counts, a line in the log, a trace."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server import metrics
from corpus_server.metrics.kinds import Series
from corpus_server.read.bound_plan import Source
from corpus_server.responses import tracing
from corpus_server.responses.response import Answered

SLOW_SECONDS = 1.0
"""A response that took longer is notable; the median of small ones is below a millisecond."""

CLIENT_LEFT = 499
"""nginx's number for a client that closed the connection; only the metrics see it."""

MAX_LINES = 20
"""Notable lines in a second of a process: what is refused must not fill the disk, and a line costs as much as
a refusal."""

PLAN_IDLE_SECONDS: Final = 600.0
"""A plan that is not read for so long gives its label to another one. Prometheus forgets after 300 s."""

MAX_SUMS: Final = 64
"""Sources whose tokens are counted apart: each may have a thousand corpora, and counting must be quick."""

_of_sources: dict[Source, int] = {}
_tokens: dict[tuple[str, ...], NDArray[np.float64]] = {}  # by their corpora
_tokens_lock: Final = threading.Lock()

_plans: OrderedDict[tuple[str, ...], float] = OrderedDict()
"""Plans and runs with labels: when they were read last, longest ago first."""

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
        status, seconds = answered.status, answered.seconds
        metrics.REQUESTS.add(1, answered.route, str(status), answered.via)
        metrics.SENT_BYTES.add(answered.sent_bytes, answered.route)
        metrics.REQUEST_SECONDS.observe(seconds, answered.route)
        for stage, each in zip(metrics.STAGES, answered.stages, strict=False):
            metrics.STAGE_SECONDS.observe(each, stage)
        if answered.problem_type:
            metrics.REFUSALS.add(1, answered.problem_type)
        if tracing.provider is not None:
            tracing.trace(answered)
        # A loader that closes leaves the responses that it prefetched: 499, and nothing to look into.
        is_fine = 200 <= status < 300 or status in (304, CLIENT_LEFT)
        is_notable = not is_fine or (seconds > SLOW_SECONDS and status != CLIENT_LEFT)
        if self._logs == "all" or (is_notable and self._logs == "notable" and self._may_log()):
            # Nothing that a client may choose but its id, run and method, and no secrets.
            fields = {
                "request_id": answered.request.request_id,
                "method": answered.request.method[: tracing.MAX_METHOD],
                "route": answered.route,
                "status": status,
                "via": answered.via,
                "sent_bytes": answered.sent_bytes,
                "seconds": round(seconds, 6),
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


def count_tokens(source: Source, num_tokens: int, run: str) -> None:
    """Count tokens of a plan, or of a corpus, that were sent to a run; "" has no name."""
    with _tokens_lock:
        _of_sources[source] = _of_sources.get(source, 0) + num_tokens
        if len(_of_sources) > MAX_SUMS:
            _sum_sources()
    if source.plan_id:  # else of a corpus
        metrics.PLAN_TOKENS.add(num_tokens, *_plan_labels(source.plan_id, run))


def _sum_sources() -> None:
    """Sum what was counted by sources of the same corpora; the lock is held."""
    for source, number in _of_sources.items():
        if (each := _tokens.get(source.names)) is None:
            each = _tokens[source.names] = np.zeros(len(source.names))
        each += source.shares * number
    _of_sources.clear()


def _add_tokens() -> Series:
    """Add what was counted to the series of the corpora, and return all of these."""
    with _tokens_lock:
        _sum_sources()
        counted = dict(_tokens)
        _tokens.clear()
    for names, numbers in counted.items():
        for name, number in zip(names, numbers.tolist(), strict=True):
            metrics.TOKENS.add(number, name)
    return {labels: list(each) for labels, each in list(metrics.TOKENS.series.items())}


metrics.TOKENS.pull_series(_add_tokens)


def _plan_labels(*labels: str) -> tuple[str, ...]:
    """Return the labels under which the tokens of a plan and a run count; for the event loop's thread."""
    now = time.monotonic()
    if labels not in _plans and len(_plans) >= metrics.MAX_PLANS:
        oldest, read_at = next(iter(_plans.items()))
        if now - read_at <= PLAN_IDLE_SECONDS:
            return "other", "other"
        del _plans[oldest]
        metrics.PLAN_TOKENS.remove(*oldest)
    _plans[labels] = now
    _plans.move_to_end(labels)
    return labels
