"""The soak's work on a cluster, with a kubectl that answers what the test says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.soak_lib.deployed import CONTEXT, Pods

REFUSED = "Error from server: Cannot evict pod as it would violate the pod's disruption budget."


def pod(name: str, *, ready: bool = True, ending: bool = False) -> dict[str, object]:
    """Return a pod as `kubectl get pods --output=json` lists it."""
    metadata = {"name": name} | ({"deletionTimestamp": "2026-11-24T08:00:00Z"} if ending else {})
    return {
        "metadata": metadata,
        "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a kubectl first on the path; the file `code` beside it is what it runs for an eviction."""
    pods = [pod("starting", ready=False), pod("first"), pod("leaving", ending=True), pod("second")]
    (tmp_path / "pods.json").write_text(json.dumps({"items": pods}))
    program = tmp_path / "kubectl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n'
        f'case "$*" in *" get pods "*) cat {tmp_path}/pods.json;; *eviction*) . {tmp_path}/code;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv(CONTEXT, "trial")
    return tmp_path


def test_evictions_that_the_budget_refuses_are_counted_apart(kubectl: Path) -> None:
    (kubectl / "code").write_text(f'case "$*" in *second*) echo "{REFUSED}" >&2; exit 1;; esac\n')
    assert Pods().evict_all() == {"evictions": 1, "evictions refused": 1}
    asked = (kubectl / "asked").read_text().splitlines()
    assert all(line.startswith(f"--context=trial --namespace={Pods.namespace} ") for line in asked)
    assert not any("starting" in line or "leaving" in line for line in asked)


def test_an_eviction_that_fails_otherwise_ends_the_phase(kubectl: Path) -> None:
    (kubectl / "code").write_text("echo 'Error from server (Forbidden)' >&2; exit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        Pods().evict_all()


def test_no_cluster_is_disturbed_that_nobody_named(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTEXT)
    assert CONTEXT in (Pods().why_not() or "")
    assert not (kubectl / "asked").exists()
