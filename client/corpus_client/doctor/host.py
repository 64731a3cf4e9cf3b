"""This machine: cores, memory, page-locking, GPUs."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

import torch

from corpus_client.buffers import RingSize, host_memory_bytes
from corpus_client.doctor.findings import Check
from corpus_client.tools.gpus import Gpu
from corpus_client.tools.sizes import size_name

CORES_PER_LOADER = 2
"""A training process and its loader's thread; the server, if it is here, needs one more."""


def num_loaders(asked: int | None) -> int:
    """Loaders on this host: as said, else as torchrun says, else one per GPU, else one."""
    if asked is not None:
        return asked
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) else max(1, torch.cuda.device_count())


def check_cores(cores: float, loaders: int, *, server_here: bool) -> Check:
    """A core for each training process, one for each loader's thread, one for a server that runs here."""
    needed = CORES_PER_LOADER * loaders + server_here
    enough = cores >= needed
    here = " and a server" if server_here else ""
    return Check(
        name="cores",
        status="ok" if enough else "warn",
        found=f"{cores:g} for {loaders} loader{'s' * (loaders > 1)}{here}",
        advice=""
        if enough
        else f"give this job {needed} cores: {CORES_PER_LOADER} for each training process and its loader"
        + (", one for the server" if server_here else ""),
        measured={"cores": cores, "loaders": loaders, "needed": needed},
    )


def check_memory(ring: RingSize, loaders: int, memory_bytes: int | None = None) -> Check:
    """Slots of all loaders here within half of the memory, which each loader by itself keeps to."""
    memory = host_memory_bytes() if memory_bytes is None else memory_bytes
    slots = loaders * ring.num_slots * ring.slot_bytes
    enough = slots <= memory // 2
    return Check(
        name="memory",
        status="ok" if enough else "warn",
        found=f"{size_name(slots)} of slots in {loaders} loader{'s' * (loaders > 1)}, "
        f"{size_name(memory)} for this job",
        advice="" if enough else f"pass prefetch_bytes={memory // 2 // loaders} or less to each loader",
        measured={"slots_bytes": slots, "memory_bytes": memory},
    )


def check_pinning(ring: RingSize) -> Check:
    """Whether a loader's slots can be page-locked: by doing it, where there is a GPU."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else size_name(limit)
    measured = {"memlock_bytes": None if limit == resource.RLIM_INFINITY else limit}
    size = ring.num_slots * ring.slot_bytes
    if not torch.cuda.is_available():
        found = f"not needed without a GPU (ulimit -l: {allowed})"
        return Check(name="page-locking", status="ok", found=found, measured=measured)
    try:
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Check(
            name="page-locking",
            status="fail",
            found=f"{size_name(size)} cannot be page-locked (ulimit -l: {allowed}): "
            f"{str(error).splitlines()[0]}",
            advice="raise the limit (docker run --ulimit memlock=-1; LimitMEMLOCK=) or lower prefetch_bytes",
            measured=measured,
        )
    found = f"{size_name(size)} were page-locked (ulimit -l: {allowed})"
    return Check(name="page-locking", status="ok", found=found, measured=measured)


def check_gpu(driver: Sequence[Gpu] | None) -> Check:
    """What torch sees, what the driver says, and whether the two fit; `driver`: of `list_gpus`."""
    seen = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cuda = torch.version.cuda
    measured = {
        "torch": torch.__version__,
        "cuda": cuda,
        "gpus": seen,
        "driver": driver[0].driver if driver else None,
    }
    if not seen:
        if not driver:
            found = f"none; batches go to host memory (torch {torch.__version__})"
            return Check(name="GPU", status="ok", found=found, measured=measured)
        advice = (
            "install a CUDA build of torch"
            if cuda is None
            else "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA"
        )
        found = f"torch {torch.__version__} (CUDA {cuda}) sees none of the driver's {len(driver)}"
        return Check(name="GPU", status="fail", found=found, advice=advice, measured=measured)
    names = ", ".join(f"{seen.count(name)} x {name}" for name in dict.fromkeys(seen))
    found = f"{names}; torch {torch.__version__}, CUDA {cuda}"
    if not driver:
        advice = "install nvidia-smi to see driver and PCIe link"
        return Check(name="GPU", status="ok", found=found, advice=advice, measured=measured)
    found += f", driver {driver[0].driver}, {', '.join(sorted({_link(gpu) for gpu in driver}))}"
    narrow = [gpu for gpu in driver if gpu.is_narrow]
    if narrow:
        found += f"; {len(narrow)} of them could have x{narrow[0].width_max}"
        advice = "look at slot, riser and BIOS (a virtual machine may show another link than there is)"
        return Check(name="GPU", status="warn", found=found, advice=advice, measured=measured)
    return Check(name="GPU", status="ok", found=found, measured=measured)


def _link(gpu: Gpu) -> str:
    return "PCIe link unknown" if gpu.bus is None else str(gpu.bus)
