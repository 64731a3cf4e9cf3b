"""A worker with hung threads: closing the service waits for one, the interpreter for another."""

from __future__ import annotations

import threading

from corpus_server.answers.service import Service
from corpus_server.run import worker


def hang(*_: object) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    Service.close = hang  # type: ignore[method-assign]
    threading.Thread(target=hang).start()
    worker.main()
