"""The parts of a run, the most valuable first: the clock may end a run before the last ones.

Nothing of a part is imported before it is known that its packages are here.
"""

from __future__ import annotations

import importlib
from typing import Final, NamedTuple, cast

from scripts.gpu_lib.needs import CLIENT, CUDA, SERVER, TESTS
from scripts.gpu_lib.run import EXACT_STEPS, Part


class Listed(NamedTuple):
    """A part: one line of help, and the packages that it imports, with `CUDA` if it needs that."""

    help: str
    needs: tuple[str, ...]


PARTS: Final[dict[str, Listed]] = {
    'tests': Listed(help=f"the tests that need a GPU, of which nine compare {EXACT_STEPS} batches each; a skip is a failure", needs=(CUDA, *CLIENT, *SERVER, *TESTS)),
    'copies': Listed(help="copies from pageable, torch-pinned and registered memory, and the loader's call for a batch", needs=(CUDA, *CLIENT)),
    'training': Listed(help=(
    "GPT-2 124M, bf16, compiled: tokens/s, steps and stalls by way of feeding, with and without loss.item()"
), needs=(CUDA, *CLIENT, *SERVER)

ROWS, SEQ_LEN = (16, 64), 1024
QUICK_ROWS, QUICK_SEQ_LEN = (2,), 32
SECONDS, COMPILE_SECONDS = 4.0, 60.0
WARM_UP_STEPS = 5
WORKERS = 4
CONSTANT, LOADER = "constant", "CorpusLoader"
MAX_STALL_PERCENT = 1.0


def nanogpt(feed: Feed) -> Batches:
    """Do what nanoGPT's `get_batch` does: rows one by one to int64, pinned anew, copied without blocking."""
    data, block = feed.tokens, feed.window - 1
    while True:
        starts = torch.randint(len(data) - block, (feed.rows,)).tolist()
        x, y = (
            torch.stack(
                [torch.from_numpy(data[i + late : i + late + block].astype(np.int64)) for i in starts]
            )
            for late in (0, 1)
        )
        if feed.device.type != "cpu":
            x, y = x.pin_memory(), y.pin_memory()
        yield x.to(feed.device, non_blocking=True), y.to(feed.device, non_blocking=True)


WAYS: dict[str, Callable[[Feed], Batches]] = {
    CONSTANT: overlap.constant,
    LOADER: overlap.corpus_loader,
    "DataLoader": overlap.dataloader,
    "nanoGPT": nanogpt,
}


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each batch, way, and whether each step waits for its loss; a model for each batch."""
    seq_len = QUICK_SEQ_LEN if run.quick else SEQ_LEN
    for rows in QUICK_ROWS if run.quick else ROWS:
        trainer = cache(partial(Trainer, run.device, TINY if run.quick else GPT2_124M, seq_len))
        plan: dict[str, Any] = {"corpus": run.corpus, "seq_len": seq_len, "global_batch_size": rows}
        feed = Feed(
            np.random.default_rng(0).integers(0, 50_257, overlap.POOL_TOKENS, np.uint16),
            rows=rows,
            window=seq_len + 1,
            device=run.device,
            workers=1 if run.quick else WORKERS,
            open_loader=partial(open_loader, run.url, device=run.device, **plan),
        )
        seconds = 0.05 if run.quick else SECONDS
        for looks in (False, True):
            for name in WAYS:
                is_first = name == CONSTANT and not looks
                yield Cell(
                    name=f"{rows} x {seq_len}, {name}{', loss.item()' if looks else ''}",
                    seconds=COMPILE_SECONDS if is_first else 3 * SECONDS,
                    measure=partial(measure, trainer, feed, name, looks, seconds),
                )


def measure(make: Callable[[], Trainer], feed: Feed, name: str, looks: bool, seconds: float) -> Figures:
    """Train for some seconds.

    Returns: rows, seq_len, way, looks at each loss; num_parameters; first_batch_seconds since the way was
    begun; tokens_per_second; step and next, the spreads of a step's seconds and of the call for its batch.
    """
    trainer, clock = make(), Clock(feed.device)
    waits: list[float] = []
    ends = overlap.StepEnds(clock)
    began = time.perf_counter()
    with closing(WAYS[name](feed)) as batches:
        batch = next(batches)
        first = time.perf_counter() - began
        for _ in range(WARM_UP_STEPS):
            trainer(batch)
            batch = next(batches)
        clock.synchronize()
        stop = time.perf_counter() + seconds
        while len(ends) < 3 or time.perf_counter() < stop:
            asked = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - asked)
            loss = trainer(batch)
            if looks:
                loss.item()
            ends.note()
        steps = ends.seconds()
    return {
        "rows": feed.rows,
        "seq_len": feed.window - 1,
        "way": name,
        "looks": looks,
        "num_parameters": trainer.num_parameters,
        "first_batch_seconds": first,
        "tokens_per_second": feed.rows * (feed.window - 1) / float(np.mean(steps)),
        "step": asdict(Spread.of(steps)),
        "next": asdict(Spread.of(waits)),
    }


def stall(found: Figures, cells: Mapping[str, Figures]) -> float | None:
    """Return by how many percent a step is longer than that of a constant batch; None without one.

    Figures that were noted by hand may say `stall_percent` themselves.
    """
    if "stall_percent" in found:
        return float(found["stall_percent"])
    for each in cells.values():
        if each["way"] == CONSTANT and all(each[key] == found[key] for key in ("rows", "seq_len", "looks")):
            return 100 * float(each["tokens_per_second"] / found["tokens_per_second"] - 1)
    return None


def report(cells: Mapping[str, Figures]) -> Report:
    """Show a row for each cell, and bound the loader's stalls."""
    rows, targets = [], []
    for name, found in cells.items():
        waits = stall(found, cells)
        rows.append([
            name,
            f"{found['tokens_per_second'] / 1e3:,.0f}" if "tokens_per_second" in found else "",
            _milliseconds(found, "step", "median"),
            _milliseconds(found, "step", "p99"),
            _milliseconds(found, "next", "median"),
            "" if waits is None else f"{waits:+.1f}%",
            f"{found['first_batch_seconds']:.2f}" if "first_batch_seconds" in found else "",
        ])  # fmt: skip
        if found["way"] == LOADER and waits is not None:
            targets.append(at_most(f"stall of {name}", waits, MAX_STALL_PERCENT, "%"))
    columns = ["batch and way", "k tokens/s", "step p50 ms", "p99 ms", "next() ms", "stall", "first batch s"]
    table = Table(title="training GPT-2; stall against a constant batch", columns=columns, rows=rows)
    return Report(data=dict(cells), tables=[table], targets=targets)


def _milliseconds(found: Figures, what: str, which: str) -> str:
    return f"{1e3 * found[what][which]:.2f}" if which in found.get(what, {}) else ""),
    'profile': Listed(help=(
    "torch's profiler over steps of GPT-2: copies from pinned memory, on a stream of their own, under kernels"
), needs=(CUDA, *CLIENT, *SERVER)

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
    return Report(data=found, tables=[table], targets=targets, notes=[f"Calls that wait: {waits}."])),
    'graphs': Listed(help="a captured step that reads tensors which loader.next_into fills before each replay", needs=(CUDA, *CLIENT, *SERVER)),
    'stalls': Listed(help="how long training steps wait for data, by each way of feeding them", needs=(CUDA, *CLIENT, *SERVER)),
    'locking': Listed(help="how long it takes to page-lock memory and to unlock it, by size", needs=(CUDA, *CLIENT)),
    'groups': Listed(help="speed of the loader's copies by bytes of a group (GROUP_BYTES) and of all slots (prefetch_bytes)", needs=(CUDA, *CLIENT)),
    'delivered': Listed(help="tokens/s onto the GPU, of a loop that does nothing but ask for the next batch", needs=(CUDA, *CLIENT, *SERVER)),
    'server': Listed(help="one server with 1 to 8 workers and 1 to 8 clients, beside bare TCP; needs no GPU", needs=(*CLIENT, *SERVER)),
}


def load(name: str) -> Part:
    """Return the module of a part."""
    return cast("Part", importlib.import_module(f"scripts.gpu_lib.parts.{name}"))
