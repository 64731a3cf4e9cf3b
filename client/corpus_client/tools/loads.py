"""Work for a device, of a length that can be chosen: matrix products, and a training step around them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from corpus_client.tools.timing import Meter

WIDTHS = {"cuda": (4096, 2048, 1024, 512), "cpu": (256, 128, 64)}
FINENESS = 8
"""A length is made of at least so many products, where the narrowest ones are short enough."""

PROBE = 8
"""Products timed together when one of them is measured."""

VOCABULARY, EMBEDDING, POSITIONS = 1024, 64, 256


class Products:
    """Products of two square matrices; each is one kernel, and queueing it waits for nothing."""

    def __init__(self, device: torch.device, width: int) -> None:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        self._left = torch.randn(width, width, device=device).to(dtype)
        self._right = torch.randn(width, width, device=device).to(dtype)
        self._out = torch.empty(width, width, device=device, dtype=dtype)
        self.width = width

    def run(self, count: int) -> None:
        """Queue `count` of them."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def seconds(self, meter: Meter) -> float:
        """How long one takes among others."""
        return meter.time(lambda: self.run(PROBE), repeats=5).done.median / PROBE


def products_for(seconds: float, meter: Meter) -> tuple[Products, int]:
    """Matrices, and how many products of them take about `seconds`; at least one."""
    for width in WIDTHS[meter.device.type]:
        products = Products(meter.device, width)
        each = products.seconds(meter)
        if each * FINENESS <= seconds:
            break
    return products, max(1, round(seconds / each))


class TrainStep:
    """A training step of about a chosen length: it reads every token, learns from some, and multiplies.

    A small model (embedding, linear layer, cross entropy) is trained on the first tokens of a batch;
    matrix products make up the rest of the time. Nothing in it waits for the device.

    Args:
        meter: of the device.
        sample: a batch as the step will see it, `(rows, seq_len + 1) int64`, on the device.
        seconds: the length wanted; a step cannot be shorter than its fixed part.
    """

    def __init__(self, meter: Meter, sample: torch.Tensor, seconds: float) -> None:
        self._model = nn.Sequential(nn.Embedding(VOCABULARY, EMBEDDING), nn.Linear(EMBEDDING, VOCABULARY))
        self._model.to(meter.device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self.token_sum = torch.zeros((), dtype=torch.int64, device=meter.device)
        self.fixed_seconds = meter.time(lambda: self._learn(sample), repeats=9).done.median
        rest = max(0.0, seconds - self.fixed_seconds)
        self._products, count = products_for(max(rest, seconds / FINENESS), meter)
        self.num_products = count if rest > 0 else 0
        self._correct(meter, sample, seconds)
        self.token_sum.zero_()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Queue a step; tokens: `(rows, seq_len + 1) int64`. Returns the loss, on the device."""
        loss = self._learn(tokens)
        self._products.run(self.num_products)
        return loss

    def _learn(self, tokens: torch.Tensor) -> torch.Tensor:
        self.token_sum += tokens.sum()
        row = tokens.flatten()[: POSITIONS + 1] % VOCABULARY
        loss = functional.cross_entropy(self._model(row[:-1]), row[1:])
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()

    def _correct(self, meter: Meter, sample: torch.Tensor, seconds: float) -> None:
        """Once more by the whole step: parts that overlap add up to less than their sum."""
        whole = meter.time(lambda: self(sample), repeats=9).done.median
        if self.num_products and whole > self.fixed_seconds:
            each = (whole - self.fixed_seconds) / self.num_products
            self.num_products = max(0, self.num_products + round((seconds - whole) / each))
