"""The addresses of servers, and what requests call them."""

from __future__ import annotations

import pytest

from corpus_client.network.endpoint import Endpoint


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
