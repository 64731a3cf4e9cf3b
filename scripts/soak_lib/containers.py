"""The containers of `docker/compose.yaml`, where they run on this machine."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import Counter
from itertools import cycle

from scripts.processes import ROOT

CORPUS = "train"
URL = "http://127.0.0.1:8000"
TOKEN = ROOT / "docker" / "secrets" / "training.token"
SECONDS_BETWEEN_KILLS = 5.0

_PROJECT = "label=com.docker.compose.project=corpus"
_REPLICAS = ("server-1", "server-2")


def why_not() -> str | None:
    """Return why there is nothing to kill, or None."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    try:
        is_up = len(_replicas()) == len(_REPLICAS) and TOKEN.exists()
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    return None if is_up else "docker/compose.yaml is not up; its first lines say how to start it"


def disturb(seconds: float) -> Counter[str]:
    """Kill one replica after the other and start it again; return how many kills there were."""
    end, done = time.monotonic() + seconds, Counter[str]()
    for replica in cycle(_replicas()):
        if time.monotonic() > end:
            break
        began = time.monotonic()
        _docker("kill", replica)
        _docker("start", replica)
        done["kills, each followed by a start"] += 1
        time.sleep(max(0.0, SECONDS_BETWEEN_KILLS - (time.monotonic() - began)))
    return done


def _replicas() -> list[str]:
    """Return the ids of the replicas' containers that run."""
    found = [
        _docker("ps", "-q", "--filter", _PROJECT, "--filter", f"label=com.docker.compose.service={name}")
        for name in _REPLICAS
    ]
    return [each for each in found if each]


def _docker(*words: str) -> str:
    """Run a command of docker; raise CalledProcessError if it fails: a kill that was none must not count."""
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout.strip()
