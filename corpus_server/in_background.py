"""`corpus_server.background`: a server for a test or a notebook, which ends with it."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from corpus_server.errors import CorpusServerError

_POLL_SECONDS = 0.02
_RUNNING = re.compile(r"running on (\S+)(?: and \S+)? \(Ctrl")


@contextmanager
def background(*corpora: str | os.PathLike[str], **settings: object) -> Iterator[str]:
    """Serve corpora as `corpus-server serve` does while the block runs; yield the URL for clients.

        with corpus_server.background("web=/data/web", port=0) as url:
            loader = CorpusLoader(url, corpus="web", ...)

    The server ends with this process, too, however that ends. A loader needs none of this: it takes the path
    itself.

    Args:
        corpora: as the command line takes them.
        settings: options of `serve` by name, and `config` and `splits`. Without `port` or `host` the server
            listens on a Unix socket, and without `state_dir` it forgets the plans.

    Raises:
        CorpusServerError: it does not start; the message is its own.
    """
    with tempfile.TemporaryDirectory(prefix="corpus-server-") as name:
        folder = Path(name)
        defaults: dict[str, object] = {
            "state_dir": folder / "state",
            "drain_seconds": 0,
            "log_format": "text",
        }
        if settings.keys().isdisjoint(("port", "host", "uds")):
            defaults["uds"] = folder / "socket"
        options = {**defaults, **settings, "while_locked": folder / "lock"}
        words = [
            sys.executable,
            *(
                "-P",
                "-m",
                "corpus_server",
                "serve",
                *_options(options),
                "--",
                *(os.fspath(each) for each in corpora),
            ),
        ]
        # With `-P`: from where this process imports, and not from the current folder.
        path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
        environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": path}
        with (folder / "lock").open("w") as lock, (folder / "log").open("w+") as log:
            fcntl.flock(lock, fcntl.LOCK_SH)
            server = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is meant for this process alone
            )
            try:
                yield _url(server, folder / "log")
            finally:
                server.terminate()
                server.wait()


def _options(options: dict[str, object]) -> Iterator[str]:
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield option if value else f"--no-{option[2:]}"
        elif value is not None:
            yield from (option, str(value))


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server says where it runs."""
    while True:
        ended = server.poll() is not None
        said = log.read_text(errors="replace")
        if (found := _RUNNING.search(said)) is not None:
            return found[1]
        if ended:
            lines = said.strip().splitlines() or ["the server ended without a word"]
            raise CorpusServerError(lines[-1].removeprefix("error: "))
        time.sleep(_POLL_SECONDS)
