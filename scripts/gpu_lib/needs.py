"""What this machine lacks for a run; an empty answer means that everything can be measured."""

from __future__ import annotations

import importlib.util
import shutil

MODULES = {
    "corpus-client": ("torch", "numpy", "httpx", "xxhash", "typer", "rich"),
    "corpus-server": ("fastapi", "fastapi_offline", "uvicorn", "pydantic", "orjson", "prometheus_client"),
    "plots": ("matplotlib",),
    "tests": ("pytest", "pytest_timeout", "hypothesis", "psutil"),
}


def missing() -> list[str]:
    """A sentence for each thing that is not here."""
    sentences = []
    for user, names in MODULES.items():
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        if absent:
            sentences.append(f"Python packages for {user}: {', '.join(absent)}")
    if importlib.util.find_spec("torch") is not None:
        sentences += _gpu_missing()
    return sentences


def _gpu_missing() -> list[str]:
    import torch

    if torch.cuda.is_available():
        return []
    build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        build = f"torch {torch.__version__} is a build without CUDA; install one with it"
    driver = "nvidia-smi is here, so the driver probably is"
    if shutil.which("nvidia-smi") is None:
        driver = "nvidia-smi is not on the PATH, so there is no NVIDIA driver, or no GPU in this container"
    return [f"a CUDA device: torch sees none ({build}; {driver})"]
