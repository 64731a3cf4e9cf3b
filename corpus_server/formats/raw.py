"""Headerless tokens: nanoGPT's `train.bin`, OLMo's `.npy` dumps, datatrove's `.ds`.

The dtype cannot be seen in such a file: it comes from the caller, uint16 unless said otherwise.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from corpus_server.formats.layout import ACCEPTED_DTYPES, TOKEN_DTYPES, ShardLayout, TokenDtype, unreadable
from corpus_server.openfile import OpenFile

DEFAULT_DTYPE: Final = TOKEN_DTYPES["uint16"]

# Names under which uint16 would be a guess.
_NEEDS_DTYPE: Final = {
    ".ds": "datatrove stores uint16 or uint32 tokens (the token size stands in the .ds.metadata file)",
    ".txt": "text is not tokens (its bytes can be served with dtype uint8)",
    ".text": "text is not tokens (its bytes can be served with dtype uint8)",
}

_SAMPLE_BYTES: Final = 4096
_LEAST_SAMPLE_BYTES: Final = 512


def read(file: OpenFile, dtype: TokenDtype | None) -> ShardLayout:
    """Return the layout of a headerless file of `dtype` tokens (None: uint16)."""
    path = file.path
    if dtype is None:
        _check_guess(file)
        dtype = DEFAULT_DTYPE
    if file.size_bytes % dtype.itemsize:
        raise unreadable(
            path,
            f"{file.size_bytes} bytes are not a whole number of {dtype.name} tokens",
            f"say its dtype ({ACCEPTED_DTYPES}), or copy it again if the copy was interrupted",
        )
    return ShardLayout(
        path=path,
        format="raw",
        dtype=dtype,
        data_offset=0,
        num_tokens=file.size_bytes // dtype.itemsize,
    )


def _check_guess(file: OpenFile) -> None:
    """Refuse to read as uint16 what its name or its first tokens show to be something else."""
    path = file.path
    if reason := _NEEDS_DTYPE.get(path.suffix):
        raise unreadable(path, reason, f"say the dtype ({ACCEPTED_DTYPES})")
    if path.stem.endswith(("_text_document", "_text_sentence")):
        raise unreadable(
            path,
            f"named like one half of a Megatron dataset, but {path.stem}.idx is missing",
            f"put the index beside it, or say the dtype ({ACCEPTED_DTYPES}) to serve it as raw tokens",
        )
    sample = file.head(_SAMPLE_BYTES)
    if len(sample) < _LEAST_SAMPLE_BYTES:
        return
    # Tokens of 4 bytes read as uint16 show at once: every second one is (almost) zero.
    pairs = np.frombuffer(sample, "<u2", count=len(sample) // 8 * 4).reshape(-1, 4)
    if np.median(pairs[:, 0]) >= 256 and pairs[:, [1, 3]].max() < 32:
        if not pairs[:, 2].any():
            raise unreadable(
                path,
                "its tokens look like int64, which is not served",
                "write them as uint16 or uint32: numpy.fromfile(path, 'int64').astype('uint32').tofile(new)",
            )
        raise unreadable(
            path,
            "its tokens look like uint32, but no dtype was given and the default is uint16",
            "say dtype uint32 (or int32; or uint16 if that is really meant)",
        )
