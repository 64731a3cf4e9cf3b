"""What a server does with a signal that ends a process by default."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from tests.serving import RunningServer, wait_until

ENDING: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGALRM, signal.SIGRTMIN + 3)


def end_by(number: int, corpora: Mapping[str, Path], folder: Path) -> None:
    """Start a server, and check that a signal to all of its processes ends it as SIGTERM does."""
    with RunningServer(corpora, folder, workers=2, arguments=["--drain-seconds", "0"]) as server:
        process, pids = psutil.Process(server.pid), server.worker_pids()
        os.killpg(server.pid, number)  # as to a service
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, server.log)
        named = signal.Signals(number).name if number < signal.SIGRTMIN else f"signal {number}"
        assert f"{named}: ending" in server.log(), f"{named} did not end it in order:\n{server.log()}"
        assert not any(map(psutil.pid_exists, pids))
        assert list((server.state_dir / "metrics").iterdir()) == []
        assert server.stop() == 0
