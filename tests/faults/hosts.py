"""Hosts in network namespaces, each with an address of its own on one bridge; links can be cut and healed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.processes import running

NETWORK = "10.77.0"


def why_not() -> str | None:
    """Return why no network namespace can be made here, or None."""
    name = f"probe-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"ip (package iproute2): {error}"
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


class Hosts:
    """Some hosts on one bridge, which is a namespace, too; this machine's own network is not touched."""

    def __init__(self, count: int) -> None:
        self._prefix = f"soak{os.getpid()}"
        self._names = [self._name(number) for number in range(count)]

    def _name(self, number: int | str) -> str:
        return f"{self._prefix}-{number}"

    def address(self, number: int) -> str:
        """Return the address of a host."""
        return f"{NETWORK}.{number + 1}"

    def command(self, number: int, words: Sequence[str]) -> list[str]:
        """Return a command that runs on this host."""
        return ["ip", "netns", "exec", self._names[number], *words]

    def link(self, number: int, state: str) -> None:
        """Cut a host off (`down`) or heal its link (`up`): packets vanish, nothing is refused."""
        _ip("-n", self._name("net"), "link", "set", f"host{number}", state)

    def __enter__(self) -> Hosts:
        net = self._name("net")
        _ip("netns", "add", net)
        try:
            _ip("-n", net, "link", "add", "bridge", "type", "bridge")
            _ip("-n", net, "link", "set", "bridge", "up")
            for number, name in enumerate(self._names):
                _ip("netns", "add", name)
                pair = ("type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("-n", net, "link", "add", f"host{number}", *pair)
                _ip("-n", net, "link", "set", f"host{number}", "master", "bridge", "up")
                _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self._name("net")):
            with contextlib.suppress(subprocess.CalledProcessError):  # it may not have been made
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def server_on(hosts: Hosts, number: int, path: Path, folder: Path) -> Iterator[str]:
    """Run a replica on a host; yield its URL."""
    folder.mkdir()
    address = hosts.address(number)
    words = [sys.executable, "-m", "corpus_server", "serve", f"web={path}", "--host", address]
    words += ["--port", "8000", "--allow-anyone", "--state-dir", str(folder)]
    log = folder / "log"
    with running(hosts.command(number, words), ready=lambda: " is ready" in _text(log), log=log):
        yield f"http://{address}:8000"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
