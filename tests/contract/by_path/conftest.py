"""Each test has a folder of its own for servers of paths, and leaves no process there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.contract.by_path.processes import Runtime
from tests.contract.conftest import Replicas


@pytest.fixture(scope="session")
def replicas(replicas: Replicas) -> Replicas:
    """Start the one that tests here ask for before the folder of a test is in the environment."""
    assert replicas["1 worker"]
    return replicas


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    with TemporaryDirectory(prefix="run-") as folder, TemporaryDirectory() as state:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("XDG_STATE_HOME", state)
        runtime = Runtime(Path(folder))
        yield runtime
        runtime.check_nothing_left()
