"""Where a server listens: a port, a Unix socket or both, and what a dead server leaves there."""

from __future__ import annotations

import re
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.run.listening import listening, url
from corpus_server.settings import Settings
from tests.conftest import ServedCorpus
from tests.serving import RunningServer, command, environment

WEB = (CorpusSpec(name="web", path=Path("/data/web")),)


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a socket may lie; pytest's own folders may be too long for one."""
    with TemporaryDirectory() as folder:
        yield Path(folder) / "corpus.sock"


def start(stack: ExitStack, path: Path, corpora: dict[str, ServedCorpus], folder: Path) -> RunningServer:
    folder.mkdir()
    return stack.enter_context(RunningServer({"web": corpora["web"].path}, folder, uds=path))


def test_only_the_unix_socket_and_it_is_gone_at_exit(
    corpora: dict[str, ServedCorpus], path: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = start(stack, path, corpora, tmp_path / "a")
        assert server.get("/readyz").json()["corpora"] == ["web"]
        assert f"running on uds://{path} (" in server.log()
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        for pid in (server.pid, *server.worker_pids()):
            assert psutil.Process(pid).net_connections("inet") == []
        assert server.stop() == 0
        assert not path.exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_beside_the_unix_socket(
    corpora: dict[str, ServedCorpus], path: Path, tmp_path: Path, workers: int
) -> None:
    """Both give the same responses; SIGTERM leaves nothing behind with several workers either."""
    paths = {"web": corpora["web"].path}
    with RunningServer(paths, tmp_path, workers=workers, arguments=["--uds", str(path)]) as server:
        beside = RunningServer(paths, tmp_path, uds=path)  # to ask by; never started
        for target in ("/v1/corpora/web/tokens?start=5&count=100", "/v1/corpora", "/v1/x"):
            there, here = server.get(target), beside.get(target)
            assert (there.status, there.body) == (here.status, here.body)
        assert server.stop() == 0
        assert not path.exists()


def test_a_socket_that_a_killed_server_left_is_replaced(
    corpora: dict[str, ServedCorpus], path: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = start(stack, path, corpora, tmp_path / "a")
        server.kill()
        assert path.is_socket()
        server.start()
        assert server.get("/healthz").status == 200


def test_a_socket_that_a_server_listens_on_is_refused_and_left_alone(
    corpora: dict[str, ServedCorpus], path: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = start(stack, path, corpora, tmp_path / "a")
        second = subprocess.run(
            command("serve", corpora["web"].path, "--uds", path, "--state-dir", tmp_path / "b"),
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert second.returncode == 2
        assert f"error: uds {path}: a server listens there already; stop it or give another" in second.stderr
        assert "Traceback" not in second.stderr
        assert server.get("/healthz").status == 200


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, ("127.0.0.1", 8000)),
        ({"port": 0}, ("127.0.0.1", 0)),
        ({"host": "::1"}, ("::1", 8000)),
        ({"uds": Path("/s")}, None),
        ({"uds": Path("/s"), "port": 9}, ("127.0.0.1", 9)),
        ({"uds": Path("/s"), "host": "0.0.0.0", "allow_anyone": True}, ("0.0.0.0", 8000)),
    ],
)
def test_where_tcp_is_listened_on(given: dict[str, object], address: tuple[str, int] | None) -> None:
    assert Settings(corpora=WEB, **given).tcp_address == address  # type: ignore[arg-type]


def test_a_path_too_long_for_a_socket_is_refused_by_its_length() -> None:
    Settings(corpora=WEB, uds=Path("/" + "x" * 106))
    with pytest.raises(InvalidParameter, match=r"uds must be a path of at most 107 bytes.*got 108: /ßßß"):
        Settings(corpora=WEB, uds=Path("/" + "ß" * 53 + "x"))


def test_what_is_no_socket_is_never_removed_and_a_missing_folder_is_named(path: Path) -> None:
    path.write_text("precious")
    missing = path.parent / "none" / "a.sock"
    no_folder = rf"cannot listen on uds {re.escape(str(missing))}: No such file"
    for uds, said in ((path, r"is not a socket; remove it"), (missing, no_folder)):
        with pytest.raises(InvalidParameter, match=said), listening(Settings(corpora=WEB, uds=uds)):
            pass
    assert path.read_text() == "precious"


def test_the_socket_of_a_server_that_came_after_is_left_alone(path: Path) -> None:
    with listening(Settings(corpora=WEB, uds=path)):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.is_socket()


def test_a_name_with_several_addresses_has_one_port_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As localhost has ::1 and 127.0.0.1, of which one may be missing on a host."""

    def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        addresses = ["127.0.0.1", "127.0.0.2", "192.0.2.1"]  # the last one is nobody's
        return [(socket.AF_INET, *stream, (each, port)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with listening(Settings(corpora=WEB, host="corpus", port=0, allow_anyone=True)) as sockets:
        (first, port), second = (each.getsockname() for each in sockets)
        assert port != 0
        assert (first, second) == ("127.0.0.1", ("127.0.0.2", port))
        assert url(sockets[1]) == f"http://127.0.0.2:{port}"
