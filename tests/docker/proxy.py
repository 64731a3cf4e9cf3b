"""The proxies with their shipped configurations, in front of servers of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.benchmarks.proxy import NGINX, Proxy
from tests.serving import RunningServer


class RunningProxy(RunningServer):
    """A proxy on a port of loopback, from entering to leaving; asked like a server.

    Args:
        proxy: which one.
        changes: of its file, such as shorter time-outs.
    """

    def __init__(
        self,
        replicas: Sequence[RunningServer],
        folder: Path,
        proxy: Proxy = NGINX,
        changes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({}, folder)
        self._ports = [replica.port for replica in replicas]
        self.proxy = proxy
        self._changes = changes
        self._running = ExitStack()

    def start(self) -> None:
        """Start, and wait until a replica is ready behind it."""
        running = self.proxy.running(self._ports, log=self._log_path, changes=self._changes)
        self.port = self._running.enter_context(running)

    def kill(self) -> None:
        """End it: SIGTERM is the fast way out of both, in which their workers go too."""
        self._running.close()
