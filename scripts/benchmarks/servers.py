"""Start servers for an axis, ours and the peers', on free ports; ask them, count, end them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import psutil

from scripts.processes import HOST, ROOT, claim_port, is_ready, running


class Address(NamedTuple):
    """Say where a peer listens, in the words of its kind, who works for it, and the size of its corpus."""

    at: str
    pids: list[int]
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server of ours.

    Args:
        url: `http://127.0.0.1:PORT`, `https://127.0.0.1:PORT` or `uds:///PATH`.
        port: on loopback; 0 on a Unix-domain socket.
        pids: its processes: the one that was started, which may be a supervisor, then its workers.
    """

    url: str
    port: int
    pids: list[int]


@contextmanager
def serving(
    corpora: Mapping[str, Path | str],
    *,
    uds: Path | None = None,
    arguments: Sequence[str] = (),
    tree: Path = ROOT,
    certificate: Path | None = None,
) -> Iterator[Server]:
    """Serve corpora from another process until the block ends.

    Args:
        corpora: path, or URL of a store, by name.
        uds: listen on this Unix-domain socket instead of a port.
        arguments: more of the command line.
        tree: the checkout whose server runs.
        certificate: PEM file of certificate and key; serve by https. See `trusted_certificate`.
    """
    port = 0 if uds else claim_port()
    url = f"uds://{quote(str(uds))}" if uds else f"http{'s' if certificate else ''}://{HOST}:{port}"
    with tempfile.TemporaryDirectory(prefix="bench-state-") as state_dir:
        command = [sys.executable, "-m", "corpus_server", "serve"]
        command += [f"{name}={path}" for name, path in corpora.items()]
        command += ["--uds", str(uds)] if uds else ["--port", str(port)]
        command += ["--state-dir", state_dir, "--log-level", "warning"]
        if tree == ROOT:  # a server of another commit may not know it
            command += ["--drain-seconds", "0"]  # nobody has to be told to ask another server
        if certificate:
            command += ["--tls-certificate", str(certificate), "--tls-key", str(certificate)]
        command += arguments
        with running(command, ready=partial(is_ready, url), tree=tree) as process:
            workers = psutil.Process(process.pid).children(recursive=True)
            yield Server(url=url, port=port, pids=[process.pid, *(worker.pid for worker in workers)])


def own_servers() -> list[int]:
    """Return the processes of the servers that loaders of this process started for paths."""
    children = psutil.Process().children(recursive=True)
    return [each.pid for each in children if "--while-locked" in each.cmdline()]


@contextmanager
def trusted_certificate() -> Iterator[Path]:
    """Make a certificate for loopback, with its key, which this process trusts until the block ends."""
    with tempfile.TemporaryDirectory(prefix="bench-tls-") as folder:
        key, certificate = Path(folder) / "key.pem", Path(folder) / "certificate.pem"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=bench"
        command += f" -addext subjectAltName=IP:{HOST} -keyout {key} -out {certificate}"
        subprocess.run(command.split(), check=True, capture_output=True)
        both = Path(folder) / "both.pem"
        both.write_bytes(key.read_bytes() + certificate.read_bytes())
        os.environ["SSL_CERT_FILE"] = str(certificate)
        try:
            yield both
        finally:
            del os.environ["SSL_CERT_FILE"]


@contextmanager
def spawn_peer(kind: str, path: Path) -> Iterator[Address]:
    """Start the server of a peer of `scripts.benchmarks.peers` over a corpus."""
    with tempfile.TemporaryDirectory() as folder:
        address_file = Path(folder) / "address"
        command = [sys.executable, "-m", "scripts.benchmarks.peers", kind, str(path), str(address_file)]
        with running(command, ready=address_file.exists) as process:
            yield Address(address_file.read_text(), [process.pid], path.stat().st_size // 2)


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Yield a git worktree of a commit in a temporary folder; remove it afterwards.

    Raises:
        SystemExit: git does not know the commit.
    """

    def git(*arguments: str) -> None:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")

    with tempfile.TemporaryDirectory(prefix="bench-before-") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", "--force", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))
