"""This machine: cores, page-locking, GPUs, and what transfers from each kind of memory reach."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from corpus_client.doctor.findings import Check
from corpus_client.staging.opening import open_stager
from corpus_client.tools.machine import Gpu, links
from corpus_client.tools.timing import Clock, size_name
from corpus_client.tools.transfer import KINDS, to_device

CORES_PER_LOADER = 2  # a training process and its loader's thread; the server, if it is here, needs one more
TRANSFER_BYTES = 16 << 20  # of one copy, as of a loader's slot
LEAST_OF_PINNED = 0.9  # of the bandwidth from torch's pinned memory


def check_cores(cores: float, loaders: int, *, server_here: bool) -> Check:
    """Count a core for each training process, each loader's thread, and a server that runs here."""
    needed = CORES_PER_LOADER * loaders + server_here
    found = f"{cores:g} for {loaders} loader{'s' * (loaders > 1)}{' and a server' * server_here}"
    advice = f"give this job {needed} cores: {CORES_PER_LOADER} for each training process and its loader"
    advice += ", one for the server" * server_here
    measured = {"cores": cores, "loaders": loaders, "needed": needed}
    enough = cores >= needed
    return Check("cores", "ok" if enough else "warn", found, "" if enough else advice, measured)


def check_pinning(num_bytes: int, device: torch.device) -> Check:
    """Page-lock as much memory as a loader's slots take, as the loader does it."""
    if device.type == "cpu":
        return Check("page-locking", "ok", "not needed without a GPU")
    locked = open_stager(device).host_memory(num_bytes).is_pinned()
    found = f"{size_name(num_bytes)} {'were' if locked else 'could not be'} page-locked"
    if locked:
        return Check("page-locking", "ok", found, measured={"pinned_bytes": num_bytes})
    advice = "copies to the device block; the warnings on stderr name what failed"
    return Check("page-locking", "warn", found, advice, {"pinned_bytes": 0})


def check_transfers(device: torch.device) -> Check:
    """Compare copies to the GPU from pageable, torch-pinned and the loader's own registered memory."""
    clock, ways = Clock(device), islice(to_device(TRANSFER_BYTES, device), len(KINDS))
    found = [clock.measure(name, TRANSFER_BYTES, call, repeats=20) for name, call in ways]
    speeds = {kind: each["bytes_per_second"] for kind, each in zip(KINDS, found, strict=True)}
    listed = ", ".join(f"{kind} {speed / 1e9:.1f} GB/s" for kind, speed in speeds.items())
    told = f"{size_name(TRANSFER_BYTES)} to {device}: {listed}"
    measured = {f"{kind}_bytes_per_second": speed for kind, speed in speeds.items()}
    if speeds["registered"] >= LEAST_OF_PINNED * speeds["torch-pinned"]:
        return Check("transfers", "ok", told, measured=measured)
    advice = (
        "the loader's memory is slower than torch's: please report this line, and what "
        "`corpus-client transfer --json` says"
    )
    return Check("transfers", "warn", told, advice, measured)


def check_gpu(driver: Sequence[Gpu]) -> Check:
    """Compare what torch sees with what the driver says; `driver`: of `list_gpus`."""
    seen = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    here, cuda = f"torch {torch.__version__}", torch.version.cuda
    version = driver[0].driver if driver else None
    measured = {"torch": torch.__version__, "cuda": cuda, "gpus": seen, "driver": version}
    if not seen and not driver:
        return Check("GPU", "ok", f"none; batches go to host memory ({here})", measured=measured)
    if not seen:
        found = f"{here} (CUDA {cuda}) sees none of the driver's {len(driver)}"
        advice = "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA"
        return Check("GPU", "fail", found, advice if cuda else "install a CUDA build of torch", measured)
    names = ", ".join(f"{seen.count(name)} x {name}" for name in dict.fromkeys(seen))
    found = f"{names}; {here}, CUDA {cuda}"
    if not driver:
        return Check("GPU", "ok", found, "install nvidia-smi to see driver and PCIe link", measured)
    found += f", driver {version}, {links(driver)}"
    if narrow := [gpu for gpu in driver if gpu.is_narrow]:
        found += f"; {len(narrow)} of them could have x{narrow[0].width_max}"
        advice = "look at slot, riser and BIOS (a virtual machine may show another link than there is)"
        return Check("GPU", "warn", found, advice, measured)
    return Check("GPU", "ok", found, measured=measured)
