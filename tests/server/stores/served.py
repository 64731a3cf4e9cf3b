"""What the tests of servers over object stores share: shards, plans over them, and what is measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.corpora import some_tokens
from tests.serving import RunningServer

SHARD_TOKENS = 20_000
SEQ_LEN = 99  # 201 windows a shard
SHARD_WINDOWS = (SHARD_TOKENS - SEQ_LEN - 1) // SEQ_LEN + 1
SHARD_BYTES = 2 * SHARD_TOKENS


def shards(num_shards: int) -> dict[str, bytes]:
    """Return objects of the folder `web`."""
    return {f"web/{n:03}.bin": some_tokens(SHARD_TOKENS, seed=n).tobytes() for n in range(num_shards)}


def windows(contents: Mapping[str, bytes]) -> np.ndarray:
    """Return all windows of shards, in order."""
    found = []
    for _, content in sorted(contents.items()):
        tokens = np.frombuffer(content, "<u2")
        starts = range(0, SHARD_WINDOWS * SEQ_LEN, SEQ_LEN)
        found += [tokens[start : start + SEQ_LEN + 1] for start in starts]
    return np.stack(found)


def document(
    order: object = None, rows: int = 8, block_windows: int = SHARD_WINDOWS, name: str = "web"
) -> dict[str, object]:
    """Return a plan; without an order, a bounded shuffle of two blocks a group."""
    bounded = {"shuffle": {"block_windows": block_windows, "group_blocks": 2}}
    stages = [{"global_batch_size": rows, "mixture": {name: 1.0}}]
    return {"seq_len": SEQ_LEN, "order": order or bounded, "stages": stages}


def metrics(server: RunningServer) -> dict[str, float]:
    """Return the numbers of `/metrics` by name with labels."""
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
