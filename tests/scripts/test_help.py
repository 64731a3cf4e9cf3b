"""Scripts that measure or draw say what they do when asked for help, and do nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT

SCRIPTS = [
    "charts",
    "timeline",
    "page_images",
    "first_batch",
    "recording_cost",
    "eviction_cost",
    "family_cost",
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_all_that_happens(name: str) -> None:
    command = [sys.executable, "-m", f"scripts.{name}", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"usage: {name}.py")
    assert said.stderr == ""


def test_help_of_the_quick_start_installs_nothing(tmp_path: Path) -> None:
    """A checkout without `.venv` shows the options by whatever Python there is."""
    (tmp_path / "scripts").mkdir()
    for name in ("quickstart", "quickstart_lib", "setup"):
        (tmp_path / "scripts" / name).symlink_to(ROOT / "scripts" / name)
    command = ["scripts/quickstart", "--help"]
    python = getattr(sys, "_base_executable", sys.executable)  # without the packages of an environment
    environment = {"PATH": os.environ["PATH"], "PYTHON": python, "PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("usage: scripts/quickstart [-h]")
    assert said.stderr == ""
    assert not (tmp_path / ".venv").exists()
