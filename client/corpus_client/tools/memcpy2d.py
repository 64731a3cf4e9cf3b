"""CUDA's strided transfer, which torch does not offer: the runtime that torch has loaded is called itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

HOST_TO_DEVICE = 1

CopyRows = Callable[[torch.Tensor, torch.Tensor], None]


def find(device: torch.device) -> CopyRows | None:
    """A function `copy(target, source)` for rows `(rows, n) uint8`, or None where there is no CUDA runtime.

    Both may be views with rows that lie apart; bytes within a row lie side by side. source: page-locked
    memory; target: on the device. It is queued on the current stream and not waited for.
    """
    library = _loaded_runtime() if device.type == "cuda" else None
    if library is None:
        return None
    function = ctypes.CDLL(library).cudaMemcpy2DAsync
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    function.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
    function.restype = ctypes.c_int

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        rows, width = source.shape
        status = function(
            target.data_ptr(),
            target.stride(0),
            source.data_ptr(),
            source.stride(0),
            width,
            rows,
            HOST_TO_DEVICE,
            torch.cuda.current_stream(device).cuda_stream,
        )
        if status:
            raise RuntimeError(f"cudaMemcpy2DAsync answered error {status}")

    return copy


def _loaded_runtime() -> str | None:
    """Path of the CUDA runtime in this process; a second copy of it would know nothing of torch's streams."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libcudart.so" in line)
    return next(paths, None)
