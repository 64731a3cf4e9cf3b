"""The ways of feeding a device, one generator each: `(rows, seq_len + 1) int64` there, step after step.

All take the same windows from the same file, as they are stored, and widen them on the device, so that
what differs is the way. `Feed.record` draws what they do.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from corpus_client import errors
from corpus_client.buffers import Slot
from corpus_client.device import open_device
from corpus_client.fetcher import Span
from corpus_client.loader import CorpusLoader
from corpus_client.pipeline import Pipeline
from corpus_client.schedule import Stretch
from corpus_client.tools.recording import Recorder
from corpus_client.tools.timeline import BUS, FETCHER, LOOP

Batches = Generator[torch.Tensor, None, None]
NUM_SLOTS = 4
NO_STEP = -1
TRACED_STEPS = 32
DTYPES = ("uint8", "uint16", "uint32", "int32")


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Headerless tokens in a file, of which each step takes random windows.

    Args:
        dtype: numpy name of the tokens.
        rows, window: of a batch; window is seq_len + 1.
    """

    path: Path
    dtype: str
    rows: int
    window: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise errors.InvalidArgument(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        try:
            num_tokens = self.path.stat().st_size // np.dtype(self.dtype).itemsize
        except OSError as error:
            raise errors.InvalidArgument(
                f"a token file must be readable, got {self.path}: {error}"
            ) from error
        if num_tokens < self.window:
            raise errors.DataTooShort(
                f"{self.path} must hold a window of {self.window} tokens, it holds {num_tokens}"
            )

    @property
    def batch_bytes(self) -> int:
        """Of a batch as stored."""
        return self.rows * self.window * np.dtype(self.dtype).itemsize

    @cached_property
    def _windows(self) -> npt.NDArray[np.integer]:
        """Of this process: a worker maps the file itself."""
        tokens = np.memmap(self.path, self.dtype, "r")
        return np.lib.stride_tricks.sliding_window_view(tokens, self.window)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_windows"}

    def batch(self, step: int) -> torch.Tensor:
        """The windows of a step, `(rows, window)` as stored, in fresh pageable memory."""
        draw = np.random.default_rng(step)
        starts = draw.integers(0, len(self._windows), self.rows)
        return torch.from_numpy(self._windows[starts])


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """What a way needs.

    Args:
        tokens: where windows come from.
        device: where batches go.
        record: what is drawn.
        workers: processes of torch's DataLoader.
        url, corpus: of a running server; None: there is none.
    """

    tokens: TokenFile
    device: torch.device
    record: Recorder
    workers: int = 2
    url: str | None = None
    corpus: str | None = None


def pageable(feed: Feed) -> Batches:
    """(a) `batch.to(device)`."""
    for step in count():
        with feed.record.host(LOOP, "fetch", step):
            stored = feed.tokens.batch(step)
        yield _sent(feed, step, stored, non_blocking=False)


def pinned(feed: Feed) -> Batches:
    """(b) Copied into page-locked memory that was allocated once, then `batch.to(device)`."""
    return _through_pinned(feed, non_blocking=False)


def pinned_async(feed: Feed) -> Batches:
    """(c) The same with `non_blocking=True`."""
    return _through_pinned(feed, non_blocking=True)


def _through_pinned(feed: Feed, *, non_blocking: bool) -> Batches:
    """Two buffers take turns; one is written to again when the transfer out of it is done."""
    locked = feed.device.type == "cuda"
    buffers = [torch.empty_like(feed.tokens.batch(0), pin_memory=locked) for _ in range(2)]
    events: list[torch.cuda.Event | None] = [None, None]
    for step in count():
        with feed.record.host(LOOP, "fetch", step):
            stored = feed.tokens.batch(step)
        buffer, event = buffers[step % 2], events[step % 2]
        if event is not None:
            with feed.record.host(LOOP, "wait", step):
                event.synchronize()
        with feed.record.host(LOOP, "copy", step):
            np.copyto(buffer.numpy(), stored.numpy())
        batch = _sent(feed, step, buffer, non_blocking=non_blocking)
        if locked and non_blocking:
            events[step % 2] = _recorded_event()
        yield batch


def dataloader(feed: Feed) -> Batches:
    """(d) torch's DataLoader: processes make whole batches, a thread copies them into page-locked memory."""
    loader: DataLoader[torch.Tensor] = DataLoader(
        _Steps(feed.tokens),
        batch_size=None,
        num_workers=feed.workers,
        pin_memory=feed.device.type == "cuda",
    )
    batches = iter(loader)
    for step in count():
        with feed.record.host(LOOP, "wait", step):
            stored = next(batches)
        yield _sent(feed, step, stored, non_blocking=True)


class _Steps(Dataset[torch.Tensor]):
    """Step n is item n."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, step: int) -> torch.Tensor:
        return self._tokens.batch(step)


def corpus_loader(feed: Feed) -> Batches:
    """(e) CorpusLoader, from a running server."""
    if feed.url is None:
        raise errors.InvalidArgument("corpus-loader needs the URL of a server, got none")
    with CorpusLoader(
        feed.url,
        corpus=feed.corpus,
        seq_len=feed.tokens.window - 1,
        global_batch_size=feed.tokens.rows,
        device=feed.device,
        rank=0,
        world_size=1,
        trace_steps=TRACED_STEPS if feed.record.active else 0,
    ) as loader:
        try:
            for step in count():
                with feed.record.host(LOOP, "wait", step):
                    batch = next(loader)
                yield batch.tokens
        finally:
            if feed.record.active:
                _add_trace(loader, feed)


def _add_trace(loader: CorpusLoader, feed: Feed) -> None:
    """What the loader's own thread and its copies did, from its trace.

    On the CPU the widening is the loop's own work, within its wait.
    """
    with tempfile.TemporaryDirectory(prefix="corpus-client-") as folder:
        path = Path(folder) / "trace.json"
        loader.trace(path)
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        start, stop = event.get("ts", 0) / 1e6, (event.get("ts", 0) + event.get("dur", 0)) / 1e6
        arguments = event.get("args", {})
        if event.get("cat") == "fetcher" and event["name"] == "receive":
            feed.record.add(FETCHER, "fetch", NO_STEP, start, stop)
        elif event.get("cat") == "transfers" and feed.device.type != "cpu":
            feed.record.add(BUS, "transfer", int(arguments["first_step"]), start, stop)


def full_slots(feed: Feed) -> Batches:
    """(e') The loader's pipeline over slots that hold their tokens already: its device half alone."""
    sample = feed.tokens.batch(0)
    shape, num_bytes = sample.shape, sample.nbytes
    storage = torch.empty(NUM_SLOTS * num_bytes, dtype=torch.uint8, pin_memory=feed.device.type == "cuda")
    view = memoryview(storage.numpy().data)
    cuts = range(0, len(view), num_bytes)
    slots = [Slot(view[at : at + num_bytes], storage[at : at + num_bytes]) for at in cuts]
    for number, slot in enumerate(slots):
        slot.view[:] = feed.tokens.batch(number).view(torch.uint8).numpy().data.cast("B")
    span = Span(
        stretches=(Stretch(start_step=0, stop_step=None, num_rows=shape[0]),),
        window=shape[1],
        dtype=sample.dtype,
        start_step=0,
        end_step=None,
        slot_bytes=num_bytes,
        in_flight=1,
    )
    device = open_device(feed.device, torch.int64)
    pipeline = Pipeline(_NothingToFetch(), slots, device, span)
    with closing(pipeline):
        for step in count():
            with feed.record.host(LOOP, "wait", step):
                device.pace()
                _, tokens = next(pipeline)
            yield tokens


class _NothingToFetch:
    """Leaves slots as they are."""

    def begin(self, start_step: int, num_steps: int, num_rows: int) -> None:
        pass

    def finish(self, ticket: object, view: memoryview) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def constant(feed: Feed) -> Batches:
    """(f) One batch, there before the first step."""
    batch = feed.tokens.batch(0).to(feed.device).to(torch.int64)
    while True:
        yield batch


FEEDS: dict[str, Callable[[Feed], Batches]] = {
    "pageable": pageable,
    "pinned": pinned,
    "pinned-async": pinned_async,
    "dataloader": dataloader,
    "corpus-loader": corpus_loader,
    "full-slots": full_slots,
    "constant": constant,
}
"""By the names of `timeline.WAYS`, and one of their own."""


@contextmanager
def opened(name: str, feed: Feed) -> Iterator[Batches]:
    """The batches of a way; its threads and processes end with the block."""
    batches = FEEDS[name](feed)
    try:
        yield batches
    finally:
        batches.close()


def _sent(feed: Feed, step: int, stored: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    """A batch on its way to the device, or there, and widened on it."""
    if feed.device.type == "cpu":
        with feed.record.host(LOOP, "copy", step):
            return stored.to(torch.int64)
    with feed.record.host(LOOP, "wait", step), feed.record.device(BUS, "transfer", step):
        there = stored.to(feed.device, non_blocking=non_blocking)
    return there.to(torch.int64)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
