"""Loss masks: one byte for each token of a file, in a file beside it. 0: the token is no target of training.

A mask is an array of bool or uint8, as NPY (`numpy.save`) or without a header (`array.tofile`); other
formats have names of their own for it, see `Format.mask_names`. Of a file of several runs, it covers the
tokens of all runs, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.layout import COPY_AGAIN, Format, Run, ShardLayout, TokenDtype
from corpus_server.corpus.formats.npy import read_array

MASK_DTYPE: Final[TokenDtype] = np.dtype("?")
"""Tokens have another one, so that a fingerprint cannot take one for the other."""

_SUFFIX: Final = ".mask.npy"
_DTYPES: Final = {"bool": np.dtype("?"), "uint8": np.dtype("u1")}
_SAMPLE_BYTES: Final = 4096  # of each end


def mask_layout(file: OpenFile, num_tokens: Sequence[int]) -> ShardLayout:
    """Return where the masks of the runs of a token file lie, given the tokens of each run.

    Raises:
        UnreadableCorpus: it has not one byte a token, or does not look like a mask.
    """
    remedy = f"{COPY_AGAIN}; or leave all masks of the corpus out (mask=no)"
    array = read_array(file, _DTYPES, "a loss mask must be bool or uint8", cast_to="bool")
    start, total = 0 if array is None else array.runs[0].data_offset, sum(num_tokens)
    if (count := file.size_bytes - start) != total:
        raise file.unreadable(
            f"holds {count} bytes, the file beside it {total} tokens: one byte each", remedy
        )
    for offset in {start, max(start, file.size_bytes - _SAMPLE_BYTES)}:
        sample = np.frombuffer(file.read(offset, min(_SAMPLE_BYTES, file.size_bytes - offset)), np.uint8)
        if (strange := np.flatnonzero(sample > 1)).size:
            at = int(strange[0])
            what = f"expected bytes of 0 and 1, byte {offset + at} is {sample[at]}: is it a loss mask?"
            raise file.unreadable(what, remedy)
    runs = tuple(map(Run, accumulate(num_tokens, initial=start), num_tokens))
    return ShardLayout(format="mask", reason="named after a token file", dtype=MASK_DTYPE, runs=runs)


def mask_name(name: str) -> str:
    """Return the name of the loss mask beside a token file that has no name of its format for it."""
    return f"{name}{_SUFFIX}"


# Not a token format; listed so that folders know the suffix.
FORMAT: Final = Format(
    read=lambda file, dtype, in_folder: None,
    loss_masks={f"*{_SUFFIX}": "a loss mask"},
    mask_names=lambda name: [mask_name(name)],
)
