"""nginx with the shipped configuration, in front of servers of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.benchmarks.proxy import caching_proxy, find_nginx
from tests.serving import RunningServer


class RunningProxy(RunningServer):
    """nginx on a port of loopback, from entering to leaving; asked like a server."""

    def __init__(self, replicas: Sequence[RunningServer], folder: Path) -> None:
        super().__init__({}, folder)
        self._ports = [replica.port for replica in replicas]
        self._running = ExitStack()

    def start(self) -> None:
        """Start, and wait until a replica is ready behind it."""
        nginx = find_nginx()
        assert nginx is not None, "nginx is not installed"
        proxy = caching_proxy(nginx, self._ports, log=self._log_path)
        self.port = self._running.enter_context(proxy)

    def kill(self) -> None:
        """End it: SIGTERM is nginx's fast way out, in which its workers go too."""
        self._running.close()
