"""Measure how many bytes a cache fetches twice where what is needed last goes first, beside LRU.

Real plans, extents and caches; the store is zeros. `TMPDIR=/dev/shm python -m scripts.eviction_cost`
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import BoundedShuffle, Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.next_use import NextUse
from corpus_server.stores import Cache
from corpus_server.work import Budget
from tests.stores import WebServer

EXTENT_BYTES = 4096
NUM_EXTENTS = 240
SEQ_LEN = 31  # rows of 62 bytes: an extent has 66
ROWS, EPOCHS = 1056, 4
CACHES = (0.5, 0.75)  # of the corpus
PLANS: dict[str, Any] = {
    "sequential": "sequential",
    "groups of 8 blocks of 4 extents": BoundedShuffle(block_windows=264, group_blocks=8),
    "groups of 2 blocks of 16.5 extents": BoundedShuffle(block_windows=1090, group_blocks=2),
}


def fetched(bound: BoundPlan, limit_bytes: int, *, by_plan: bool) -> int:
    """Return the bytes that are fetched for some epochs."""
    next_use, step = NextUse(bound), 0

    def needed_in(keys: Sequence[str]) -> Sequence[float]:
        return next_use.steps_until(step, keys).tolist() if by_plan else [math.inf] * len(keys)

    total, steps = 0, EPOCHS * int(bound.sampler.num_windows[0]) // ROWS
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder), limit_bytes, EXTENT_BYTES)
        cache.needed_in = needed_in
        for step in range(steps):
            for extent in bound.staged[0].of(bound.sampler.pieces(step, range(ROWS)).places):
                key = extent.part.key
                if not cache.has(key):
                    total += extent.size_bytes
                    with cache.filling(key, extent.size_bytes, urgent=True):
                        pass
                cache.touch(key)
    return total


def main() -> None:
    """Print a table: bytes fetched, in epochs' bytes."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    size = NUM_EXTENTS * EXTENT_BYTES
    with WebServer({"/web.bin": bytes(size)}) as server, tempfile.TemporaryDirectory() as folder:
        spec = CorpusSpec.parse(f"web={server.url}/web.bin,dtype=uint16")
        with Catalog.open([spec], cache_dir=Path(folder), extent_bytes=EXTENT_BYTES) as catalog:
            print(f"bytes fetched in {EPOCHS} epochs, in bytes of the corpus")
            print(f"{'order':36}{'cache':>8}{'needed last':>14}{'least recently wanted':>24}")
            for name, order in PLANS.items():
                stage = Stage(global_batch_size=ROWS, mixture={"web": 1.0})
                bound = catalog.bind(Plan(seq_len=SEQ_LEN, order=order, stages=(stage,)), Budget())
                for share in CACHES:
                    ours, lru = (
                        fetched(bound, int(share * size), by_plan=each) / size for each in (True, False)
                    )
                    print(f"{name:36}{share:>8.0%}{ours:>14.2f}{lru:>24.2f}", flush=True)


if __name__ == "__main__":
    main()
