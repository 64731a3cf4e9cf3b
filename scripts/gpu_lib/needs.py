"""What the parts need: packages and a CUDA device.

`python -m scripts.gpu_lib.needs DIR` installs what is missing from a folder of wheels.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable

CUDA = "cuda"
CLIENT = ("torch", "threadpoolctl", "numpy", "httpx", "xxhash", "typer", "rich")
SERVER = (
    "fastapi",
    "fastapi_offline",
    "uvloop",
    "httptools",
    "pydantic",
    "orjson",
    "prometheus_client",
    "psutil",
)
TESTS = ("pytest", "pytest_timeout", "hypothesis", "psutil")

DISTRIBUTIONS = {name: name.replace("_", "-") for name in (*CLIENT, *SERVER, *TESTS) if name != "torch"}
"""What installs each module; torch comes with the machine, in the build for its CUDA."""


def missing(needs: Iterable[str]) -> str:
    """Return what is not here in one sentence, or ""."""
    needs = set(needs)
    modules = sorted(needs - {CUDA})
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    reasons = [f"Python packages are missing: {', '.join(absent)}"] if absent else []
    if CUDA in needs and "torch" not in absent and (without := _without_cuda()):
        reasons.append(without)
    return "; ".join(reasons)


def _without_cuda() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        build = f"torch {torch.__version__} is a build without CUDA"
    driver = "nvidia-smi is here, so the driver probably is"
    if shutil.which("nvidia-smi") is None:
        driver = "nvidia-smi is not on the PATH, so there is no NVIDIA driver, or no GPU in this container"
    return f"torch sees no CUDA device ({build}; {driver})"


def install(wheels: str) -> None:
    """Install packages one by one: what the folder lacks costs only the parts that need it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels]
    for module, distribution in DISTRIBUTIONS.items():
        if importlib.util.find_spec(module) is None:
            done = subprocess.run([*pip, distribution], capture_output=True, text=True, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                print(f"scripts/gpu: {distribution} was not installed: {last}", file=sys.stderr)


if __name__ == "__main__":
    install(sys.argv[1])
