"""Describe this machine: what figures depend on, its GPUs and their buses, and how much of it may be used."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corpus_client.staging.slots import host_memory_bytes
from corpus_client.tools.timing import size_name

FIELDS = "name,driver_version,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
"""The generation in use falls while a GPU idles, so the greatest one counts; the width stays, so a small one
tells of a bad slot."""


class Gpu(NamedTuple):
    """A GPU and its PCI Express link, in nvidia-smi's words: `[N/A]` is what the driver does not tell."""

    name: str
    driver: str
    generation: str
    width: str
    width_max: str

    @property
    def bus(self) -> str:
        """The link: generation and lanes."""
        is_known = self.generation.isdigit() and self.width.isdigit()
        return f"PCIe {self.generation} x{self.width}" if is_known else "PCIe link unknown"

    @property
    def is_narrow(self) -> bool:
        """Whether the link has fewer lanes than it could."""
        return self.width.isdigit() and self.width_max.isdigit() and int(self.width) < int(self.width_max)


def list_gpus() -> list[Gpu]:
    """Return every GPU of the machine; none where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(listing: str) -> list[Gpu]:
    """Read nvidia-smi's response for `FIELDS`, a line for each GPU; other lines are messages."""
    lines = ([cell.strip() for cell in line.split(",")] for line in listing.splitlines())
    return [Gpu(*cells) for cells in lines if len(cells) == len(FIELDS.split(","))]


def links(gpus: Sequence[Gpu]) -> str:
    """Return the links of all GPUs; most machines have equal ones."""
    return ", ".join(sorted({gpu.bus for gpu in gpus}))


def describe(device: torch.device) -> dict[str, Any]:
    """Return what figures depend on, for the head of a report."""
    found: dict[str, Any] = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": num_cores(),
        "memory": size_name(host_memory_bytes()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(device),
    }
    if device.type == "cuda":
        gpus = list_gpus()
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        found |= {"driver": gpus[0].driver if gpus else None, "bus": links(gpus) or None}
    return found


def one_line(machine: Mapping[str, Any]) -> str:
    """Return a description for people."""
    return "; ".join(f"{name} {value}" for name, value in machine.items() if value is not None)


def num_cores() -> float:
    """Return how many cores this process may use: its affinity, or less where a cgroup limits it."""
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux alone
    cores = os.cpu_count() or 1 if affinity is None else len(affinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def measurable_bytes(device: torch.device) -> int:
    """Return how much memory measurements may take: a quarter of what is free, on host and device."""
    available = _field("/proc/meminfo", "MemAvailable")
    limit = host_memory_bytes()
    free = min(limit, int(available.split()[0]) * 1024) if available else limit // 2
    if device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(device)[0])
    return free // 4


def _field(path: str, name: str) -> str:
    """Return the value of the first `name: value` line of a file, or ""."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
