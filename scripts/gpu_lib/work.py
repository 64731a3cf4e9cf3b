"""Give a device work of a length that can be chosen: matrix products, and a training step of them."""

from __future__ import annotations

import torch

from corpus_client.tools.timing import Clock
from scripts.gpu_lib.full_slots import Pair

WIDTHS = {"cuda": (4096, 2048, 1024, 512), "cpu": (256, 128, 64)}
FINENESS = 8  # products of which a step is made at least, where the narrowest ones are short enough


class Products:
    """Products of two square matrices; each is one kernel, and queueing it waits for nothing."""

    def __init__(self, device: torch.device, width: int) -> None:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        self._left, self._right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        self._out = torch.empty(width, width, device=device, dtype=dtype)
        self.width = width

    def run(self, count: int = 1) -> None:
        """Queue `count` of them."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)


class TrainStep:
    """Read every token of a batch, then multiply matrices for the rest of a chosen time; wait for nothing.

    sample: inputs and targets as the step will see them, `(rows, seq_len) int64`, on the device.
    seconds: the length wanted; a step cannot be shorter than reading takes.
    """

    def __init__(self, clock: Clock, sample: Pair, seconds: float) -> None:
        self.token_sum = torch.zeros((), dtype=torch.int64, device=clock.device)
        self.num_products = 0
        left = seconds - clock.time(lambda: self(sample), repeats=9)[0].median
        for width in WIDTHS[clock.device.type] if left > 0 else ():
            self.products = Products(clock.device, width)
            each = clock.time(self.products.run, repeats=5, in_a_row=FINENESS)[0].median
            self.num_products = max(1, round(left / each))
            if self.num_products >= FINENESS:
                break
        self.token_sum.zero_()

    def __call__(self, batch: Pair) -> None:
        """Queue a step."""
        for tokens in batch:
            self.token_sum += tokens.sum()
        if self.num_products:
            self.products.run(self.num_products)
