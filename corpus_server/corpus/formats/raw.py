"""Headerless tokens: nanoGPT's `train.bin`, `.raw`, `.tokens`.

Such a file does not say its dtype: the user does, else it is uint16. A guess that the first tokens
contradict is refused.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

import numpy as np

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    TOKEN_DTYPES,
    Format,
    Run,
    ShardLayout,
    TokenDtype,
    build_text,
    whole_number,
    with_dtype,
)

# In a folder only files of these names are read as raw tokens: a stray file must not become a shard.
_SUFFIXES: Final = (".bin", ".raw", ".tokens")

_SAMPLE_BYTES: Final = 4096
_MIN_SAMPLE_BYTES: Final = 512
_MIN_TEXT_BYTES: Final = 64  # 32 tokens of a vocabulary of 50,000 look like text once in 10^17 times
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def headerless_layout(
    file: OpenFile, dtype: TokenDtype | None, in_folder: bool, *, name: str, reason: str
) -> ShardLayout:
    """Return the layout of a file of nothing but tokens: uint16 if no dtype is said and they look like it."""
    if dtype is None:
        _check_guess(file, in_folder)
        dtype, reason = TOKEN_DTYPES["uint16"], f"{reason}; no dtype was said, so uint16"
    remedy = f"say its dtype ({ACCEPTED_DTYPES}), or copy it again if the copy was interrupted"
    num_tokens = whole_number(file, dtype.itemsize, f"{dtype.name} tokens", remedy)
    return ShardLayout(format=name, reason=reason, dtype=dtype, runs=(Run(0, num_tokens),))


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout:
    if in_folder and file.path.suffix not in _SUFFIXES:
        raise file.unreadable(
            "is neither a known token file nor a known side file",
            f"move it out of the corpus folder, or name raw tokens {', '.join(_SUFFIXES)}",
        )
    return headerless_layout(file, dtype, in_folder, name="raw", reason="no known header: nothing but tokens")


def _check_guess(file: OpenFile, in_folder: bool) -> None:
    """Refuse to read as uint16 what its first tokens show to be something else."""
    path = file.path.parent if in_folder else file.path
    sample = file.head(_SAMPLE_BYTES)
    if len(sample) >= _MIN_TEXT_BYTES and _is_text(sample):
        raise file.unreadable(
            "its bytes are printable text, and no dtype was given",
            f"{build_text(file.path)}; or serve its bytes as tokens: {with_dtype(path, 'uint8')} "
            "(or dtype=uint16 if that is really meant)",
        )
    if len(sample) < _MIN_SAMPLE_BYTES:
        return
    # Tokens of 4 bytes, read as uint16, show at once: every second one is almost zero.
    pairs = np.frombuffer(sample, "<u2", count=len(sample) // 8 * 4).reshape(-1, 4)
    if np.median(pairs[:, 0]) >= 256 and pairs[:, [1, 3]].max() < 32:
        if not pairs[:, 2].any():
            raise file.unreadable(
                "its tokens look like int64, which is not served",
                "write them as uint16 or uint32: numpy.fromfile(path, 'int64').astype('uint32').tofile(new)",
            )
        raise file.unreadable(
            "its tokens look like uint32, but no dtype was given and the default is uint16",
            f"name it {with_dtype(path, 'uint32')} (or dtype=int32; or dtype=uint16 if that is really meant)",
        )


def _is_text(sample: bytes) -> bool:
    """Tell whether bytes are UTF-8 without control characters; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return _CONTROL.search(sample) is None


FORMAT: Final = Format(read=_read)
