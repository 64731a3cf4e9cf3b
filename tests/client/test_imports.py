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
        ("import corpus_client.cli", WEB | {"corpus_server"}),
        ("from corpus_client import CorpusLoader, RemoteCorpus, get_batch", WEB | {"corpus_server"}),
    ],
)
def test_import_stays_light(statement: str, forbidden: set[str]) -> None:
    assert loaded_by(statement) & forbidden == set()


def test_the_check_can_fail() -> None:
    assert "torch" in loaded_by("from corpus_client import CorpusLoader")


def test_unknown_name_is_an_attribute_error() -> None:
    import corpus_client

    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        _ = corpus_client.Loader
    assert set(corpus_client.__all__) <= set(dir(corpus_client))
