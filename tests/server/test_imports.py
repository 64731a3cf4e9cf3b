"""Imports point one way, shown in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.serving import ROOT, environment

OUTSIDE_THE_CORE = ("web", "settings", "cli", "__main__")
WEB_FRAMEWORK = ("fastapi", "starlette", "uvicorn", "pydantic")
PACKAGE = ROOT / "corpus_server"


def modules(*, core: bool) -> list[str]:
    """Return the importable modules of the package; `core` leaves out what may know the web."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts != ("__main__",) and not (core and parts[:1] and parts[0] in OUTSIDE_THE_CORE):
            found.append(".".join(("corpus_server", *parts)))
    return found


def loaded_by(*names: str) -> set[str]:
    """Return the top-level modules that importing `names` loads in a fresh interpreter."""
    script = "import sys\n" + "".join(f"import {name}\n" for name in names)
    script += "print(*{name.partition('.')[0] for name in sys.modules})"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True
    )
    return set(ended.stdout.split())


def test_the_list_of_core_modules_is_complete() -> None:
    core = modules(core=True)
    assert {"corpus_server", "corpus_server.gather", "corpus_server.plan.sampler"} <= set(core)
    assert not any(name.startswith("corpus_server.web") for name in core)
    assert len(core) > 20


def test_the_package_itself_is_light() -> None:
    assert not loaded_by("corpus_server") & {"torch", "numpy", *WEB_FRAMEWORK}


def test_the_core_loads_no_web_framework_and_no_torch() -> None:
    assert not loaded_by(*modules(core=True)) & {"torch", "typer", "rich", "tokenizers", *WEB_FRAMEWORK}


def test_nothing_of_the_server_loads_torch_or_the_client() -> None:
    assert not loaded_by(*modules(core=False)) & {"torch", "corpus_client"}


def test_the_command_line_loads_no_web_framework_until_it_serves() -> None:
    assert not loaded_by("corpus_server.cli") & {"torch", *WEB_FRAMEWORK}


@pytest.mark.parametrize("name", WEB_FRAMEWORK)
def test_these_tests_can_fail(name: str) -> None:
    assert name in loaded_by("corpus_server.web.app")
