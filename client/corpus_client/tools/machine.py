"""This machine: what figures depend on, and how much of it may be used."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from corpus_client import errors
from corpus_client.buffers import host_memory_bytes
from corpus_client.tools.gpus import gpu_of
from corpus_client.tools.sizes import size_name


def find_device(name: str | None) -> torch.device:
    """The device asked for; by default CUDA where torch sees it, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise errors.InvalidArgument(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise errors.InvalidArgument(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise errors.InvalidArgument(
            f"device {name!r} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA "
            "devices; check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch is a CUDA build"
        )
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """The machine, for the head of a report."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "memory_bytes": host_memory_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(device),
    }
    if device.type == "cuda":
        gpu = gpu_of(device)
        found["gpu"] = torch.cuda.get_device_name(device)
        found["driver"] = gpu.driver if gpu else None
        found["bus"] = str(gpu.bus) if gpu and gpu.bus else None
    return found


def one_line(machine: dict[str, Any]) -> str:
    """A description for people."""
    shown = {**machine, "memory": size_name(machine["memory_bytes"])}
    del shown["memory_bytes"]
    return "; ".join(f"{name} {value}" for name, value in shown.items() if value is not None)


def num_cores() -> float:
    """Cores that this process may use: its affinity, or less where a cgroup limits it."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def free_host_bytes() -> int:
    """Memory that can be taken now: what the kernel calls available, within the container's limit."""
    limit = host_memory_bytes()
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(limit, int(line.split()[1]) * 1024)
    except OSError:
        pass
    return limit // 2


def measurable_bytes(device: torch.device) -> int:
    """How much memory measurements may take: a quarter of what is free, on the host and on the device."""
    free = free_host_bytes()
    if device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(device)[0])
    return free // 4


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
