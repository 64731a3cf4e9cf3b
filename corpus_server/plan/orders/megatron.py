"""Order `megatron`: the rows of Megatron-Core's datasets, element for element, for a fixed number of samples.

Checked against `megatron/core/datasets` of Megatron-Core 0.16; see `samples.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from corpus_server.plan.orders.samples import SampleOrder

_SURPLUS: Final = 0.005
"""So many more samples are drawn of each source of a blend than are expected to be used."""


class MegatronOrder(SampleOrder):
    """The order of Megatron-Core's GPTDataset and BlendedDataset."""

    name = "megatron"
    sentence = "the rows of Megatron-Core's datasets, element for element, for a fixed number of samples"
    maker = "Megatron"
    too_few = "Megatron refuses this blend, too"
    is_last_apart = True

    @staticmethod
    def shares(weights: Sequence[float]) -> tuple[list[float], list[float]]:
        """See `SampleOrder.shares`: Megatron divides by the sum once, and then again."""
        return (once := _normalised(weights)), _normalised(once)

    @staticmethod
    def num_drawn(num_samples: int, share: float) -> int:
        """See `SampleOrder.num_drawn`."""
        return math.ceil(math.ceil(num_samples * share) * (1 + _SURPLUS))

    @staticmethod
    def split_bounds(split: Sequence[float], num_documents: int) -> list[int]:
        """See `SampleOrder.split_bounds`: each sum of shares is rounded."""
        shares = np.zeros(3)
        shares[: len(split)] = split
        ends = [0.0]
        for share in (shares / shares.sum()).tolist():
            ends.append(ends[-1] + share)
        return [round(end * float(num_documents)) for end in ends]


def _normalised(weights: Sequence[float]) -> list[float]:
    found = np.array(weights, dtype=np.float64)
    proportions: list[float] = (found / np.sum(found)).tolist()
    return proportions
