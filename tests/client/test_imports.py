"""Imports point one way: from layer to layer downwards, without circles, and lightly."""

from __future__ import annotations

import pytest

from tests import layers
from tests.layers import loaded_by
from tests.serving import ROOT

PACKAGE = ROOT / "client" / "corpus_client"

LEVELS = (
    {"errors", "user_files"},
    {"observe"},
    {"network"},
    {"plan"},
    {"staging"},
    {"recording", "structure"},
    {"arrays", "batch", "prepared", "sampling", "trained"},
    {"loader"},
    {"dataset"},
    {"integrations"},
    {"__init__"},
    {"tools"},
    {"__main__"},
)
"""Layers from the ground up. Layers on one level do not know each other."""

WEB = {"fastapi", "starlette", "uvicorn", "pydantic"}
OF_TORCH = "from corpus_client import CorpusIterableDataset, CorpusLoader, RemoteCorpus, get_batch"


def test_files_import_only_from_layers_below_and_never_in_a_circle() -> None:
    assert layers.wrong_imports(PACKAGE, LEVELS) == []


def test_a_wrong_import_would_be_seen() -> None:
    found = layers.imports(PACKAGE)
    assert "staging.fetcher" in found["staging.pipeline"]
    way = (
        "__main__",
        "tools.checks",
        "loader",
        "staging.slots",
        "plan.state",
        "network.wire",
    )
    levels = [layers.level(name, LEVELS) for name in way]
    assert levels == sorted(set(levels), reverse=True)


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import corpus_client", WEB | {"torch", "numpy", "httpx"}),
        ("import corpus_client.errors", WEB | {"torch", "numpy", "httpx"}),
        ("import corpus_client.network.wire", WEB | {"torch", "numpy", "httpx"}),
        ("import corpus_client.network.transport", WEB | {"torch", "numpy", "httpx"}),
        ("import corpus_client.network.replicas", WEB | {"torch", "numpy"}),
        ("from corpus_client import ArrayLoader", WEB | {"torch", "typer"}),
        ("import corpus_client.staging.gather", WEB | {"torch"}),
        ("import corpus_client.__main__", WEB | {"torch", "numpy", "httpx", "typer"}),
        ("from corpus_client.tools.app import app", WEB | {"corpus_server", "matplotlib"}),
        (OF_TORCH, WEB | {"corpus_server", "torchdata"}),
    ],
)
def test_import_stays_light(statement: str, forbidden: set[str]) -> None:
    assert loaded_by(statement) & forbidden == set()


@pytest.mark.parametrize("layer", ["observe", "network", "plan"])
def test_what_lies_below_the_staging_room_loads_no_torch(layer: str) -> None:
    statements = "; ".join(f"import {name}" for name in layers.modules(PACKAGE, LEVELS, [layer]))
    assert loaded_by(statements) & {*WEB, "torch", "numpy"} == set()


def test_the_check_can_fail() -> None:
    assert "torch" in loaded_by(OF_TORCH)


def test_a_loader_imports_no_http_library_while_it_is_awaited() -> None:
    making = (
        "from corpus_client.network.asking import HttpClient\n"
        "from corpus_client.network.endpoint import Endpoint\n"
        "from corpus_client.network.options import Network\n"
        "{}HttpClient(Endpoint.parse('http://127.0.0.1:1'), Network()).close()"
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
    assert [name for name in corpus_client.__all__ if not hasattr(corpus_client, name)] == []
    assert set(corpus_client.__all__) <= set(dir(corpus_client))
