"""What torch's profiler sees of a training run: the proof that copies run beside the kernels."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from corpus_client.tools.report import open_loader
from scripts.benchmarks.report import Report, Table
from scripts.gpu_lib.gpt2 import GPT2_124M, Trainer
from scripts.gpu_lib.run import Cell, Figures, Run, at_least, at_most

ROWS, SEQ_LEN = 16, 1024
WARM_UP_STEPS, STEPS = 5, 20
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

Interval = tuple[float, float]


def cells(run: Run) -> Iterator[Cell]:
    """Yield one cell, where the profiler sees the device."""
    if run.is_cuda:
        yield Cell(name=f"GPT-2, {ROWS} x {SEQ_LEN}", seconds=60, measure=partial(measure, run))


def measure(run: Run) -> Figures:
    """Profile a training loop on CorpusLoader."""
    trainer = Trainer(run.device, GPT2_124M, SEQ_LEN)
    plan: dict[str, Any] = {"corpus": run.corpus, "seq_len": SEQ_LEN, "global_batch_size": ROWS}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with open_loader(run.url, device=run.device, **plan) as loader:
        for _ in range(WARM_UP_STEPS):
            batch = next(loader)
            trainer((batch.inputs, batch.targets))
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(STEPS):
                batch = next(loader)
                trainer((batch.inputs, batch.targets))
            torch.cuda.synchronize()
    trace = run.folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    return analysis(json.loads(trace.read_text())["traceEvents"])


def analysis(events: Sequence[Mapping[str, Any]]) -> Figures:
    """Read a trace of Kineto.

    Returns: copies to the device by name, with their number, bytes and median GB/s; the streams of copies and
    of kernels; which share of the copies' time lies under a kernel, and of the whole time under any; waits,
    how often the CPU waited, by the name of the call.
    """
    done = [each for each in events if each.get("ph") == "X"]
    copies = [each for each in done if each.get("cat") == "gpu_memcpy" and "HtoD" in each["name"]]
    kernels = [each for each in done if each.get("cat") == "kernel"]
    busy = merged([_interval(each) for each in kernels])
    copied = [_interval(each) for each in copies]
    num_copied = sum(stop - start for start, stop in copied)
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    waits = Counter(each["name"] for each in done if each["name"] in WAITING)
    by_name = {
        name: {
            "count": len(its),
            "bytes": sum(int(each["args"]["bytes"]) for each in its),
            "gb_per_second": statistics.median(
                int(each["args"]["bytes"]) / each["dur"] / 1e3 for each in its
            ),
        }
        for name in sorted({each["name"] for each in copies})
        if (its := [each for each in copies if each["name"] == name])
    }
    return {
        "copies": by_name,
        "copy_streams": sorted({int(each["args"]["stream"]) for each in copies}),
        "kernel_streams": sorted({int(each["args"]["stream"]) for each in kernels}),
        "copied_under_kernels": sum(under(each, busy) for each in copied) / num_copied if num_copied else 0.0,
        "kernels_busy": sum(stop - start for start, stop in busy) / whole if whole else 0.0,
        "waits": dict(waits),
    }


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the union as intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def under(interval: Interval, others: Sequence[Interval]) -> float:
    """Return how much of an interval lies in the others, which do not touch."""
    return sum(max(0.0, min(interval[1], stop) - max(interval[0], start)) for start, stop in others)


def report(cells: Mapping[str, Figures]) -> Report:
    """Show what was copied, and ask that it was pinned, on a stream of its own, and under kernels."""
    (found,) = cells.values()
    rows = [
        [name, f"{its['count']}", f"{its['bytes'] / 1e6:.2f}", f"{its['gb_per_second']:.1f}"]
        for name, its in found["copies"].items()
    ]
    table = Table(title="copies to the device", columns=["", "number", "MB", "GB/s"], rows=rows)
    shared = set(found["copy_streams"]) & set(found["kernel_streams"])
    pageable = sum(its["count"] for name, its in found["copies"].items() if "Pinned" not in name)
    targets = [
        at_most("copies from pageable memory", pageable, 0),
        at_most("streams that copies share with kernels", len(shared), 0),
        at_least("share of the copies' time under a kernel", found["copied_under_kernels"], 0.9),
        at_least("share of the time under a kernel", found["kernels_busy"], 0.98),
    ]
    waits = ", ".join(f"{name} {count}" for name, count in found["waits"].items()) or "none"
    return Report(data=found, tables=[table], targets=targets, notes=[f"Calls that wait: {waits}."])
