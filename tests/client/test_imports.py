"""Imports point one way, shown in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

WEB = {"fastapi", "starlette", "uvicorn", "pydantic"}


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import corpus_client", WEB | {"torch", "numpy", "httpx"}),
        ("import corpus_client.errors", WEB | {"torch", "numpy", "httpx"}),
        ("import corpus_client.wire", WEB | {"torch", "numpy", "httpx"}),
        ("import corpus_client.transport", WEB | {"torch", "numpy", "httpx"}),
        ("import corpus_client.replicas", WEB | {"torch", "numpy"}),
        ("import corpus_client.cli", WEB | {"corpus_server", "matplotlib"}),
        ("import corpus_client.tools.timeline", WEB | {"corpus_server", "matplotlib", "torch", "numpy"}),
        ("from corpus_client import CorpusLoader, RemoteCorpus, get_batch", WEB | {"corpus_server"}),
        ("from corpus_client import CorpusIterableDataset", WEB | {"corpus_server", "torchdata"}),
    ],
)
def test_import_stays_light(statement: str, forbidden: set[str]) -> None:
    assert loaded_by(statement) & forbidden == set()


def test_the_check_can_fail() -> None:
    assert "torch" in loaded_by("from corpus_client import CorpusLoader")


def test_a_loader_imports_no_http_library_while_it_is_awaited() -> None:
    making = (
        "from corpus_client.control import ControlPlane\n"
        "from corpus_client.endpoint import Endpoint\n"
        "{}ControlPlane(Endpoint.parse('http://127.0.0.1:1')).close()"
    )
    libraries = ("http", "h11", "anyio")
    before, after = (
        {name for name in loaded_by(making.format(comment)) if name.startswith(libraries)}
        for comment in ("#", "")
    )
    assert "h11" in before
    assert after - before == set()


def test_unknown_name_is_an_attribute_error() -> None:
    import corpus_client

    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        _ = corpus_client.Loader
    assert set(corpus_client.__all__) <= set(dir(corpus_client))
