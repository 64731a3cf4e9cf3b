"""Loss masks: a number for each token of a file, in a file beside it. 0: the token is no target of training.

A mask is an array of bool or uint8, as NPY (`numpy.save`) or without a header (`array.tofile`); or of
float16, as NPY: then it holds weights, by which the losses of the tokens are multiplied. Other formats have
names of their own for it, see `Format.mask_names`. Of a file of several runs, it covers the tokens of all
runs, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.layout import COPY_AGAIN, Format, Run, ShardLayout, TokenDtype
from corpus_server.corpus.formats.npy import read_array

MASK_DTYPE: Final[TokenDtype] = np.dtype("?")
WEIGHT_DTYPE: Final[np.dtype[np.float16]] = np.dtype("<f2")
MASK_DTYPES: Final[frozenset[np.dtype[Any]]] = frozenset({MASK_DTYPE, WEIGHT_DTYPE})
"""Tokens have others, so that a fingerprint cannot take one for the other."""

MASK_NAMES: Final = frozenset(each.name for each in MASK_DTYPES)
MAX_WEIGHT: Final = 65504.0
"""The largest of float16."""

_SUFFIX: Final = ".mask.npy"
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "bool": MASK_DTYPE,
    "uint8": np.dtype("u1"),
    "float16": WEIGHT_DTYPE,
}
_SAMPLE_BYTES: Final = 4096  # of each end


def mask_layout(file: OpenFile, num_tokens: Sequence[int]) -> ShardLayout:
    """Return where the masks of the runs of a token file lie, given the tokens of each run.

    Raises:
        UnreadableCorpus: it has not one number a token, or does not look like a mask.
    """
    remedy = f"{COPY_AGAIN}; or leave all masks of the corpus out (mask=no)"
    expected = "a loss mask must be bool or uint8, or float16 for weights"
    array = read_array(
        file, _DTYPES, expected, cast_to=lambda found: "float16" if found.kind == "f" else "bool"
    )
    start, total = 0 if array is None else array.runs[0].data_offset, sum(num_tokens)
    dtype = WEIGHT_DTYPE if array is not None and array.dtype == WEIGHT_DTYPE else MASK_DTYPE
    size = dtype.itemsize
    if (count := file.size_bytes - start) != total * size:
        each = "one byte" if size == 1 else f"{size} bytes"
        raise file.unreadable(f"holds {count} bytes, the file beside it {total} tokens: {each} each", remedy)
    for offset in {start, max(start, file.size_bytes - _SAMPLE_BYTES)}:
        sample = file.read(offset, min(_SAMPLE_BYTES, file.size_bytes - offset))
        if (strange := find_strange(sample, dtype)) is not None:
            at, what = strange
            raise file.unreadable(f"{what} at byte {offset + at * size}: is it a loss mask?", remedy)
    offsets = (start + first * size for first in accumulate(num_tokens, initial=0))
    runs = tuple(map(Run, offsets, num_tokens))
    return ShardLayout(format="mask", reason="named after a token file", dtype=dtype, runs=runs)


def find_strange(data: bytes | memoryview, dtype: np.dtype[Any]) -> tuple[int, str] | None:
    """Return the place of the first number that no mask holds, and what is wrong; None: all are right."""
    numbers: NDArray[Any] = np.frombuffer(data, np.uint8 if dtype == MASK_DTYPE else dtype)
    is_right = numbers <= 1 if dtype == MASK_DTYPE else (numbers >= 0) & np.isfinite(numbers)
    if is_right.all():
        return None
    at = int(is_right.argmin())
    expected = "bytes of 0 and 1" if dtype == MASK_DTYPE else "finite weights of at least 0"
    return at, f"expected {expected}, got {numbers[at]}"


def sent_as(dtype: np.dtype[Any]) -> Literal["uint8", "float16"]:
    """Return the name of the type in which masks of a type are sent: bool is sent as uint8."""
    return "float16" if dtype == WEIGHT_DTYPE else "uint8"


def mask_name(name: str) -> str:
    """Return the name of the loss mask beside a token file that has no name of its format for it."""
    return f"{name}{_SUFFIX}"


# Not a token format; listed so that folders know the suffix.
FORMAT: Final = Format(
    read=lambda file, dtype, in_folder: None,
    loss_masks={f"*{_SUFFIX}": "a loss mask"},
    mask_names=lambda name: [mask_name(name)],
)
