"""A bill that several files look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.bills.making import PLAN, START, STOP, run
from tests.serving import RunningServer


@pytest.fixture(scope="session")
def made(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bill with its leaves; tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("bill")
    (folder / "plan.json").write_text(json.dumps(PLAN))
    done = run("bill", server.url, "--plan", folder / "plan.json", "--start", START, "--stop", STOP)
    assert done.exit_code == 2, "an option --out is needed"
    out = folder / "bill.json"
    words = ("--plan", folder / "plan.json", "--start", START, "--stop", STOP, "--out", out)
    done = run("bill", server.url, *words, "--cyclonedx", folder / "bom.json", "--spdx", folder / "spdx.json")
    assert done.exit_code == 0, done.output
    return out
