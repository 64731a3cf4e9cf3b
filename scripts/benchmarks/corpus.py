"""Make the bench's corpus: a raw uint16 file of seeded tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

NAME = "bench"
"""What our servers call the corpus."""

VOCABULARY = 50_257
_PIECE = 1 << 24


def make(folder: Path, num_tokens: int) -> Path:
    """Return the file of `num_tokens` tokens; write it if it does not exist."""
    path = folder / f"bench_{num_tokens}.bin"
    if path.exists() and path.stat().st_size == 2 * num_tokens:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    rng = np.random.default_rng(0)
    with partial.open("wb") as file:
        for first in range(0, num_tokens, _PIECE):
            count = min(_PIECE, num_tokens - first)
            file.write(rng.integers(0, VOCABULARY, count, dtype=np.uint16).tobytes())
    partial.rename(path)
    return path


def warm(path: Path) -> None:
    """Read the file once: the page cache drops pages of idle files, and the disk would be measured."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 22)
        while file.readinto(buffer):
            pass


def windows_at(
    tokens: npt.NDArray[np.uint16], starts: npt.NDArray[np.int64], length: int
) -> npt.NDArray[np.uint16]:
    """Copy windows of `length` tokens, `(len(starts), length)`, C order."""
    return np.stack([tokens[start : start + length] for start in starts.tolist()])
