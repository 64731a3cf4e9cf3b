"""The GPUs of this machine and their buses, as the driver's own tool describes them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch

LANE_BITS_PER_SECOND = {
    1: 2.5e9 * 8 / 10,
    2: 5e9 * 8 / 10,
    3: 8e9 * 128 / 130,
    4: 16e9 * 128 / 130,
    5: 32e9 * 128 / 130,
    6: 64e9 * 236 / 256,
}
"""PCI Express: transfers per second of a lane, less its encoding (8b/10b, 128b/130b, FLITs with 236 of
256 bytes for data). Packet headers come on top: transfers reach 75 to 90 percent of it."""

FIELDS = "name,uuid,driver_version,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
"""The generation in use falls while a GPU idles, so the greatest one counts; the width stays, so a small
one tells of a bad slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bus:
    """The PCI Express link of a GPU."""

    generation: int
    width: int

    @property
    def bytes_per_second(self) -> float:
        """Theoretical, one way."""
        return LANE_BITS_PER_SECOND[self.generation] * self.width / 8

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.width}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU; what the driver does not tell of its link is None.

    Args:
        width_max: lanes that the link could have.
    """

    name: str
    uuid: str
    driver: str
    bus: Bus | None
    width_max: int | None

    @property
    def is_narrow(self) -> bool:
        """Whether the link has fewer lanes than it could."""
        return self.bus is not None and self.width_max is not None and self.bus.width < self.width_max


def list_gpus() -> list[Gpu] | None:
    """Every GPU of the machine; None where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_gpus(done.stdout)


def gpu_of(device: torch.device) -> Gpu | None:
    """What nvidia-smi says about a CUDA device; None where it is missing or does not list it."""
    gpus = list_gpus() or []
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")).removeprefix("GPU-")
    # Numbers are no help: CUDA_VISIBLE_DEVICES changes torch's, not nvidia-smi's.
    for gpu in gpus:
        if uuid and gpu.uuid.removeprefix("GPU-") == uuid:
            return gpu
    return gpus[0] if len(gpus) == 1 else None


def parse_gpus(listing: str) -> list[Gpu]:
    """Read nvidia-smi's answer for `FIELDS`, a line for each GPU."""
    gpus = []
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS.split(",")):
            continue
        name, uuid, driver, *link = cells
        generation, width, width_max = (int(cell) if cell.isdigit() else None for cell in link)
        bus = (
            Bus(generation=generation, width=width) if generation in LANE_BITS_PER_SECOND and width else None
        )
        gpus.append(Gpu(name=name, uuid=uuid, driver=driver, bus=bus, width_max=width_max))
    return gpus
