"""Measure copies, from page to page and over the bus, for `transfer` and `doctor`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from typing import Literal

import numpy as np
import torch
from rich.console import RenderableType
from rich.table import Table

from corpus_client import errors
from corpus_client.staging.ring import open_stager
from corpus_client.tools import report
from corpus_client.tools.machine import describe, measurable_bytes, one_line
from corpus_client.tools.timing import Call, Clock, seconds_name, size_name

Kind = Literal["pageable", "torch-pinned", "registered"]
KINDS: tuple[Kind, ...] = ("pageable", "torch-pinned", "registered")
"""Registered memory is the loader's own: a map that `cudaHostRegister` page-locks, if it can."""

BUFFERS = 6  # times its size is what the measurements of a size take together, on host or device


def measure(device: torch.device, sizes: list[int], repeats: int) -> report.Report:
    """Measure everything that this machine allows, the host's part always; a row for each way of copying."""
    max_bytes = measurable_bytes(device) // BUFFERS
    allowed, missing = [size for size in sizes if size <= max_bytes], []
    if len(allowed) < len(sizes):
        missing.append(
            f"sizes above {size_name(max_bytes)}: measurements take up to {BUFFERS} times a size, "
            "and no more than a quarter of the memory that is free"
        )
    if not allowed:
        raise errors.InvalidArgument(f"sizes must hold a smaller one, got {sizes[0]:,}: {missing[0]}")
    if device.type == "cpu":
        missing.append(
            f"transfers to a GPU: torch {torch.__version__} sees no CUDA device here. Left out: pageable "
            "against page-locked memory, copies within the device"
        )
    ways = (on_host,) if device.type == "cpu" else (on_host, to_device)
    figures = [
        Clock(device if way is to_device else torch.device("cpu")).measure(name, size, call, repeats)
        for size in allowed
        for way in ways
        for name, call in way(size, device)
    ]
    machine = describe(device)
    title = "one copy, by size: GB/s, and how long the CPU is held"
    table = Table("", *map(size_name, allowed), title=title)
    for name in dict.fromkeys(each["name"] for each in figures):
        row = [each for each in figures if each["name"] == name]
        speeds = (f"{each['bytes_per_second'] / 1e9:.3g}" for each in row)
        held = (seconds_name(each["held"]["median"]) for each in row)
        table.add_row(name, *map("\n".join, zip(speeds, held, strict=True)))
    left_out = [f"[yellow]not measured:[/yellow] {sentence}" for sentence in missing]
    shown: list[RenderableType] = [one_line(machine), table, *left_out]
    return report.Report(data={"machine": machine, "measurements": figures, "missing": missing}, shown=shown)


def host_memory(kind: Kind, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate and fill `(num_bytes,) uint8` of host memory; for the CPU all of it is pageable."""
    if kind == "registered":
        memory = open_stager(device).host_memory(num_bytes)
    else:
        locked = kind == "torch-pinned" and device.type != "cpu"
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=locked)
    # Written to once: before, pageable memory has no pages.
    memory.numpy()[:] = np.resize(np.arange(256, dtype=np.uint8), num_bytes)
    return memory


def on_host(size: int, device: torch.device) -> Iterator[tuple[str, Call]]:
    """Yield what a batch costs before it can set out: copies into used memory, and into new pages."""
    source, target = (host_memory("pageable", size, device).numpy() for _ in range(2))
    yield "host to host", partial(np.copyto, target, source)
    yield "host to host, fresh pages", lambda: np.copyto(np.frombuffer(mmap.mmap(-1, size), np.uint8), source)


def to_device(size: int, device: torch.device) -> Iterator[tuple[str, Call]]:
    """Yield copies to the device from each kind of memory, in the order of `KINDS`; then by other ways."""
    there, elsewhere = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    send = partial(there.copy_, non_blocking=True)
    for kind in KINDS:
        yield f"{kind} to device", partial(send, host_memory(kind, size, device))
    pageable, locked = (host_memory(kind, size, device) for kind in ("pageable", "registered"))
    pinned = pageable.pin_memory if device.type != "cpu" else pageable.clone
    yield "pageable to registered to device", lambda: send(locked.copy_(pageable))
    yield ("pin_memory() each time, to device", lambda: send(pinned()))
    yield "device to registered", partial(locked.copy_, there, non_blocking=True)
    yield "device to device", partial(elsewhere.copy_, there, non_blocking=True)
