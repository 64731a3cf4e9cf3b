"""Imports point one way: from layer to layer downwards, without circles, and lightly."""

from __future__ import annotations

import importlib

import pytest
import typer

from corpus_server.cli import COMMANDS, app
from tests import layers
from tests.serving import ROOT

PACKAGE = ROOT / "corpus_server"

LEVELS = (
    {"errors", "user_files"},
    {"described", "extras", "corpus_spec", "daemon_thread", "in_background", "pieces", "watched", "work"},
    {"settings", "plan", "corpus", "recordings", "reports", "__init__"},
    {"stores", "admission"},
    {"read"},
    {"readers", "catalog", "plan_store", "metrics"},
    {"known_plans", "live"},
    {"responses"},
    {"http"},
    {"web"},
    {"run"},
    {"tools"},
    {"cli"},
    {"__main__"},
)
"""Layers from the ground up. Layers on one level do not know each other."""

WEB_FRAMEWORK = ("fastapi", "starlette")
# Packages of the extras: an installation without them must work.
OPTIONAL = (
    *("tokenizers", "tiktoken", "sentencepiece", "pyarrow", "zstandard", "ray", "obstore", "duckdb"),
    "huggingface_hub",
)


@pytest.mark.parametrize("name", layers.packages(PACKAGE))
def test_every_package_says_what_it_offers_and_has_it(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__all__, f"{name} offers nothing"
    assert [offered for offered in package.__all__ if not hasattr(package, offered)] == []


def test_files_import_only_from_layers_below_and_never_in_a_circle() -> None:
    assert layers.wrong_imports(PACKAGE, LEVELS) == []


def test_a_wrong_import_would_be_seen() -> None:
    found = layers.imports(PACKAGE)
    assert {"responses.service", "read.gather", "plan.sampler"} <= set(found)
    assert "responses.service" in found["web.app"]
    way = ("web.app", "responses.service", "read.gather", "plan.sampler")
    levels = [layers.level(name, LEVELS) for name in way]
    assert levels == sorted(set(levels), reverse=True)


def loaded_by(*names: str) -> set[str]:
    """Return the modules that importing `names` loads in a fresh interpreter."""
    return layers.loaded_by("".join(f"import {name}\n" for name in names))


def modules(*names: str) -> list[str]:
    return layers.modules(PACKAGE, LEVELS, names)


def test_the_package_itself_is_light() -> None:
    assert not loaded_by("corpus_server") & {"torch", "numpy", "pydantic", *WEB_FRAMEWORK}


def test_what_lies_below_the_data_plane_loads_no_web_framework() -> None:
    core = modules("errors", "plan", "corpus", "read", "catalog", "plan_store", "known_plans")
    assert not loaded_by(*core) & {"torch", "typer", "rich", *OPTIONAL, "pydantic", *WEB_FRAMEWORK}


def test_the_data_plane_loads_no_web_framework() -> None:
    assert not loaded_by(*modules("responses")) & {"torch", "typer", "rich", *OPTIONAL, *WEB_FRAMEWORK}


def test_nothing_of_the_server_loads_torch_or_the_client() -> None:
    everything = sorted(
        f"corpus_server.{name}" for name in layers.imports(PACKAGE) if name not in ("__init__", "__main__")
    )
    assert not loaded_by(*everything) & {"torch", "corpus_client"}


def test_the_command_line_loads_no_web_framework_until_it_serves() -> None:
    assert not loaded_by("corpus_server.cli") & {"torch", "pydantic", *WEB_FRAMEWORK}


def test_a_worker_does_not_load_what_describes_its_routes() -> None:
    """FastAPI took half of the time until a server was ready."""
    assert not loaded_by("corpus_server.run.worker") & {"fastapi", "typer", "rich"}


@pytest.mark.parametrize("name", [*WEB_FRAMEWORK, "pydantic"])
def test_these_tests_can_fail(name: str) -> None:
    assert name in loaded_by("corpus_server.web.description")


def test_the_version_and_the_list_of_commands_are_light() -> None:
    """A container's check may call them, and people do; they took 0.7 s of CPU."""
    heavy = {"numpy", "pydantic", "rich", "asyncio", "starlette"}
    for option in ("--version", "--help"):
        run = f"""
import contextlib, io, sys
from corpus_server.cli import main
sys.argv = ["corpus-server", "{option}"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
"""
        assert not layers.loaded_by(run) & heavy


def test_the_supervisor_is_light() -> None:
    """What it imports, a server's start waits for, and no worker has it."""
    assert not loaded_by("corpus_server.run", "corpus_server.cli.serve") & {
        "numpy",
        "pydantic",
        *WEB_FRAMEWORK,
    }


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name].about
