"""The fixture itself: it starts, restarts on its port, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.conftest import ServedCorpus
from tests.serving import RunningServer


def test_starts_stops_and_restarts_on_the_same_port(corpora: dict[str, ServedCorpus], tmp_path: Path) -> None:
    with RunningServer({"web": corpora["web"].path}, tmp_path, workers=2) as server:
        url, pids = server.url, server.worker_pids()
        assert len(pids) == 2
        server.restart()
        assert server.url == url
        assert not set(pids) & set(server.worker_pids())
        assert server.get("/readyz").json() == {"status": "ready", "corpora": ["web"]}
        last = [server.pid, *server.worker_pids()]
        assert server.stop() == 0
        assert not any(psutil.pid_exists(pid) for pid in last)
        assert list((tmp_path / "state" / "metrics").iterdir()) == []


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="found nothing"), RunningServer({"a": tmp_path / "no"}, tmp_path):
        pass
