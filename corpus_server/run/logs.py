"""The log of a process: how a record of the standard library becomes a line.

The layers log with `logging`; fields come in `extra`. A line is text for people, or one JSON object. Unless
the level is debug, no line holds a stack trace: it would show paths of the host.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final

from corpus_server.errors import printable
from corpus_server.settings import Settings

_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  # compared with the names of code
_NO_FIELDS: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""Attributes that every record has, or gets from other formatters."""

_COLORS: Final = {"debug": 32, "info": 32, "warning": 33, "error": 31, "critical": 31}
"""By level, as terminals number them (ECMA-48): green, yellow, red."""


def log_to_stderr(settings: Settings) -> None:
    """Set up logging for this process."""
    on_terminal = sys.stderr.isatty()
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not on_terminal)
    handler = logging.StreamHandler()
    handler.setFormatter(
        _Lines(as_json=as_json, has_color=on_terminal, shows_traces=settings.log_level == "debug")
    )
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    # They log each attempt, with addresses; uvicorn each request that it cannot read, as our own lines do.
    for name in ("urllib3", "opentelemetry", "uvicorn"):
        logging.getLogger(name).setLevel(logging.ERROR)


class _Lines(logging.Formatter):
    """One line a record."""

    def __init__(self, *, as_json: bool, has_color: bool, shows_traces: bool) -> None:
        super().__init__()
        self._as_json, self._has_color, self._shows_traces = as_json, has_color, shows_traces

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and behind it the stack trace if traces are shown."""
        fields: dict[str, Any] = {key: each for key, each in vars(record).items() if key not in _NO_FIELDS}
        trace = ""
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if self._shows_traces:
                trace = "".join(traceback.format_exception(error)).rstrip()
            else:
                fields |= {"unexpected": type(error).__name__, "at": _place(error.__traceback__)}
        # Names of files may hold line ends or terminal commands.
        fields = {key: printable(each) if isinstance(each, str) else each for key, each in fields.items()}
        event, level = printable(record.getMessage()), record.levelname.lower()
        # Text is for people, whose terminals have 80 columns.
        unit = "microseconds" if self._as_json else "seconds"
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec=unit).replace("+00:00", "Z")
        if self._as_json:
            fields |= {"exception": trace} if trace else {}
            return json.dumps({**fields, "event": event, "level": level, "timestamp": when}, default=repr)
        shown = f"[{level}]"
        if self._has_color:
            shown = f"\x1b[{_COLORS.get(level, 0)}m{shown}\x1b[0m"
        line = " ".join([when, shown, event, *(f"{key}={_spelled(each)}" for key, each in fields.items())])
        return f"{line}\n{trace}" if trace else line


def _spelled(value: Any) -> str:
    """Return a field's value; in quotes if it is a text that would not end at the next space."""
    return repr(value) if not isinstance(value, str) or " " in value or "=" in value else value


def _place(trace: TracebackType | None) -> str:
    """Return where an error came from: `read/gather.py:88`."""
    frames = traceback.extract_tb(trace)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    if not ours:
        return "unknown"
    return f"{os.path.relpath(ours[-1].filename, _PACKAGE)}:{ours[-1].lineno}"
