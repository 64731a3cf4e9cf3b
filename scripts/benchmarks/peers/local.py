"""Deliver without a server, as a training process that holds the corpus itself does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from scripts.benchmarks.contender import Shape


class NanoGpt:
    """Deliver as nanoGPT's train.py does: inputs and targets as int64 tensors from a memmap."""

    def __init__(self, name: str, path: Path, shape: Shape) -> None:
        self.name = name
        self.pids: list[int] = []
        self.ahead_bytes = 0
        self._path, self._rows, self._seq_len = path, shape.rows, shape.length - 1
        self._draw = torch.Generator().manual_seed(0)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        # The memmap is made anew for every batch, as nanoGPT does to avoid a leak.
        data = np.memmap(self._path, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - self._seq_len, (self._rows,), generator=self._draw).tolist()
        x = torch.stack([torch.from_numpy(data[i : i + self._seq_len].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + self._seq_len].astype(np.int64)) for i in ix])
        return x, y

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        draw = torch.Generator().manual_seed(0)
        num_tokens = self._path.stat().st_size // 2
        for _ in range(step + 1):
            starts = torch.randint(num_tokens - self._seq_len, (self._rows,), generator=draw)
        return starts.numpy()

    def close(self) -> None:
        pass


class Gather:
    """Gather with NumPy into a new uint16 array: no server on the same host can beat it.

    `source="indices"` is compared with it: it gathers the same tokens in this process too, from windows that
    the server names.
    """

    def __init__(self, name: str, path: Path, shape: Shape) -> None:
        self.name = name
        self.pids: list[int] = []
        self.ahead_bytes = 0
        self._rows = shape.rows
        data = np.memmap(path, dtype=np.uint16, mode="r")
        self._view = np.lib.stride_tricks.sliding_window_view(data, shape.length)
        self._draw = np.random.default_rng(0)

    def next(self) -> torch.Tensor:
        return torch.from_numpy(self._view[self._draw.integers(0, len(self._view), self._rows)])

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        draw = np.random.default_rng(0)
        for _ in range(step + 1):
            starts = draw.integers(0, len(self._view), self._rows)
        return starts

    def close(self) -> None:
        pass


class WidenedGather(Gather):
    """Gather, and widen inputs and targets into new int64 tensors: what is short to write."""

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        windows = self._view[self._draw.integers(0, len(self._view), self._rows)]
        inputs, targets = (half.astype(np.int64, order="C") for half in (windows[:, :-1], windows[:, 1:]))
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class WidenedInto(Gather):
    """Gather and widen into the same memory each time, which spares page faults; the last batch is gone."""

    def __init__(self, name: str, path: Path, shape: Shape) -> None:
        super().__init__(name, path, shape)
        self._pair = np.empty((2, shape.rows, shape.length - 1), np.int64)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        windows = self._view[self._draw.integers(0, len(self._view), self._rows)]
        self._pair[0], self._pair[1] = windows[:, :-1], windows[:, 1:]
        inputs, targets = torch.from_numpy(self._pair)
        return inputs, targets
