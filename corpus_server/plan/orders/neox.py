"""Order `neox`: the rows of GPT-NeoX's datasets, element for element, as Pythia was trained.

Checked against `megatron/data` of GPT-NeoX 1.0 (Pythia's) and of its main branch in 2026, whose index maps
are the same; see `samples.py`. Unlike Megatron-Core's, all documents of all epochs are shuffled together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Final

import numpy as np

from corpus_server.plan.orders.samples import SampleOrder

_SURPLUS: Final = 1.005
"""Samples that are drawn of each source of a blend, for each that is expected to be used."""


class NeoxOrder(SampleOrder):
    """The order of GPT-NeoX's GPT2Dataset and BlendableDataset."""

    name = "neox"
    sentence = "the rows of GPT-NeoX's datasets, element for element, for a fixed number of samples"
    maker = "GPT-NeoX"
    too_few = "GPT-NeoX then gives some again, which this order does not; ask for fewer num_samples"
    is_last_apart = False

    @staticmethod
    def shares(weights: Sequence[float]) -> tuple[list[float], list[float]]:
        """See `SampleOrder.shares`: Python's sum, from left to right, and then NumPy's."""
        total = reduce(operator.add, weights)  # `sum` of Python 3.12 rounds otherwise
        once = [weight / total for weight in weights]
        found = np.array(once, dtype=np.float64)
        again: list[float] = (found / np.sum(found)).tolist()
        return once, again

    @staticmethod
    def num_drawn(num_samples: int, share: float) -> int:
        """See `SampleOrder.num_drawn`."""
        return math.ceil(num_samples * share * _SURPLUS)

    @staticmethod
    def split_bounds(split: Sequence[float], num_documents: int) -> list[int]:
        """See `SampleOrder.split_bounds`: each share is rounded, and all ends move by what that leaves."""
        shares = [*split, 0.0, 0.0][:3]
        total = reduce(operator.add, shares)
        ends = list(accumulate((round(share / total * float(num_documents)) for share in shares), initial=0))
        return [0, *(end - (ends[-1] - num_documents) for end in ends[1:])]

    def num_given(self, drawn: Sequence[int]) -> int:
        """See `SampleOrder.num_given`: a dataset of n samples says that it has n - 1."""
        return min(self.num_samples, sum(drawn) - len(drawn))
