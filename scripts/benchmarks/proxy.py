"""nginx with the shipped configuration, in front of servers of the bench or of tests."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from scripts.processes import HOST, ROOT, claim_port, is_ready, running

CONFIGURATION = ROOT / "docker" / "nginx.conf"


def find_nginx() -> str | None:
    """Where nginx is; distributions keep it out of a user's PATH."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def render(replicas: Sequence[int], port: int) -> str:
    """The shipped file with these ports for its replicas, another port, and nothing else changed.

    Raises:
        ValueError: it has other replicas, or does not listen where it is looked for.
    """
    text, num_listens = re.subn(r"\blisten 8080;", f"listen {HOST}:{port};", CONFIGURATION.read_text())
    for number, replica in enumerate(replicas, start=1):
        text = text.replace(f"server-{number}:8000", f"{HOST}:{replica}")
    others = re.findall(r"\bserver-\d+:\d+", text)
    if num_listens != 1 or others:
        raise ValueError(
            f"{CONFIGURATION} must have the replicas server-1 to server-{len(replicas)}, all of port 8000, "
            f"and listen once on 8080, found {num_listens} such lines and the replicas {others}"
        )
    return text


@contextmanager
def caching_proxy(nginx: str, replicas: Sequence[int], *, log: Path | None = None) -> Iterator[int]:
    """Run it over the servers on these ports, with an empty cache; yield its port.

    Args:
        nginx: from `find_nginx`.
        log: as of `running`.
    """
    port = claim_port()
    with tempfile.TemporaryDirectory(prefix="corpus-proxy-") as folder:
        # Started by root, nginx's workers run as another user.
        Path(folder).chmod(0o755)
        configuration = Path(folder) / "nginx.conf"
        configuration.write_text(render(replicas, port))
        command = [nginx, "-p", folder, "-c", str(configuration), "-e", "stderr", "-g", "daemon off;"]
        with running(command, ready=partial(is_ready, f"http://{HOST}:{port}"), log=log):
            yield port
