"""The same batches over https: who is trusted, who is refused by name, and a client with a certificate."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from corpus_client import CorpusLoader, Network, errors
from corpus_client.network import control
from corpus_client.network.replicas import Replicas
from tests.client.conftest import PATIENT, assert_close_wakes
from tests.client.network.test_replicas import assert_exact
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import Fault, ReferenceServer

MakeLoader = Callable[..., CorpusLoader]


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A certificate for 127.0.0.1 that this process trusts."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("no openssl command to make a certificate with")
    pem = tmp_path / "localhost.pem"
    command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=corpus"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {pem} -out {tmp_path / 'cert'}"
    subprocess.run(command.split(), check=True, capture_output=True)
    pem.write_bytes(pem.read_bytes() + (tmp_path / "cert").read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context


def test_https_serves_the_same_batches_and_closes_while_blocked(
    tls: ssl.SSLContext, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    with ReferenceServer([corpus], tls=tls) as server:
        loader = make_loader(server.url, prefetch_bytes=1 << 13)
        assert server.url.startswith("https:")
        assert_exact(loader, corpus, 20)
        loader.close()
        assert_close_wakes(make_loader(server.url, **PATIENT), server)


def test_untrusted_certificate_is_not_spoken_to(
    tls: ssl.SSLContext, corpus: ReferenceCorpus, make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with (
        ReferenceServer([corpus], tls=tls) as server,
        pytest.raises(errors.CertificateRefused, match=f"{server.url}: .*CERTIFICATE_VERIFY_FAILED"),
    ):
        make_loader(server.url)


def test_a_certificate_for_another_name_is_refused(
    tls: ssl.SSLContext, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    """The certificate is for 127.0.0.1 and not for localhost; it retried in silence for 300 s."""
    with ReferenceServer([corpus], tls=tls) as server:
        started = time.monotonic()
        with pytest.raises(errors.CertificateRefused, match="Hostname mismatch"):
            make_loader(server.url.replace("127.0.0.1", "localhost"), deadline_seconds=300)
        assert time.monotonic() - started < 100


def test_a_server_without_tls_is_no_server_of_https(
    server: ReferenceServer, make_loader: MakeLoader, tls: ssl.SSLContext
) -> None:
    with pytest.raises(errors.ReplicaUnusable, match="does not speak TLS; does its URL begin with http://"):
        make_loader(server.url.replace("http:", "https:"), deadline_seconds=300)


def test_an_authority_of_ones_own_is_trusted_by_its_file(
    tls: ssl.SSLContext, corpus: ReferenceCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(ca_file=os.environ["SSL_CERT_FILE"])
    monkeypatch.delenv("SSL_CERT_FILE")
    with ReferenceServer([corpus], tls=tls) as server, Replicas([server.url], network) as replicas:
        assert replicas.ask(control.get("/v1/corpora"))


def test_a_replica_that_falls_silent_is_left_over_tls_too(
    tls: ssl.SSLContext, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    """Records of TLS that are no response make a socket readable, too."""
    with ReferenceServer([corpus], tls=tls) as one, ReferenceServer([corpus], tls=tls) as two:
        loader = make_loader([one.url, two.url], prefetch_bytes=1 << 13, **PATIENT)
        assert_exact(loader, corpus, 40)
        one.next_fault = lambda: Fault("hole")
        started = time.monotonic()
        assert_exact(loader, corpus, 40)
        assert time.monotonic() - started < 40, "the hole ends after 60 s"


@pytest.fixture
def own_certificate(tls: ssl.SSLContext) -> Path:
    """What the server asks clients for: the only certificate in use here, with its key."""
    trusted = Path(os.environ["SSL_CERT_FILE"])
    tls.load_verify_locations(trusted)
    tls.verify_mode = ssl.CERT_REQUIRED
    return trusted.with_name("localhost.pem")


def test_a_server_that_asks_for_a_certificate_gets_it(
    tls: ssl.SSLContext, own_certificate: Path, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    with ReferenceServer([corpus], tls=tls) as server:
        assert_exact(make_loader(server.url, cert_file=own_certificate), corpus, 20)


@pytest.mark.usefixtures("own_certificate")
def test_a_client_without_the_certificate_is_told_so_at_once(
    tls: ssl.SSLContext, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    with ReferenceServer([corpus], tls=tls) as server:
        started = time.monotonic()
        with pytest.raises(errors.CertificateRefused, match=f"{server.url}: .*CERTIFICATE_REQUIRED"):
            make_loader(server.url, deadline_seconds=300)
        assert time.monotonic() - started < 100
