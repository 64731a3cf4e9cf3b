"""The log of errors that are the server's own: what a client is told of them is in `problem.py`."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Final

from pydantic import ValidationError

from corpus_server.admission.request import RequestHead
from corpus_server.errors import CorpusServerError
from corpus_server.work import ClientLeft

SAID_SECONDS: Final = 10.0
MAX_KINDS: Final = 256
"""Of lines that are counted; then all are said anew."""

_log = logging.getLogger("corpus_server")


class _Said:
    """Refusals of one kind about a corpus in the log: a line in `SAID_SECONDS`, and a count of the others."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}  # when it was said, how often not since
        self._lock = threading.Lock()

    def error(self, error: CorpusServerError) -> None:
        """Log a refusal that is the server's own fault, or count it."""
        kind, now = (error.slug, error.detail.partition(": ")[0]), time.monotonic()
        with self._lock:
            said, left_out = self._kinds.get(kind, (-math.inf, 0))
            is_due = now - said >= SAID_SECONDS
            if len(self._kinds) >= MAX_KINDS and kind not in self._kinds:
                self._kinds.clear()
            self._kinds[kind] = (now, 0) if is_due else (said, left_out + 1)
        if is_due:
            more = f" ({left_out} more such requests since the last line)" if left_out else ""
            _log.error("%s: %s%s", error.slug, error.detail, more)


_said: Final = _Said()


def log_error(error: Exception, request: RequestHead | None = None) -> None:
    """Log an error that is the server's own; being busy is none, and staging logs its own."""
    if isinstance(error.__cause__, CorpusServerError | ClientLeft):
        error = error.__cause__  # the framework's own error, where a response had begun
    if not isinstance(error, CorpusServerError | ValidationError | ClientLeft):
        what = "a request" if request is None else request.path.decode("latin-1")
        _log.error("%s failed", what, exc_info=error)
    elif isinstance(error, CorpusServerError) and error.status >= 500 and error.retry_after_seconds is None:
        _said.error(error)
