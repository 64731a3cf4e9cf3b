"""`corpus-client transfer`: what copies cost on this machine, from page to page and over the bus."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from corpus_client import errors
from corpus_client.tools import device_copies, host_copies, plots
from corpus_client.tools.failure import exit_on
from corpus_client.tools.gpus import gpu_of
from corpus_client.tools.machine import describe, find_device, measurable_bytes, one_line
from corpus_client.tools.measurement import SECTIONS, Measurement
from corpus_client.tools.sizes import parse_sizes, seconds_name, size_name
from corpus_client.tools.timing import open_meter

SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB,1GiB"
MIDDLE_BYTES = 16 << 20
"""Of everything that is measured at one size: about a batch, larger than most caches."""

BUFFERS = 6
"""How many times its size the greediest measurement of a size takes, on host or device."""

WITHOUT_CUDA = (
    "transfers to a GPU: torch {version} sees no CUDA device here. Left out: pageable against page-locked "
    "memory, blocking against non_blocking=True, what waits for the device, copies beside compute, the bus"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """All that was measured.

    Args:
        machine: what the figures depend on.
        bus_bytes_per_second: of the GPU's PCI Express link, theoretical, one way; None: not known.
        measurements: in the order in which they were made.
        read_too_early: see `device_copies.read_too_early`; None without a GPU.
        missing: what could not be measured and why, a sentence each.
    """

    machine: dict[str, Any]
    bus_bytes_per_second: float | None
    measurements: list[Measurement]
    read_too_early: dict[str, bool] | None
    missing: list[str]

    def of(self, section: str) -> list[Measurement]:
        """The measurements of one section."""
        return [each for each in self.measurements if each.section == section]

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "machine": self.machine,
            "bus_bytes_per_second": self.bus_bytes_per_second,
            "measurements": [each.as_json() for each in self.measurements],
            "read_too_early": self.read_too_early,
            "missing": self.missing,
        }


def measure(device: torch.device, sizes: list[int], repeats: int) -> TransferReport:
    """Everything this machine allows; the host's part always."""
    budget = measurable_bytes(device)
    allowed = [size for size in sizes if BUFFERS * size <= budget]
    missing = []
    if len(allowed) < len(sizes):
        missing.append(
            f"sizes above {size_name(budget // BUFFERS)}: measurements take up to {BUFFERS} times a size, "
            f"and no more than a quarter of the memory that is free, {size_name(budget)}"
        )
    if not allowed:
        raise errors.InvalidArgument(
            f"sizes must hold one of at most {budget // BUFFERS:,} bytes, got {min(sizes):,}: {missing[0]}"
        )
    middle = min(MIDDLE_BYTES, max(allowed))
    pieces = [size for size in allowed if size <= middle]
    found = host_copies.by_size(allowed, repeats)
    found += host_copies.in_pieces(middle, pieces, repeats)
    found += host_copies.strided(middle, repeats)
    found += host_copies.widening(middle // 2, repeats)
    too_early = None
    if device.type == "cuda":
        meter = open_meter(device)
        found += device_copies.by_size(meter, allowed, repeats)
        found += device_copies.calls(meter, middle, repeats)
        found += device_copies.in_pieces(meter, middle, pieces, repeats)
        found += device_copies.strided(meter, middle, repeats)
        found += device_copies.widening(meter, middle // 2, repeats)
        found += device_copies.waits(meter, middle, repeats)
        found += device_copies.concurrent(meter, middle, repeats)
        batches = [size for size in allowed if 5 * size * device_copies.queued_batches(size) <= budget]
        found += device_copies.by_loader(meter, [each for each in batches if each % 2 == 0], repeats)
        too_early = device_copies.read_too_early(meter, middle)
    else:
        missing.append(WITHOUT_CUDA.format(version=torch.__version__))
    gpu = gpu_of(device) if device.type == "cuda" else None
    if device.type == "cuda" and (gpu is None or gpu.bus is None):
        missing.append(
            "the bus's theoretical bandwidth: nvidia-smi does not tell this GPU's PCI Express link"
        )
    order = list(SECTIONS)
    return TransferReport(
        machine=describe(device),
        bus_bytes_per_second=gpu.bus.bytes_per_second if gpu and gpu.bus else None,
        measurements=sorted(found, key=lambda each: order.index(each.section)),
        read_too_early=too_early,
        missing=missing,
    )


def transfer(
    sizes: Annotated[str, typer.Option(help="of the copies, with commas between")] = SIZES,
    repeats: Annotated[int, typer.Option(help="of each measurement, unless it takes 2 s", min=3)] = 20,
    device: Annotated[str | None, typer.Option(help="default: cuda where there is one")] = None,
    plot_folder: Annotated[Path | None, typer.Option("--plots", help="folder for PNG plots")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of tables")] = False,
) -> None:
    """Measure copies: within host memory, to the GPU from pageable and page-locked memory, and back."""
    console = Console(stderr=as_json)
    try:
        if plot_folder is not None:
            plots.check()
        with console.status("measuring copies"):
            report = measure(find_device(device), parse_sizes(sizes), repeats)
        if plot_folder is not None:
            for path in plots.save(plot_folder, "transfer", plots.of_transfer(report)):
                console.print(f"saved {path}", highlight=False)
    except errors.CorpusClientError as error:
        raise exit_on(error) from error
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        show(report, console)


def show(report: TransferReport, console: Console) -> None:
    """Print the report for a person."""
    console.print(one_line(report.machine), highlight=False)
    for section in SECTIONS:
        measurements = report.of(section)
        if section in ("copies", "pieces") and measurements:
            console.print(_by_size(section, measurements))
        elif measurements:
            console.print(_by_name(section, measurements))
    if report.bus_bytes_per_second is not None:
        line = f"bus: {report.machine['bus']}, {report.bus_bytes_per_second / 1e9:.1f} GB/s in theory"
        console.print(line, highlight=False)
    if report.read_too_early is not None:
        seen = "the new bytes" if report.read_too_early["right_at_once"] else "old bytes"
        after = "the new bytes" if report.read_too_early["right_after_waiting"] else "STILL OLD BYTES"
        console.print(
            f"device to page-locked memory, non_blocking=True, read at once: {seen}; after "
            f"torch.cuda.synchronize(): {after}. Reading it does not wait.",
            highlight=False,
        )
    for sentence in report.missing:
        console.print(f"[yellow]not measured:[/yellow] {sentence}", highlight=False)


def _by_size(section: str, measurements: list[Measurement]) -> Table:
    """A row for each way, a column for each size."""
    columns = list(dict.fromkeys((each.bytes, each.parts) for each in measurements))
    columns.sort(key=lambda column: (column[0], -column[1]))
    heads = [size_name(size) if parts == 1 else f"{parts:,} parts" for size, parts in columns]
    if section == "pieces":
        heads = [f"{parts:,} x {size_name(size / parts)}" for size, parts in columns]
    shown = Table("GB/s", *heads, title=SECTIONS[section])
    for name in dict.fromkeys(each.name for each in measurements):
        cells = {(each.bytes, each.parts): each for each in measurements if each.name == name}
        shown.add_row(
            name, *(f"{cells[c].bytes_per_second / 1e9:.3g}" if c in cells else "" for c in columns)
        )
    return shown


def _by_name(section: str, measurements: list[Measurement]) -> Table:
    shown = Table("", "bytes", "time", "10 to 90 %", "GB/s", "CPU held", "", title=SECTIONS[section])
    for each in measurements:
        shown.add_row(
            each.name,
            size_name(each.bytes),
            seconds_name(each.seconds.median),
            f"{seconds_name(each.seconds.p10)} - {seconds_name(each.seconds.p90)}",
            f"{each.bytes_per_second / 1e9:.3g}",
            seconds_name(each.held.median),
            "" if each.waited is None else "waits" if each.waited else "does not wait",
        )
    return shown
