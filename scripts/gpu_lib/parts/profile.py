"""What torch's profiler sees of a training run: the proof that copies run beside the kernels."""

from __future__ import annotations
