"""The soak's phase for replicas that run already, with a server of the test and shell commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.soak_lib import phases
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer, wait_until


def test_replicas_that_run_already_are_trained_from_while_a_command_disturbs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "SECONDS_BETWEEN_DISTURBANCES", 1.0)
    monkeypatch.setattr(phases, "NUM_ROWS", 4)  # workers; the rows of a batch stay 64
    path = write_raw(tmp_path / "web.bin", some_tokens(200_000))
    with RunningServer({"web": path}, tmp_path) as server:
        before = server.worker_pids()
        there = {"seconds": 0.1, "seed": 1, "folder": tmp_path, "url": server.url, "corpus": "web"}
        calm = phases.deployed(phases.Soak(**there, disturb=f"kill -HUP {server.pid}"))
        assert calm.failures == []
        assert "wrong: 0, errors: 0" in "\n".join(calm.lines)
        assert "right: 0" not in "\n".join(calm.lines)
        wait_until(lambda: not set(server.worker_pids()) & set(before))
        broken = phases.deployed(phases.Soak(**there, disturb="echo no such replica >&2; exit 3; true"))
    assert broken.failures == ["the command ended with 3: no such replica\n"]
