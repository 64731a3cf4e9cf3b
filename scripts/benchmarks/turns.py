"""Record the turns of servers' event loops, outside of Python: see `turns.c`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt

SOURCE: Final = Path(__file__).with_suffix(".c")
LIBRARY: Final = "turns.so"
TURN: Final = np.dtype([("began", "u8"), ("took", "u4"), ("ran", "u4"), ("waited", "u4"), ("events", "u4")])
"""Of `turns.c`: nanoseconds of the monotonic clock; `ran` is CPU, `waited` is for the interpreter's lock."""


class Recorded:
    """The turns of a worker.

    Args:
        file: that `turns.c` writes.
    """

    def __init__(self, file: Path) -> None:
        mapped = np.memmap(file, np.uint8, "r")
        self._count, self._turns = mapped[:8].view(np.uint64), mapped[8:].view(TURN)

    def mark(self) -> int:
        """Return how many turns there were so far."""
        return int(self._count[0])

    def since(self, mark: int) -> npt.NDArray[Any]:
        """Return the turns since a mark, `(number,) TURN`; there is at least one, /healthz makes some."""
        return self._turns[np.arange(mark, self.mark()) % len(self._turns)]


@contextmanager
def recorder() -> Iterator[Path]:
    """Yield a folder with `turns.c`, compiled, for the files of the processes that it records.

    Raises:
        SystemExit: there is no C compiler.
    """
    if (compiler := shutil.which("cc")) is None:
        raise SystemExit("no C compiler (cc) is installed")
    with tempfile.TemporaryDirectory(prefix="bench-turns-") as folder:
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", f"{folder}/{LIBRARY}", str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        yield Path(folder)


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Have processes that are started in the block record their turns."""
    with mock.patch.dict(os.environ, {"LD_PRELOAD": str(folder / LIBRARY), "TURNS_FOLDER": str(folder)}):
        yield


def recorded(folder: Path, pids: Sequence[int]) -> Recorded:
    """Return the turns of the only worker among processes."""
    (file,) = [folder / str(pid) for pid in pids if (folder / str(pid)).exists()]
    return Recorded(file)
