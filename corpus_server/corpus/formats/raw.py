"""Headerless tokens: nanoGPT's `train.bin`, `.raw`, `.tokens`.

Such a file does not say its dtype: the user does, else it is uint16. A guess that the first tokens
contradict is refused: those of other widths, negative ones, floating-point numbers, text.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    COPY_AGAIN,
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
_MOST_ID: Final = 2**21  # no vocabulary has so many
_LEAST_LABEL: Final = -1024  # labels say -1 or -100 for "no target"
_MAGNITUDES: Final = 1e-8, 1e8  # of numbers that people write; ids as floats among them
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def headerless_layout(
    file: OpenFile, dtype: TokenDtype | None, in_folder: bool, *, name: str, reason: str
) -> ShardLayout:
    """Return the layout of a file of nothing but tokens: uint16 if no dtype is said and they look like it."""
    if file.size_bytes == 0 and not in_folder:
        raise file.unreadable("is empty", COPY_AGAIN)
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
    halves = np.frombuffer(sample, "<u2", count=len(sample) // 8 * 4)
    if (halves == halves[0]).all():  # padding
        return
    really = f"name it {with_dtype(path, 'uint16')} if that is really meant"
    if (name := _floats(halves) or _integers(halves)) is None:
        return
    if name == "negative":
        raise file.unreadable(
            "its numbers look like int32 or int64 with negative ones, which no token has as its id",
            "write the ids alone as uint16 or uint32; what training leaves out is a loss mask beside them, "
            f"see docs/formats.md; or {really}",
        )
    if name == "uint32":
        raise file.unreadable(
            "its tokens look like uint32, but no dtype was given and the default is uint16",
            f"name it {with_dtype(path, 'uint32')} (or dtype=int32; or dtype=uint16 if that is really meant)",
        )
    raise file.unreadable(
        f"its tokens look like {name}, which is not served",
        f"write them as uint16 or uint32: numpy.fromfile(path, '{name}').astype('uint32').tofile(new); "
        f"or {really}",
    )


def _integers(halves: NDArray[np.uint16]) -> str | None:
    """Return what integers of 4 or 8 bytes a sample looks like: every second half is almost zero."""
    words, lows = halves.view("<i4").reshape(-1, 2), halves[::4]
    if not ((words >= _LEAST_LABEL) & (words < _MOST_ID)).all():
        return None
    if np.median(lows) < (256 if (words >= 2**16).any() else 1):  # small ids of 2 bytes, or padding
        return None
    if (words < 0).any():
        return "negative"
    return "uint32" if halves[2::4].any() else "int64"


def _floats(halves: NDArray[np.uint16]) -> str | None:
    """Return what floating-point numbers a sample looks like: all have magnitudes that people write."""
    for name, width in (("float32", 2), ("float64", 4)):
        # Ids that lie where the exponents of such numbers do, lie there in the other halves, too.
        sizes, shifted = _magnitudes(halves, name), _magnitudes(halves[1 : 1 - width], name)
        if (sizes[sizes != 0] > 0).all() and (sizes > 0).mean() > 0.5 > (shifted > 0).mean():
            return name
    return None


def _magnitudes(halves: NDArray[np.uint16], name: str) -> NDArray[np.floating[Any]]:
    """Return the magnitudes of floating-point numbers, -1 for those that nobody writes."""
    with np.errstate(all="ignore"):
        sizes = np.abs(halves.view(name))
        is_likely = (sizes == 0) | ((sizes > _MAGNITUDES[0]) & (sizes < _MAGNITUDES[1]))
    return np.where(is_likely, sizes, -1)


def _is_text(sample: bytes) -> bool:
    """Tell whether bytes are UTF-8 without control characters; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return _CONTROL.search(sample) is None


FORMAT: Final = Format(read=_read)
