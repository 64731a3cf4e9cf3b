"""Copies to a device and back, and what they do to the thread that asks for them.

Every function takes the device's meter. On the CPU's own, "device" memory is host memory and nothing is
page-locked: the figures then mean nothing, the code is the same.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from corpus_client.device import Device, open_device
from corpus_client.tools import memcpy2d
from corpus_client.tools.host_copies import ROW
from corpus_client.tools.loads import products_for
from corpus_client.tools.measurement import Measurement, measured
from corpus_client.tools.timing import Call, Meter, Timing, pinned_like

QUEUED_SECONDS = 0.02
"""Work that is queued before an operation to see whether it waits for it."""

QUEUED_BATCHES = 32
"""Batches sent one behind the other, so that what one call costs is hidden behind the transfer before."""

QUEUED_BYTES = 64 << 20
"""Fewer of the large ones: widened they take five times their size on the device."""


def host_tensor(num_bytes: int) -> torch.Tensor:
    """`(num_bytes,) uint8` in pageable memory, written to."""
    return torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)


def _measure(
    meter: Meter, section: str, num_bytes: int, calls: dict[str, Call], repeats: int
) -> list[Measurement]:
    return [
        measured(section, name, num_bytes, meter.time(call, repeats=repeats)) for name, call in calls.items()
    ]


def by_size(meter: Meter, sizes: list[int], repeats: int) -> list[Measurement]:
    """The ways to the device, and back from it."""
    found = []
    for size in sizes:
        found += _measure(meter, "copies", size, _ways(meter, size), repeats)
    return found


def _ways(meter: Meter, size: int) -> dict[str, Call]:
    pageable = host_tensor(size)
    pinned = pinned_like(pageable, meter)
    there = pageable.to(meter.device, copy=True)

    def copy() -> None:
        np.copyto(pinned.numpy(), pageable.numpy())

    def copy_and_transfer() -> None:
        copy()
        there.copy_(pinned, non_blocking=True)

    return {
        "host to page-locked": copy,
        "pageable to device": lambda: there.copy_(pageable),
        "page-locked to device": lambda: there.copy_(pinned, non_blocking=True),
        "host to page-locked to device": copy_and_transfer,
        "pin_memory() each time, to device": lambda: there.copy_(
            pinned_like(pageable, meter), non_blocking=True
        ),
        "device to pageable": lambda: pageable.copy_(there),
        "device to page-locked": lambda: pinned.copy_(there, non_blocking=True),
    }


def calls(meter: Meter, size: int, repeats: int) -> list[Measurement]:
    """Blocking and not, from both kinds of memory: `held` against `seconds`."""
    pageable = host_tensor(size)
    pinned = pinned_like(pageable, meter)
    there = pageable.to(meter.device, copy=True)
    found: dict[str, Call] = {
        "pageable, blocking": lambda: there.copy_(pageable),
        "pageable, non_blocking=True": lambda: there.copy_(pageable, non_blocking=True),
        "page-locked, blocking": lambda: there.copy_(pinned),
        "page-locked, non_blocking=True": lambda: there.copy_(pinned, non_blocking=True),
        "device to page-locked, blocking": lambda: pinned.copy_(there),
        "device to page-locked, non_blocking=True": lambda: pinned.copy_(there, non_blocking=True),
    }
    if meter.device.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.device("cuda", (meter.device.index + 1) % torch.cuda.device_count())
        elsewhere = there.to(other)
        found["device to another device"] = lambda: elsewhere.copy_(there, non_blocking=True)
    return _measure(meter, "calls", size, found, repeats)


def in_pieces(meter: Meter, total: int, pieces: list[int], repeats: int) -> list[Measurement]:
    """The same bytes in one copy, or in many of `pieces` bytes each."""
    pageable = host_tensor(total)
    pinned = pinned_like(pageable, meter)
    there = torch.empty_like(pageable, device=meter.device)

    def send(source: torch.Tensor, piece: int) -> None:
        for start in range(0, total, piece):
            there[start : start + piece].copy_(source[start : start + piece], non_blocking=True)

    found = []
    for name, source in (("pageable to device", pageable), ("page-locked to device", pinned)):
        for piece in pieces:
            timing = meter.time(partial(send, source, piece), repeats=repeats)
            found.append(measured("pieces", name, total, timing, parts=-(-total // piece)))
    return found


def strided(meter: Meter, total: int, repeats: int) -> list[Measurement]:
    """Rows that lie apart on the host: torch packs them first, CUDA itself could send them."""
    rows = max(1, total // ROW)
    wide = pinned_like(host_tensor(2 * rows * ROW), meter).view(rows, 2 * ROW)
    narrow = pinned_like(host_tensor(rows * ROW), meter).view(rows, ROW)
    there = torch.empty(rows, ROW, dtype=torch.uint8, device=meter.device)
    there_wide = torch.empty(rows, 2 * ROW, dtype=torch.uint8, device=meter.device)

    def row_by_row() -> None:
        for target, source in zip(there, wide, strict=True):
            target.copy_(source[:ROW], non_blocking=True)

    def pack_first() -> None:
        np.copyto(narrow.numpy(), wide.numpy()[:, :ROW])
        there.copy_(narrow, non_blocking=True)

    def all_then_cut() -> None:
        there_wide.copy_(wide, non_blocking=True)
        there.copy_(there_wide[:, :ROW])

    ways: dict[str, Call] = {
        "to device, side by side": lambda: there.copy_(narrow, non_blocking=True),
        "to device, from rows apart": lambda: there.copy_(wide[:, :ROW], non_blocking=True),
        "to device, to rows apart": lambda: there_wide[:, :ROW].copy_(narrow, non_blocking=True),
        "to device, row by row": row_by_row,
        "to device, packed into page-locked first": pack_first,
        "to device, all of it, cut there": all_then_cut,
    }
    if (copy_rows := memcpy2d.find(meter.device)) is not None:
        ways["to device, cudaMemcpy2DAsync"] = lambda: copy_rows(there, wide[:, :ROW])
    return [
        measured("strided", name, rows * ROW, meter.time(way, repeats=repeats), parts=rows)
        for name, way in ways.items()
    ]


def widening(meter: Meter, num_tokens: int, repeats: int) -> list[Measurement]:
    """uint16 to int64 before the transfer, or after it."""
    stored = pinned_like(host_tensor(2 * num_tokens), meter).view(torch.uint16)
    wide = pinned_like(torch.zeros(num_tokens, dtype=torch.int64), meter)

    def on_the_host() -> None:
        np.copyto(wide.numpy(), stored.numpy())
        wide.to(meter.device, non_blocking=True)

    ways: dict[str, Call] = {
        "to device, widened on the host": on_the_host,
        "to device, widened there": lambda: stored.to(meter.device, non_blocking=True).to(torch.int64),
    }
    return _measure(meter, "widening", 2 * num_tokens, ways, repeats)


def waits(meter: Meter, size: int, repeats: int) -> list[Measurement]:
    """Which operations hold the CPU until the work that was queued before them is done.

    `held` is what counts: as long as the queued work, and the operation waits for it; `seconds` begins
    when that work is done.
    """
    products, count = products_for(QUEUED_SECONDS, meter)
    pageable = host_tensor(size)
    pinned = pinned_like(pageable, meter)
    there = pageable.to(meter.device, copy=True)
    small = torch.ones(1000, device=meter.device)
    mask = small > 0
    operations: dict[str, Call] = {
        "queueing a kernel": lambda: small.add_(0),
        "page-locked to device, non_blocking=True": lambda: there.copy_(pinned, non_blocking=True),
        "page-locked to device, blocking": lambda: there.copy_(pinned),
        "pageable to device, non_blocking=True": lambda: there.copy_(pageable, non_blocking=True),
        "pageable to device, blocking": lambda: there.copy_(pageable),
        "device to page-locked, non_blocking=True": lambda: pinned.copy_(there, non_blocking=True),
        "tensor.item()": lambda: small[0].item(),
        "tensor.cpu()": lambda: there.cpu(),
        "tensor.tolist()": lambda: small.tolist(),
        "if tensor:": lambda: bool(mask[0]),
        "tensor[mask]": lambda: small[mask],
        "tensor.nonzero()": lambda: small.nonzero(),
        "torch.tensor(list, device=...)": lambda: torch.tensor([1.0, 2.0], device=meter.device),
        "tensor.pin_memory()": lambda: pinned_like(pageable, meter),
    }
    queued = meter.time(lambda: products.run(count), repeats=repeats).done.median
    found = []
    for name, operation in operations.items():
        timing = meter.time(operation, repeats=repeats, before=lambda: products.run(count))
        found.append(
            Measurement(
                section="waits",
                name=name,
                bytes=size if "device" in name and "list" not in name else small.nbytes,
                seconds=timing.done,
                held=timing.held,
                waited=timing.held.median > queued / 2,
            )
        )
    return found


def read_too_early(meter: Meter, size: int) -> dict[str, bool]:
    """Read a non-blocking copy to the host before it has happened, and again after waiting.

    Returns:
        `right_at_once`: whether the first read saw the new bytes; nothing promises that it does.
        `right_after_waiting`: whether the second one did.
    """
    products, count = products_for(QUEUED_SECONDS, meter)
    there = torch.full((size,), 7, dtype=torch.uint8, device=meter.device)
    here = pinned_like(torch.zeros(size, dtype=torch.uint8), meter)
    meter.synchronize()
    products.run(count)
    here.copy_(there, non_blocking=True)
    at_once = bool((here.numpy() == 7).all())
    meter.synchronize()
    return {"right_at_once": at_once, "right_after_waiting": bool((here.numpy() == 7).all())}


def concurrent(meter: Meter, size: int, repeats: int) -> list[Measurement]:
    """A transfer and matrix products of about its length: one behind the other, and on two streams."""
    pinned = pinned_like(host_tensor(size), meter)
    there = torch.empty_like(pinned, device=meter.device)

    def transfer() -> None:
        there.copy_(pinned, non_blocking=True)

    alone = meter.time(transfer, repeats=repeats)
    products, count = products_for(alone.done.median, meter)

    def in_turn() -> None:
        transfer()
        products.run(count)

    def beside() -> None:
        """The side stream starts behind the current one, which waits for it at the end."""
        current = _current_stream(meter)
        with meter.side_stream():
            side = _current_stream(meter)
            if side is not None and current is not None:
                side.wait_stream(current)
            transfer()
        products.run(count)
        if side is not None and current is not None:
            current.wait_stream(side)

    timings: dict[str, Timing] = {
        "transfer alone": alone,
        "compute alone": meter.time(lambda: products.run(count), repeats=repeats),
        "transfer, then compute, one stream": meter.time(in_turn, repeats=repeats),
        "transfer beside compute, two streams": meter.time(beside, repeats=repeats),
    }
    return [measured("concurrent", name, size, timing) for name, timing in timings.items()]


def by_loader(meter: Meter, sizes: list[int], repeats: int) -> list[Measurement]:
    """Batches by the loader's own device half, several one behind the other.

    `held` is for one batch; `seconds` until all have arrived on the current stream.
    """
    found = []
    for size in sizes:
        stored = pinned_like(host_tensor(size), meter).view(torch.uint16).view(1, 1, -1)
        count = queued_batches(size)
        for name, dtype in (("as stored", None), ("widened to int64 there", torch.int64)):
            device = open_device(meter.device, dtype)

            def send(device: Device = device, stored: torch.Tensor = stored, count: int = count) -> None:
                for _ in range(count):
                    device.upload(stored).claim()

            timing = meter.time(send, repeats=repeats, before=device.pace)
            held = timing.held.divided(count)
            found.append(
                Measurement(
                    section="loader",
                    name=name,
                    bytes=size * count,
                    seconds=timing.done,
                    held=held,
                    parts=count,
                )
            )
    return found


def queued_batches(size: int) -> int:
    """How many batches of `size` bytes are sent one behind the other."""
    return max(4, min(QUEUED_BATCHES, QUEUED_BYTES // size))


def _current_stream(meter: Meter) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(meter.device) if meter.device.type == "cuda" else None
