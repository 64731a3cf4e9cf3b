"""Find the device that is meant, and open it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from corpus_client import errors
from corpus_client.plan.world import WHOLE
from corpus_client.staging.ring import DeviceRing
from corpus_client.staging.stager import Stager

Named = str | torch.device | None


def open_stager(device: Named, *, context: tuple[int, int] = WHOLE, timed: bool = False) -> Stager:
    """Return what brings batches to the device; the arguments are those of `Stager`."""
    device = find_device(device)
    runtime = getattr(torch, device.type)
    if device.type == "cpu" or not hasattr(runtime, "Stream"):
        return Stager(device, context=context, timed=timed)
    return DeviceRing(device, runtime, context=context, timed=timed)


def find_device(named: Named, environ: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device with its index, checked to exist; None is CUDA, another accelerator or the CPU.

    Without an index it is the current device if that is not the first, so somebody set it; else the one
    of LOCAL_RANK, which torchrun sets: eight ranks that all forgot `set_device` do not share one GPU.
    """
    try:
        device = _default_device() if named is None else torch.device(named)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    runtime: Any = getattr(torch, device.type, None)
    count = int(runtime.device_count()) if hasattr(runtime, "device_count") else 0
    if count == 0:
        raise errors.InvalidArgument(
            f"device must be 'cpu' or an accelerator that torch sees here, got {str(named)!r}; "
            f"the one it sees is {str(_default_device())!r}"
        )
    index = device.index
    if index is None:
        index = int(runtime.current_device()) if hasattr(runtime, "current_device") else 0
        local_rank = environ.get("LOCAL_RANK", "")
        if index == 0 and local_rank.isdecimal() and int(local_rank) < count:
            index = int(local_rank)
    if not index < count:
        raise errors.InvalidArgument(
            f"device must be {device.type}:0 to {device.type}:{count - 1}, got {str(device)!r}; "
            "does CUDA_VISIBLE_DEVICES hide it?"
        )
    return torch.device(device.type, index)


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is not None and accelerator.is_available():
        return torch.device(accelerator.current_accelerator())
    return torch.device("cpu")
