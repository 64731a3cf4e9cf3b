"""Feed a device in different ways, one generator each: inputs and targets as int64 there, step after step.

All take the same windows of the same tokens, as they are stored, and widen them on the device, so that what
differs is the way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from corpus_client.loader import CorpusLoader
from corpus_client.tools.timing import Clock
from corpus_client.tools.transfer import Kind, host_memory
from scripts.gpu_lib.full_slots import Pair, full_slots

Batches = Generator[Pair, None, None]


class Feed(Dataset[torch.Tensor]):
    """What a way needs. Item n is the batch of step n: random windows, in fresh pageable memory.

    Args:
        tokens: `(num_tokens,) uint16`, which windows are taken from, by all ways but the loader.
        rows, window: of a batch, `(rows, window) uint16`; window is seq_len + 1.
        open_loader: makes a loader of a running server; None: there is no server.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.uint16],
        *,
        rows: int,
        window: int,
        device: torch.device,
        workers: int = 2,
        open_loader: Callable[[], CorpusLoader] | None = None,
    ) -> None:
        self._tokens = tokens
        self.rows, self.window = rows, window
        self.device, self.workers, self.open_loader = device, workers, open_loader

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, step: int) -> torch.Tensor:
        windows = np.lib.stride_tricks.sliding_window_view(self._tokens, self.window)
        starts = np.random.default_rng(step).integers(0, len(windows), self.rows)
        return torch.from_numpy(windows[starts])

    def send(self, stored: torch.Tensor, *, non_blocking: bool) -> Pair:
        """Return a batch on its way to the device, or there, and widened on it."""
        tokens = stored.to(self.device, non_blocking=non_blocking).to(torch.int64)
        return tokens[:, :-1], tokens[:, 1:]


def pageable(feed: Feed) -> Batches:
    """Call `batch.to(device)`."""
    for step in count():
        yield feed.send(feed[step], non_blocking=False)


def through_locked(feed: Feed, *, kind: Kind, non_blocking: bool) -> Batches:
    """Copy into page-locked memory that was allocated once, then call `batch.to(device)`.

    Two buffers take turns; one is written to again when the transfer out of it is done.
    """
    like = feed[0]
    buffers = [host_memory(kind, like.nbytes, feed.device).view(like.dtype).view(like.shape) for _ in "ab"]
    clock, events = Clock(feed.device), [None, None]
    for step in count():
        stored, buffer, event = feed[step], buffers[step % 2], events[step % 2]
        if event is not None:
            event.synchronize()
        np.copyto(buffer.numpy(), stored.numpy())
        batch = feed.send(buffer, non_blocking=non_blocking)
        events[step % 2] = clock.event()
        yield batch


def dataloader(feed: Feed) -> Batches:
    """Use torch's DataLoader: processes make whole batches, a thread copies them into page-locked memory."""
    loader: DataLoader[torch.Tensor] = DataLoader(
        feed, batch_size=None, num_workers=feed.workers, pin_memory=feed.device.type != "cpu"
    )
    for stored in loader:
        yield feed.send(stored, non_blocking=True)


def corpus_loader(feed: Feed) -> Batches:
    """Use CorpusLoader with a running server."""
    if feed.open_loader is None:
        raise ValueError("corpus-loader needs a feed with open_loader, got none")
    with feed.open_loader() as loader:
        for batch in loader:
            yield batch.inputs, batch.targets


def from_full_slots(feed: Feed) -> Batches:
    """Use the loader's device half over slots that hold their tokens already."""
    with full_slots(feed.device, feed[0], torch.int64) as take:
        while True:
            yield take()


def constant(feed: Feed) -> Batches:
    """Use one batch that is there before the first step."""
    batch = feed.send(feed[0], non_blocking=False)
    while True:
        yield batch


class Way(NamedTuple):
    """A way of feeding a device; titles begin with the letters that docs/gpu.md gives them."""

    title: str
    run: Callable[[Feed], Batches]


_pinned = partial(through_locked, kind="torch-pinned")
_registered = partial(through_locked, kind="registered")

WAYS = {
    "pageable": Way("(a) pageable memory, blocking copy", pageable),
    "pinned": Way("(b) torch-pinned memory, blocking copy", partial(_pinned, non_blocking=False)),
    "pinned-async": Way(
        "(c) torch-pinned memory, non_blocking=True, nothing ahead", partial(_pinned, non_blocking=True)
    ),
    "registered-async": Way(
        "(c') the same from registered memory, the loader's own", partial(_registered, non_blocking=True)
    ),
    "dataloader": Way("(d) torch DataLoader, workers and pin_memory", dataloader),
    "corpus-loader": Way("(e) CorpusLoader from a server", corpus_loader),
    "full-slots": Way("(e') CorpusLoader's device half, slots already full", from_full_slots),
    "constant": Way("(f) one batch that is there already", constant),
}
"""In the order of the tables; the last one is what the others are compared with."""

LOCKED = ("pinned", "pinned-async", "registered-async")
"""On the CPU, where nothing is page-locked, these are the first way."""
