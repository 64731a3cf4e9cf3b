"""What a loader holds in host memory and what it records: the `staging=` of `CorpusLoader`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from corpus_client.network.options import boolean, path
from corpus_client.plan.document import integer

LocalRoot = Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str]

PREFETCH_BYTES = 64 << 20
"""Four slots of 16 MiB: two being received, one being read, one ready. Four times as much was no faster.

It holds half a minute of training at a million tokens a second. Where two batches are larger, they count.
Loaders do not share their slots, so a second one, for evaluation, page-locks as much beside the first.
"""
MAX_TRACE_STEPS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """How batches are staged on the host.

    Args:
        prefetch_bytes: bound of the memory for what is fetched ahead, in bytes; it must hold two batches.
            None: 64 MiB, or two batches if these are larger. All loaders of a process together never take
            more than half of the host's memory, divided by the ranks on it.
        local_root: folder with a copy of the corpus's shards, or a mapping from corpus to folder. Then only
            the places of the windows travel, and their tokens are read from the copy.
        trace_steps: keep what happened in the last so many steps for `CorpusLoader.trace`, and measure
            copies on the device. 0: record nothing.
        nvtx: mark `fetch`, `receive`, `transfer` and `wait` for Nsight Systems; needs CUDA.
    """

    prefetch_bytes: int | None = None
    local_root: LocalRoot | None = None
    trace_steps: int = 0
    nvtx: bool = False

    def __post_init__(self) -> None:
        if self.prefetch_bytes is not None:
            integer("prefetch_bytes", self.prefetch_bytes, 0, 2**63 - 1)
        if isinstance(self.local_root, Mapping):
            for name, folder in self.local_root.items():
                path(f"local_root of {name!r}", folder, "a folder")
        else:
            path("local_root", self.local_root, "a folder, or a mapping of corpora to folders")
        integer("trace_steps", self.trace_steps, 0, MAX_TRACE_STEPS)
        boolean("nvtx", self.nvtx)
