"""TLS and mutual TLS, with certificates made for the test."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_client import ArrayLoader, Network
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer, ask

BATCH = "/v1/batches?corpus=web&seq_len=16&batch_size=8&step=3"


def openssl(command: str) -> None:
    subprocess.run(["openssl", *command.split()], check=True, capture_output=True)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.certificate, self._key = folder, folder / "authority.pem", folder / "authority.key"
        new = "req -x509 -newkey rsa:2048 -nodes -subj /CN=authority -days 2"
        openssl(f"{new} -keyout {self._key} -out {self.certificate}")

    def issue(self, name: str) -> tuple[Path, Path]:
        """Return certificate and key for loopback."""
        certificate, key, request = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        openssl(f"req -newkey rsa:2048 -nodes -keyout {key} -out {request} -subj /CN={name}")
        (self._folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        signed_by = f"-CA {self.certificate} -CAkey {self._key} -CAcreateserial -days 2"
        openssl(f"x509 -req -in {request} -out {certificate} {signed_by} -extfile {self._folder / 'names'}")
        return certificate, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@contextlib.contextmanager
def serving(authority: Authority, folder: Path, *arguments: object) -> Iterator[RunningServer]:
    """Run a server with TLS; readiness is asked on a Unix socket beside it."""
    corpus = write_raw(folder / "web.bin", some_tokens(50_000))
    certificate, key = authority.issue("server")
    options = ["--host", "127.0.0.1", "--port", "0", "--tls-certificate", certificate, "--tls-key", key]
    options = [str(each) for each in (*options, *arguments)]
    with RunningServer({"web": corpus}, folder, uds=folder / "socket", arguments=options) as server:
        yield server


def port(server: RunningServer) -> int:
    """Return the port of the TCP socket, which the log names."""
    (line,) = [line for line in server.log().splitlines() if "running on https://127.0.0.1:" in line]
    return int(line.partition("https://127.0.0.1:")[2].split()[0])


def connect(server: RunningServer, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", port(server), timeout=20, context=context)


def test_the_same_bytes_come_under_tls(authority: Authority, tmp_path: Path) -> None:
    with serving(authority, tmp_path) as server:
        expected = server.get(BATCH).body
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with contextlib.closing(connect(server, context)) as connection:
            for _ in range(5):
                response = ask(connection, BATCH)
                assert (response.status, response.body) == (200, expected)
        plain = http.client.HTTPConnection("127.0.0.1", port(server), timeout=20)
        with contextlib.closing(plain), pytest.raises((http.client.HTTPException, ConnectionError)):
            ask(plain, BATCH)
        url = f"https://127.0.0.1:{port(server)}"
        options = {"corpus": "web", "seq_len": 16, "global_batch_size": 8, "num_steps": 4}
        with ArrayLoader(url, **options, network=Network(ca_file=authority.certificate)) as loader:
            rows = [np.array(batch.inputs) for batch in loader]
        assert np.array_equal(rows[3], np.frombuffer(expected, "<u2").reshape(8, 17)[:, :-1])
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("path", ["batches?corpus=web&seq_len=16&batch_size=8", "corpora/web/tokens?count=0"])
def test_a_client_that_leaves_within_a_response_is_noticed(
    authority: Authority, tmp_path: Path, path: str
) -> None:
    """Catalogue row 42: what was not sent is not counted, and the request ends."""
    large = path.replace("=16&batch_size=8", "=1024&batch_size=4096&step=3").replace("count=0", "count=50000")
    target = f"/v1/{large}" + ("" if "batches" in path else "&format=json")
    with serving(authority, tmp_path) as server:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        connection = connect(server, context)
        connection.request("GET", target)
        connection.sock.recv(600)
        connection.sock.close()
        connection.close()
        server.wait_until_idle()
        metrics = server.get("/metrics").body.decode()
        (line,) = [each for each in metrics.splitlines() if "sent_bytes_total" in each and path[:5] in each]
        assert float(line.rsplit(" ", 1)[1]) < 5 * 2**20
        assert "unexpected=" not in server.log()


def test_connections_that_ended_are_counted_no_longer(authority: Authority, tmp_path: Path) -> None:
    """A TLS connection does not know its peer any more when it is lost."""
    with serving(authority, tmp_path, "--max-connections-per-address", 2) as server:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        statuses = []
        deadline = time.monotonic() + 20
        while statuses.count(200) < 6 and time.monotonic() < deadline:
            with contextlib.closing(connect(server, context)) as connection:
                statuses.append(ask(connection, BATCH).status)
            time.sleep(0.05)
        assert statuses.count(200) == 6


def test_a_client_without_a_certificate_is_not_served(authority: Authority, tmp_path: Path) -> None:
    with serving(authority, tmp_path, "--tls-client-ca", authority.certificate) as server:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with (
            contextlib.closing(connect(server, context)) as connection,
            pytest.raises((ssl.SSLError, http.client.HTTPException, ConnectionError)),
        ):
            ask(connection, BATCH)
        certificate, key = authority.issue("client")
        options = {"corpus": "web", "seq_len": 16, "global_batch_size": 8, "num_steps": 4}
        network = Network(ca_file=authority.certificate, cert_file=certificate, key_file=key)
        with ArrayLoader(f"https://127.0.0.1:{port(server)}", **options, network=network) as loader:
            assert len(list(loader)) == 4
