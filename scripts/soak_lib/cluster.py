"""The replicas of `docker/kubernetes`, where a cluster runs them and this machine reaches them by name."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from itertools import cycle

from scripts.processes import ROOT

CORPUS = "train"
TOKEN = ROOT / "docker" / "kubernetes" / "base" / "secrets" / "training.token"
NAMESPACE = "corpus"
HOST = "corpus.corpus"
URL = f"http://{HOST}:8000"
SELECTOR = "app.kubernetes.io/name=corpus-server"
CONTEXT = "CORPUS_SOAK_CONTEXT"
"""Variable that names kubectl's context. Without it nothing is disturbed: the current one may be in use."""

PAUSE_SECONDS = 5.0
ROLLOUT_SECONDS = 300


def why_not() -> str | None:
    """Return why there is nothing to disturb, or None."""
    if shutil.which("kubectl") is None:
        return "kubectl is not installed"
    if not os.environ.get(CONTEXT):
        return f"{CONTEXT} does not name the kubectl context of a cluster whose replicas may be disturbed"
    if not TOKEN.exists():
        return f"{TOKEN.relative_to(ROOT)} is not there: docker/make_secrets makes it"
    try:
        _workload()
        socket.getaddrinfo(HOST, 8000)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    except (ValueError, OSError) as error:
        return f"expected one workload with the label {SELECTOR}, whose pods this machine can reach: {error}"
    return None


def disturb(seconds: float) -> Counter[str]:
    """Restart all replicas one by one, evict all at once, kill one; in turn, until the time is over.

    Waits after each until the cluster has all replicas again. Returns how often what was done.
    """
    workload, done = _workload(), Counter[str]()
    end = time.monotonic() + seconds
    for way in cycle((_restart, _evict_all, _kill_one)):
        if time.monotonic() > end:
            break
        done += way(workload)
        time.sleep(PAUSE_SECONDS)  # the workload's status tells of it a moment later
        _kubectl("rollout", "status", workload, f"--timeout={ROLLOUT_SECONDS}s")
    return done


def _restart(workload: str) -> Counter[str]:
    _kubectl("rollout", "restart", workload)
    return Counter({"rolling restarts": 1})


def _evict_all(_: str) -> Counter[str]:
    """Ask to evict every replica, as a drain of their nodes does; the PodDisruptionBudget allows one."""
    done = Counter[str]()
    for name in _ready_pods():
        names = {"name": name, "namespace": NAMESPACE}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
        try:
            _kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction))
            done["evictions"] += 1
        except subprocess.CalledProcessError as error:
            if "disruption budget" not in error.stderr:
                raise
            done["evictions refused"] += 1
    return done


def _kill_one(_: str) -> Counter[str]:
    _kubectl("delete", "pod", "--grace-period=0", "--force", _ready_pods()[0])
    return Counter({"pods killed": 1})


def _workload() -> str:
    """Return the replicas' Deployment or StatefulSet, as `KIND/NAME`; raise ValueError if it is not one."""
    found = _kubectl("get", "deployments,statefulsets", f"--selector={SELECTOR}", "--output=name").split()
    if len(found) != 1:
        raise ValueError(f"got {found}")
    return found[0]


def _ready_pods() -> list[str]:
    """Return the names of the replicas that serve, without those that are ending."""
    pods = json.loads(_kubectl("get", "pods", f"--selector={SELECTOR}", "--output=json"))["items"]
    return [
        pod["metadata"]["name"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])
    ]


def _kubectl(*words: str, given: str | None = None) -> str:
    """Run a command of kubectl; raise CalledProcessError if it fails: what was not done must not count."""
    command = ["kubectl", f"--context={os.environ[CONTEXT]}", f"--namespace={NAMESPACE}", *words]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout
