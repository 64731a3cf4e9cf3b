"""The proxies with their shipped configurations, in front of servers of tests and of the bench."""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from scripts.processes import HOST, ROOT, claim_port, is_ready, running
from tests.serving import RunningServer


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy whose configuration the project ships.

    Args:
        name: of its program.
        configuration: the file.
        listen: the text that says where it listens, with `{at}` for the place.
        shipped_at: that place, as shipped.
        options: of the command line, with `{folder}` and `{file}`.
    """

    name: str
    configuration: Path
    listen: str
    shipped_at: str
    options: str

    def find(self) -> str | None:
        """Return where the program is, or None; distributions keep it out of a user's PATH."""
        return shutil.which(self.name) or shutil.which(self.name, path="/usr/sbin:/usr/local/sbin")

    def render(self, replicas: Sequence[int], port: int, changes: Mapping[str, str] | None = None) -> str:
        """Return the shipped file with other ports for its replicas and itself.

        Args:
            changes: other texts that are there once, such as a time-out, and what to put in their place.

        Raises:
            ValueError: it has other replicas, or a text is not there once.
        """
        text = self.configuration.read_text()
        listens = {self.listen.format(at=self.shipped_at): self.listen.format(at=f"{HOST}:{port}")}
        for before, after in {**listens, **(changes or {})}.items():
            if text.count(before) != 1:
                found = f"found it {text.count(before)} times"
                raise ValueError(f"{self.configuration} must say {before!r} once, {found}")
            text = text.replace(before, after)
        for number, replica in enumerate(replicas, start=1):
            text = text.replace(f"server-{number}:8000", f"{HOST}:{replica}")
        if others := re.findall(r"\bserver-\d+:\d+", text):
            wanted = f"the replicas server-1 to server-{len(replicas)}, all of port 8000"
            raise ValueError(f"{self.configuration} must have {wanted}; found {others}, too")
        return text

    @contextmanager
    def running(
        self,
        replicas: Sequence[int],
        *,
        log: Path | None = None,
        changes: Mapping[str, str] | None = None,
    ) -> Iterator[int]:
        """Run it over the servers on these ports, with an empty cache; yield its port.

        Args:
            log: as of `scripts.processes.running`.
            changes: see `render`.
        """
        program, port = self.find(), claim_port()
        assert program is not None, f"{self.name} is not installed"
        with tempfile.TemporaryDirectory(prefix="corpus-proxy-") as folder:
            # Started by root, nginx's workers run as another user.
            Path(folder).chmod(0o755)
            file = Path(folder) / self.configuration.name
            file.write_text(self.render(replicas, port, changes))
            command = [program, *self.options.format(folder=folder, file=file).split("|")]
            ready = partial(is_ready, f"http://{HOST}:{port}") if replicas else partial(_listens, port)
            with running(command, ready=ready, log=log):
                yield port

    @contextmanager
    def before_store(self, url: str) -> Iterator[str]:
        """Run a cache in front of the store at a URL of http; yield the URL of the cache."""
        changes = {"set $store s3.us-east-1.amazonaws.com;": f"set $store {urlsplit(url).netloc};"}
        with self.running((), changes={**changes, "proxy_pass https://": "proxy_pass http://"}) as port:
            yield f"http://{HOST}:{port}"


NGINX = Proxy(
    "nginx",
    ROOT / "docker" / "nginx.conf",
    "listen {at};",
    "8080",
    "-p|{folder}|-c|{file}|-e|stderr|-g|daemon off;",
)
STORE_CACHE = replace(NGINX, configuration=ROOT / "docker" / "store-cache.conf", shipped_at="9000")
HAPROXY = Proxy("haproxy", ROOT / "docker" / "haproxy.cfg", "bind {at}", ":8080", "-db|-f|{file}")


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex((HOST, port)) == 0


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
