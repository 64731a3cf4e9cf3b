"""The addresses of servers, and what requests and messages call them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from corpus_client import errors
from corpus_client.network import endpoint
from corpus_client.network.endpoint import Endpoint

FORMS = "url must be http://host:port, https://host:port or uds:///path/of.sock, got"
UNIX_FORM = "url must be uds:///absolute/path.sock, with three slashes and %3F for ?, got"


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://data", "data"),
        ("http://data:80", "data"),
        ("http://data:443", "data:443"),
        ("https://data", "data"),
        ("https://data:443", "data"),
        ("https://data:444", "data:444"),
        ("https://data:80", "data:80"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_host_names_the_port_unless_it_is_the_usual_one(url: str, authority: str) -> None:
    """A proxy chooses among its sites by this text."""
    assert Endpoint.parse(url).authority == authority


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://data", Endpoint(url="http://data", host="data", port=80, prefix="", tls=None)),
        ("HTTP://Data:81/a/", Endpoint(url="HTTP://Data:81/a", host="data", port=81, prefix="/a", tls=None)),
        (
            "http://10.0.0.7:0/",
            Endpoint(
                url="http://10.0.0.7:0",
                host="10.0.0.7",
                port=0,
                prefix="",
                tls=None,
                address=(socket.AF_INET, ("10.0.0.7", 0)),
            ),
        ),
        (
            "http://[::1]:8000",
            Endpoint(
                url="http://[::1]:8000",
                host="::1",
                port=8000,
                prefix="",
                tls=None,
                address=(socket.AF_INET6, ("::1", 8000, 0, 0)),
            ),
        ),
        (
            "http://data:8000//",
            Endpoint(url="http://data:8000", host="data", port=8000, prefix="", tls=None),
        ),
        (
            "uds:///run/a.sock/",
            Endpoint(
                url="uds:///run/a.sock",
                host="localhost",
                port=80,
                prefix="",
                tls=None,
                address=(socket.AF_UNIX, "/run/a.sock"),
            ),
        ),
    ],
    ids=["name", "capitals", "IPv4", "IPv6", "slashes", "unix"],
)
def test_a_url_is_read_once(url: str, expected: Endpoint) -> None:
    assert Endpoint.parse(url) == expected


@pytest.mark.parametrize(("url", "port"), [("https://data/a/b/", 443), ("https://data:80/a/b", 80)])
def test_a_url_of_https_needs_certificates(url: str, port: int) -> None:
    found = Endpoint.parse(url)
    assert (found.host, found.port, found.prefix) == ("data", port, "/a/b")
    assert found.tls is not None


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("uds:///run/corpus.sock", "/run/corpus.sock"),
        ("uds:///run/corpus.sock/", "/run/corpus.sock"),
        ("UDS:///run/a%20b%3F%23%25.sock", "/run/a b?#%.sock"),
        ("uds:///run/a b.sock", "/run/a b.sock"),
        ("uds:///run/gr%C3%B6\u00dfer", "/run/gr\u00f6\u00dfer"),
        ("uds:///" + "x" * 106, "/" + "x" * 106),
    ],
)
def test_a_unix_socket_has_the_path_of_its_url(url: str, path: str) -> None:
    found = Endpoint.parse(url)
    assert found.url == url.rstrip("/")
    assert found.address == (socket.AF_UNIX, path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "http://data:port",
            f"{FORMS} 'http://data:port': Port could not be cast to integer value as 'port'",
        ),
        ("http://data:99999", f"{FORMS} 'http://data:99999': Port out of range 0-65535"),
        ("", f"{FORMS} ''"),
        ("ftp://data", f"{FORMS} 'ftp://data'"),
        ("unix:///run/corpus.sock", f"{FORMS} 'unix:///run/corpus.sock'"),
        ("http://", f"{FORMS} 'http://'"),
        ("http://data?a", f"{FORMS} 'http://data?a'"),
        ("http://data#a", f"{FORMS} 'http://data#a'"),
        ("http://u:p@data", "url must not hold a password; pass a token with auth="),
        ("https://@data", "url must not hold a password; pass a token with auth="),
        ("http://data/a b", "url must be percent-encoded ASCII, got 'http://data/a b'"),
        ("uds://run/corpus.sock", f"{UNIX_FORM} 'uds://run/corpus.sock'"),
        ("uds:/run/corpus.sock", f"{UNIX_FORM} 'uds:/run/corpus.sock'"),
        ("uds:corpus.sock", f"{UNIX_FORM} 'uds:corpus.sock'"),
        ("uds://", f"{UNIX_FORM} 'uds://'"),
        ("uds:///", f"{UNIX_FORM} 'uds:///'"),
        ("uds:///a?b", f"{UNIX_FORM} 'uds:///a?b'"),
        ("uds:///a#b", f"{UNIX_FORM} 'uds:///a#b'"),
        ("uds:///a%00b", f"{UNIX_FORM} 'uds:///a%00b'"),
        (
            "uds:///" + "x" * 107,
            "url must name a socket by at most 107 bytes, which is all that the system takes, got 108: /"
            + "x" * 107,
        ),
        (
            "uds:///" + "%C3%9F" * 54,
            "url must name a socket by at most 107 bytes, which is all that the system takes, got 109: /"
            + "\u00df" * 54,
        ),
    ],
    ids=lambda value: value[:16],
)
def test_a_wrong_url_is_refused_with_what_is_wrong(url: str, message: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        Endpoint.parse(url)
    assert str(caught.value) == message


@pytest.fixture
def name_service(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str] | Exception], None]:
    """Set what the name service answers from now on."""
    monkeypatch.setattr(endpoint, "_last_found", {})

    def response(addresses: list[str] | Exception) -> None:
        def look_up(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
            assert (host, port) == ("data", 81)
            if isinstance(addresses, Exception):
                raise addresses
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return response


UNKNOWN = socket.gaierror(socket.EAI_NONAME, "not known")
SILENT = socket.gaierror(socket.EAI_AGAIN, "try again")
UNFIT = UnicodeError("label too long")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            UNKNOWN,
            errors.HostNotFound,
            f"http://data:81: no host is named 'data' ({UNKNOWN}); is the URL right, and does this machine's "
            "name service know the host?",
        ),
        (
            UNFIT,
            errors.HostNotFound,
            "http://data:81: no host is named 'data' (label too long); is the URL right, and does this "
            "machine's name service know the host?",
        ),
        (
            SILENT,
            errors.ConnectionFailed,
            f"http://data:81: the name 'data' cannot be looked up: {SILENT}",
        ),
    ],
    ids=["unknown", "unfit", "silent"],
)
def test_a_name_has_its_last_addresses_where_the_name_service_fails(
    error: Exception,
    kind: type[Exception],
    message: str,
    name_service: Callable[[list[str] | Exception], None],
) -> None:
    name_service(error)
    named = Endpoint.parse("http://data:81")
    assert named.address is None
    with pytest.raises(kind) as caught:
        named.resolve()
    assert str(caught.value) == message
    addresses = ["10.0.0.7", "10.0.0.8"]
    found = [replace(named, address=(socket.AF_INET, (each, 81))) for each in addresses]
    name_service(addresses)
    assert named.resolve() == found
    name_service(error)
    assert named.resolve() == found
    name_service(["10.0.0.9"])
    assert named.resolve() == [replace(named, address=(socket.AF_INET, ("10.0.0.9", 81)))]
