"""Describe what figures depend on: the machine and the versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

PACKAGES = ("numpy", "torch", "uvloop", "httptools", "fastapi", "grpcio", "pyarrow")


def describe() -> dict[str, str]:
    """Return processor, memory, kernel and versions, by name."""
    return {
        "cpu": f"{os.cpu_count()} x {_cpu_name()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
