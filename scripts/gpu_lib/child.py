"""Measure the cells of one part: `python -m scripts.gpu_lib.child JOB`. Print each at once, a line of JSON.

A part has a process of its own, so that it meets neither memory nor streams of another, and can be ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_lib.parts import load
from scripts.gpu_lib.run import FAILED, LEFT_OUT, SIMULATED, Run


def main(job: dict[str, Any]) -> None:
    """Measure what is not measured yet and fits into the time.

    Args:
        job: `part`; `device`, `url`, `corpus`, `path`, `quick`, `folder` of `Run`; `done`, names of cells;
            `until`, a `time.monotonic`.
    """
    run = Run(
        device=torch.device(job["device"]),
        url=job["url"],
        corpus=job["corpus"],
        path=Path(job["path"]),
        quick=job["quick"],
        folder=Path(job["folder"]),
    )
    for cell in load(job["part"]).cells(run):
        if cell.name in job["done"]:
            continue
        left = job["until"] - time.monotonic()
        if left < cell.seconds and not run.quick:
            tell(
                cell.name,
                {LEFT_OUT: f"it takes up to {cell.seconds:.0f} s, {max(0, left):.0f} s are left"},
            )
            continue
        began = time.monotonic()
        try:
            figures = cell.measure()
        except Exception as error:  # noqa: BLE001 - the other cells go on
            traceback.print_exc()
            figures = {FAILED: f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        tell(cell.name, {**figures, "took_seconds": round(time.monotonic() - began, 2)})


def tell(name: str, figures: dict[str, Any]) -> None:
    """Print a cell, whole and at once."""
    print(json.dumps({"cell": name, "figures": figures}, allow_nan=False), flush=True)


@contextlib.contextmanager
def present(device: str) -> Iterator[None]:
    """Let torch find the device; the simulated one, which only rehearses a run, is there within the block."""
    if device.partition(":")[0] != SIMULATED:
        yield
        return
    from tests.simulated_device import backend

    with backend.present():
        yield
    sys.stdout.flush()
    os._exit(0)  # its streams are threads, which nothing ends


if __name__ == "__main__":
    _job = json.loads(sys.argv[1])
    with present(_job["device"]):
        main(_job)
