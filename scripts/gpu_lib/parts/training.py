"""A real training loop: GPT-2 124M, bf16, compiled, fed in four ways, with and without `loss.item()`."""

from __future__ import annotations
