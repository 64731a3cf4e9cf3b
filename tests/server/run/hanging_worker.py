"""A template of workers with hung threads: closing the service waits for one, the interpreter for another."""

from __future__ import annotations

import threading

from corpus_server.responses.service import Service
from corpus_server.run import template, worker

begin = worker.start_tracing


def hang(*_: object) -> None:
    threading.Event().wait()


def begin_and_hang() -> None:
    threading.Thread(target=hang).start()
    begin()


if __name__ == "__main__":
    Service.close = hang  # type: ignore[method-assign]
    worker.start_tracing = begin_and_hang
    template.main()
