"""Scripts that measure or draw say what they do when asked for help, and do nothing else."""

from __future__ import annotations

import subprocess
import sys

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
