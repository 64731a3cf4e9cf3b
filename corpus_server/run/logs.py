"""The log of a process: standard library's records, written by structlog.

The layers log with `logging`; fields come in `extra`. This module decides how a line looks: text for people,
or one JSON object. Unless the level is debug, no line holds a stack trace: it would show paths of the host.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from types import TracebackType

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from corpus_server.errors import printable
from corpus_server.settings import Settings

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  # compared with the names of code


def log_to_stderr(settings: Settings) -> None:
    """Set up logging for this process."""
    on_terminal = sys.stderr.isatty()
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not on_terminal)
    about: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info if settings.log_level == "debug" else _without_trace,
    ]
    last: Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(
            colors=on_terminal, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=about,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _escape, last],
        )
    )
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    for name in ("urllib3", "opentelemetry"):  # they log each attempt, with addresses
        logging.getLogger(name).setLevel(logging.ERROR)


def _without_trace(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Replace the stack trace of an error by its type and the last place of this package."""
    found = event.pop("exc_info", None)
    event.pop("stack_info", None)
    error = sys.exc_info()[1] if found is True else found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
        event["unexpected"] = type(error).__name__
        event["at"] = _place(error.__traceback__)
    return event


def _escape(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Escape what cannot be printed: names of files may hold line ends or terminal commands."""
    return {
        key: printable(value) if isinstance(value, str) and key != "exception" else value
        for key, value in event.items()
    }


def _place(trace: TracebackType | None) -> str:
    """Return where an error came from: `read/gather.py:88`."""
    frames = traceback.extract_tb(trace)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    if not ours:
        return "unknown"
    return f"{os.path.relpath(ours[-1].filename, _PACKAGE)}:{ours[-1].lineno}"
