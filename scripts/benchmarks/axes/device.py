"""What a batch costs between its slot and the training loop: CPU held, and speed of the copies.

No network and no fetcher: the slots' zeros are put on their way again and again, as the pipeline would.
Without an accelerator the copy is the widening on the CPU, and there is nothing to reach.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch

from corpus_client.buffers import Ring, allocate_ring, ring_size
from corpus_client.device import Device, default_device, open_device
from scripts.benchmarks.report import Options, Report, Table, Target

HELP = "from slot to training loop: CPU held per batch, bandwidth of the copies to the device"

SHAPES = ((16, 1025), (64, 1025), (512, 2049), (2048, 4097))
RING_BYTES = 256 << 20
HELD_SECONDS = 50e-6
LARGE_BYTES = 1_000_000
WITHOUT_DEVICE = (
    "torch sees no accelerator here, so copies to one were not measured; shown is the widening on the CPU."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One shape of uint16 batches, medians over rounds.

    Args:
        batch_bytes: as stored.
        group: batches that travel together.
        held_p50_seconds, held_p99_seconds: of this CPU per batch, widened to int64 where it arrives.
        bytes_per_second: of copies as stored, by the device's clock; on a CPU of the widening ones.
    """

    rows: int
    window: int
    batch_bytes: int
    group: int
    held_p50_seconds: float
    held_p99_seconds: float
    bytes_per_second: float


def measure(options: Options) -> Report:
    """Every shape on the device that a loader would choose."""
    where = default_device()
    rounds, num_groups = (1, 8) if options.smoke else (options.rounds, 400)
    shapes = SHAPES[:2] if options.smoke else SHAPES
    found = [measure_shape(where, rows, window, rounds, num_groups) for rows, window in shapes]
    best = max(figures.bytes_per_second for figures in found)
    targets = []
    if where.type != "cpu":
        for figures in found:
            name = f"{figures.rows} x {figures.window}"
            held = figures.held_p50_seconds * 1e6
            targets.append(
                Target(
                    figure=f"CPU held per batch, {name}",
                    reached=held,
                    bound="at most",
                    wanted=HELD_SECONDS * 1e6,
                    unit="us",
                )
            )
            if figures.batch_bytes >= LARGE_BYTES:
                targets.append(
                    Target(
                        figure=f"bandwidth of copies beside the best, {name}",
                        reached=figures.bytes_per_second / best,
                        bound="at least",
                        wanted=0.9,
                    )
                )
    return Report(
        data={"device": str(where), "shapes": [asdict(figures) for figures in found]},
        tables=[table(found, where)],
        targets=targets,
        notes=[WITHOUT_DEVICE] if where.type == "cpu" else [],
    )


def measure_shape(where: torch.device, rows: int, window: int, rounds: int, num_groups: int) -> Figures:
    """One ring, used by a device that widens and by one that is timed."""
    batch_bytes = rows * window * 2
    widening = open_device(where, torch.int64)
    timed = open_device(where, torch.int64 if where.type == "cpu" else None, timed=True)
    ring = allocate_ring(
        ring_size(batch_bytes=batch_bytes, prefetch_bytes=RING_BYTES, in_flight=2), widening.pin
    )
    group = max(1, min(widening.group_bytes // batch_bytes, ring.size.steps_per_slot))
    p50s, p99s, speeds = [], [], []
    for _ in range(rounds):
        held = held_seconds(widening, ring, (rows, window), group, num_groups)
        p50, p99 = np.percentile(held, [50, 99])
        p50s.append(float(p50))
        p99s.append(float(p99))
        before, _ = timed.seconds()
        held_seconds(timed, ring, (rows, window), group, num_groups)
        after, _ = timed.seconds()
        speeds.append(num_groups * group * batch_bytes / max(after - before, 1e-9))
    return Figures(
        rows=rows,
        window=window,
        batch_bytes=batch_bytes,
        group=group,
        held_p50_seconds=median(p50s),
        held_p99_seconds=median(p99s),
        bytes_per_second=median(speeds),
    )


def held_seconds(
    device: Device, ring: Ring, shape: tuple[int, int], group: int, num_groups: int
) -> list[float]:
    """How long putting a batch on its way and claiming it took, per batch, for each group."""
    held = []
    for number in range(num_groups):
        slot = ring.slots[number % len(ring.slots)]
        device.pace()
        started = time.perf_counter()
        transfer = device.upload(slot.batches(0, group, shape, torch.uint16))
        for _ in range(group):
            transfer.claim()
        held.append((time.perf_counter() - started) / group)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the consumer's stream too: only then are all copies measured
    return held


def table(found: list[Figures], where: torch.device) -> Table:
    """The figures for people."""
    return Table(
        title=f"slot to training loop on {where}",
        columns=["shape", "MB", "batches together", "CPU held, p50 us", "p99 us", "copies GB/s"],
        rows=[
            [
                f"{each.rows} x {each.window}",
                f"{each.batch_bytes / 1e6:.2f}",
                str(each.group),
                f"{each.held_p50_seconds * 1e6:.1f}",
                f"{each.held_p99_seconds * 1e6:.1f}",
                f"{each.bytes_per_second / 1e9:.1f}",
            ]
            for each in found
        ],
    )
