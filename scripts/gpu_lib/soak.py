"""A long run with random delays: every token compared on the device, memory looked at before and after."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from corpus_client import CorpusLoader, Staging
from scripts.gpu_lib.work import Products

ROWS, SEQ_LEN = 64, 1024
CHUNK = 100
"""Steps whose expected tokens are brought to the device together: nothing waits within a chunk."""

SETTLED = 0.1
"""Memory is first looked at when this share of the run is over."""


def mismatches(
    batches: Iterator[torch.Tensor],
    expected: Iterable[torch.Tensor | int],
    late: Callable[[], None],
    device: torch.device,
) -> torch.Tensor:
    """How many tokens differ, `() int64` on the device: counted there, nothing is waited for.

    Args:
        batches: one is taken for each that is expected.
        expected: a whole batch, or the one token that it is full of.
        late: called between taking a batch and reading it; makes the device late, or the loop.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for wanted in expected:
        tokens = next(batches)
        late()
        wrong += (tokens != wanted).sum()
    return wrong


def soak(url: str, corpus: str, local_root: Path, device: torch.device, num_steps: int) -> dict[str, Any]:
    """Compare the loader's batches with the same plan read from the local file, by other code.

    Returns:
        steps; mismatched_tokens; device_bytes and host_bytes, each `[early, at the end]`.
    """
    delays = random.Random(0)
    products = Products(device, 512)
    plan: dict[str, Any] = {"corpus": corpus, "seq_len": SEQ_LEN, "global_batch_size": ROWS, "seed": 7}
    plan["num_steps"] = num_steps
    mismatched = torch.zeros((), dtype=torch.int64, device=device)
    memory: list[tuple[int, int]] = []

    def late() -> None:
        products.run(delays.randrange(20))
        if delays.random() < 0.1:
            time.sleep(delays.random() * 0.003)

    with ExitStack() as stack:
        loader = stack.enter_context(CorpusLoader(url, **plan, device=device))
        local = Staging(local_root=local_root)
        expecting = stack.enter_context(CorpusLoader(url, **plan, device="cpu", staging=local))
        batches = (batch.tokens for batch in loader)
        done = 0
        while done < num_steps:
            count = min(CHUNK, num_steps - done)
            expected = torch.stack([next(expecting).tokens for _ in range(count)]).to(device)
            mismatched += mismatches(batches, expected, late, device)
            del expected
            before, done = done, done + count
            if before < SETTLED * num_steps <= done or done == num_steps:
                memory.append(_memory(device))
    return {
        "steps": num_steps,
        "mismatched_tokens": int(mismatched),
        "device_bytes": [memory[0][0], memory[-1][0]],
        "host_bytes": [memory[0][1], memory[-1][1]],
    }


def _memory(device: torch.device) -> tuple[int, int]:
    """(allocated on the device, resident of this process)."""
    allocated = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        allocated = torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return allocated, pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    url, corpus, local_root, device, num_steps = sys.argv[1:]
    print(json.dumps(soak(url, corpus, Path(local_root), torch.device(device), int(num_steps))))
