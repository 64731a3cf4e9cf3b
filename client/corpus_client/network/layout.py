"""The arrays beside the first one of a body, which a request names in `with`; no I/O.

Each begins at a multiple of 8 bytes. Two steps of three rows of five tokens, with their sources:

    bytes  0 to 60     tokens     (2, 3, 5) uint16
           60 to 64    zeros
           64 to 76    sources    (2, 3) uint16

Slots and staging buffers hold arrays in the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 8

ITEM_BYTES: Mapping[str, int] = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8, "float16": 2}
"""Bytes of one item, by the name in `Corpus-Dtype` or `Corpus-Arrays`."""


class Beside(NamedTuple):
    """An array that `with` may name: dtype, and 1 for an item a row or 2 for an item a token."""

    name: str
    dtype: str
    num_dims: int


BESIDE: Mapping[str, Beside] = {
    "sources": Beside("sources", "uint16", 1),
    "loss_mask": Beside("loss_mask", "uint8", 2),
}
"""By name. A loss mask is float16 where one of the plan's corpora holds weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """An array beside the first one."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes without what aligns the next one."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {','.join(map(str, self.shape))}"


def arrays_of(beside: Iterable[Beside], num_steps: int, shape: tuple[int, int]) -> tuple[Array, ...]:
    """Return the arrays of steps with batches of this shape: rows and tokens of a row."""
    return tuple(
        Array(name=each.name, dtype=each.dtype, shape=(num_steps, *shape[: each.num_dims])) for each in beside
    )


def starts(first_bytes: int, arrays: Sequence[Array]) -> list[int]:
    """Return the byte at which each array begins, behind a first one of `first_bytes`; then the end."""
    found, end = [], first_bytes
    for array in arrays:
        end += -end % ALIGNMENT
        found.append(end)
        end += array.num_bytes
    return [*found, end]


def parts(
    body: memoryview, arrays: Sequence[Array], first_bytes: int = 0
) -> Iterator[tuple[tuple[int, ...], str, memoryview]]:
    """Yield shape, dtype and bytes of the arrays of a body, as `numpy.ndarray` takes them.

    first_bytes: of the first array, where that is not among them.
    """
    begins = zip(arrays, starts(first_bytes, arrays), strict=False)
    for array, start in begins:
        yield array.shape, array.dtype, body[start : start + array.num_bytes]


def batch_bytes(beside: Sequence[Beside], shape: tuple[int, int], token_bytes: int) -> int:
    """Return the most bytes that a step takes, alone or among others."""
    sizes = [math.prod(shape) * token_bytes, *(array.num_bytes for array in arrays_of(beside, 1, shape))]
    return sizes[0] if len(sizes) == 1 else sum(size + -size % ALIGNMENT for size in sizes)
