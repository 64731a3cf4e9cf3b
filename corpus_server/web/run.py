"""Run the application under uvicorn: one process, or several over one page cache."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from corpus_server.errors import InvalidParameter
from corpus_server.settings import Settings
from corpus_server.web.listening import BACKLOG, listening, url

_WORKER_HEALTH_SECONDS = 60
"""uvicorn kills a worker that does not answer its supervisor for so long; a slow disk is no reason."""


def run(settings: Settings, *, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT.

    The corpora should have been opened once before, so that a mistake is one line and no worker.

    Raises:
        InvalidParameter: nothing can listen there, or the state folder cannot be written.
    """
    # uvicorn raises the signal that ended it once more: by default it would kill this process
    # before the metrics folder is removed, and with an exit code that looks like a failure.
    signal.signal(signal.SIGTERM, _exit)
    with listening(settings) as sockets, _metrics_folder(settings):
        # Imported here: prometheus-client reads its folder from the environment at import.
        from corpus_server.web.app import SETTINGS_VARIABLE

        os.environ[SETTINGS_VARIABLE] = settings.to_json()
        config = uvicorn.Config(
            "corpus_server.web.app:create_app_from_environment",
            factory=True,
            workers=settings.workers,
            loop="uvloop",
            http="corpus_server.web.protocol:CorpusProtocol",
            ws="none",
            backlog=BACKLOG,
            log_level=log_level,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here looks at who asks
            timeout_keep_alive=settings.keep_alive_seconds,
            timeout_graceful_shutdown=30,
            timeout_worker_healthcheck=_WORKER_HEALTH_SECONDS,
        )
        # By uvicorn's logger, which is set up by now and names only one of several addresses itself.
        log = logging.getLogger("uvicorn.error")
        log.info("Uvicorn running on %s (Press CTRL+C to quit)", " and ".join(map(url, sockets)))
        with contextlib.suppress(KeyboardInterrupt):
            _serve(config, sockets)


def _serve(config: uvicorn.Config, sockets: list[socket.socket]) -> None:
    if config.workers > 1:
        Multiprocess(config, sockets=sockets).run()
        return
    server = uvicorn.Server(config)
    server.run(sockets=sockets)
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


@contextmanager
def _metrics_folder(settings: Settings) -> Iterator[None]:
    """Give the workers a folder for shared metrics, named for this process, and remove it after.

    A killed server leaves its folder behind; the next one to start here removes it.
    """
    parent = settings.state_dir / "metrics"
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameter(
            f"state_dir {settings.state_dir} cannot be written: {error}; give another with --state-dir",
            parameter="state_dir",
        ) from error
    for old in parent.iterdir():
        if old.name.isdigit() and not Path(f"/proc/{old.name}").exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = parent / str(os.getpid())
    folder.mkdir(exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]
        shutil.rmtree(folder, ignore_errors=True)
