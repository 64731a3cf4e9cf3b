"""Replicas that somebody else started, and how they are disturbed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Protocol

from scripts.processes import ROOT

CORPUS = "train"
CONTEXT = "CORPUS_SOAK_CONTEXT"
"""Variable that names kubectl's context. Without it nothing is disturbed: the current one may be in use."""

SECONDS_BETWEEN_KILLS = 5.0
ROLLOUT_SECONDS = 300


class Deployed(Protocol):
    """Replicas behind a URL, which ask for a token."""

    url: str
    token: Path

    def why_not(self) -> str | None:
        """Return why there is nothing to disturb, or None."""

    def disturb(self, seconds: float) -> Counter[str]:
        """Take replicas away and give them back for so long; return how often what was done."""


class Containers:
    """The containers of `docker/compose.yaml`, where they run on this machine."""

    url = "http://127.0.0.1:8000"
    token = ROOT / "docker" / "secrets" / "training.token"

    def why_not(self) -> str | None:
        if shutil.which("docker") is None:
            return "docker is not installed"
        try:
            is_up = len(self._replicas()) == 2 and self.token.exists()
        except subprocess.CalledProcessError as error:
            return str(error.stderr).strip()
        return None if is_up else "docker/compose.yaml is not up; its first lines say how to start it"

    def disturb(self, seconds: float) -> Counter[str]:
        """Kill one replica after the other and start it again."""
        end, done = time.monotonic() + seconds, Counter[str]()
        for replica in cycle(self._replicas()):
            began = time.monotonic()
            if began > end:
                break
            _run("docker", "kill", replica)
            _run("docker", "start", replica)
            done["kills, each followed by a start"] += 1
            time.sleep(max(0.0, SECONDS_BETWEEN_KILLS - (time.monotonic() - began)))
        return done

    def _replicas(self) -> list[str]:
        """Return the ids of the replicas' containers that run."""
        project = ("--filter", "label=com.docker.compose.project=corpus", "--filter")
        services = (f"label=com.docker.compose.service=server-{number}" for number in (1, 2))
        return [found for each in services if (found := _run("docker", "ps", "-q", *project, each).strip())]


class Pods:
    """The replicas of `docker/kubernetes`, where a cluster runs them and this machine can reach them."""

    host, namespace, selector = "corpus.corpus", "corpus", "--selector=app.kubernetes.io/name=corpus-server"
    url = f"http://{host}:8000"
    token = ROOT / "docker" / "kubernetes" / "base" / "secrets" / "training.token"

    def why_not(self) -> str | None:
        if shutil.which("kubectl") is None:
            return "kubectl is not installed"
        if not os.environ.get(CONTEXT):
            return f"{CONTEXT} does not name the kubectl context of a cluster whose replicas may be disturbed"
        if not self.token.exists():
            return f"{self.token.relative_to(ROOT)} is not there: docker/make_secrets makes it"
        try:
            self._workload()
            socket.getaddrinfo(self.host, 8000)
        except subprocess.CalledProcessError as error:
            return str(error.stderr).strip()
        except (ValueError, OSError) as error:
            return f"expected one workload with {self.selector}, whose pods this machine can reach: {error}"
        return None

    def disturb(self, seconds: float) -> Counter[str]:
        """Restart all replicas one by one, evict all at once, kill one; in turn, until the time is over.

        Waits after each until the cluster has all replicas again.
        """
        workload, done = self._workload(), Counter[str]()
        end = time.monotonic() + seconds
        for way in cycle((self.restart, self.evict_all, self.kill_one)):
            if time.monotonic() > end:
                break
            done += way()
            time.sleep(SECONDS_BETWEEN_KILLS)  # the workload's status tells of it a moment later
            self._kubectl("rollout", "status", workload, f"--timeout={ROLLOUT_SECONDS}s")
        return done

    def restart(self) -> Counter[str]:
        """Let the cluster replace all replicas one by one."""
        self._kubectl("rollout", "restart", self._workload())
        return Counter({"rolling restarts": 1})

    def evict_all(self) -> Counter[str]:
        """Ask to evict every replica, as a drain of their nodes does; the PodDisruptionBudget allows one."""
        done = Counter[str]()
        for name in self._ready():
            metadata = {"name": name, "namespace": self.namespace}
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
            try:
                self._kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction))
                done["evictions"] += 1
            except subprocess.CalledProcessError as error:
                if "disruption budget" not in error.stderr:
                    raise
                done["evictions refused"] += 1
        return done

    def kill_one(self) -> Counter[str]:
        """Delete a replica without a grace."""
        self._kubectl("delete", "pod", "--grace-period=0", "--force", self._ready()[0])
        return Counter({"pods killed": 1})

    def _workload(self) -> str:
        """Return the replicas' workload as `KIND/NAME`; raise ValueError if there is not one."""
        found = self._kubectl("get", "deployments,statefulsets", self.selector, "--output=name").split()
        if len(found) != 1:
            raise ValueError(f"got {found}")
        return found[0]

    def _ready(self) -> list[str]:
        """Return the names of the replicas that serve, without those that are ending."""
        pods = json.loads(self._kubectl("get", "pods", self.selector, "--output=json"))["items"]
        return [
            pod["metadata"]["name"]
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
            and any((its["type"], its["status"]) == ("Ready", "True") for its in pod["status"]["conditions"])
        ]

    def _kubectl(self, *words: str, given: str | None = None) -> str:
        where = (f"--context={os.environ[CONTEXT]}", f"--namespace={self.namespace}")
        return _run("kubectl", *where, *words, given=given)


def _run(*words: str, given: str | None = None) -> str:
    """Run a command; raise CalledProcessError if it fails: what was not done must not count."""
    return subprocess.run(words, input=given, capture_output=True, text=True, check=True).stdout
