"""A sample of a corpus's tokens, to notice at opening what cannot be its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from corpus_server.corpus.fingerprints import SAMPLES_PER_CORPUS, sample_blocks
from corpus_server.corpus.shards import Shard


class SampledIds(NamedTuple):
    """Ids of the blocks that the sampled fingerprint reads, too, so that they are in the page cache."""

    num_tokens: int
    smallest: int
    largest: int


def sample_ids(shards: Sequence[Shard]) -> SampledIds | None:
    """Return the smallest and largest id of about 64 blocks of 4 KiB; None for an empty corpus."""
    found = []
    for shard in shards:
        itemsize = shard.dtype.itemsize
        for offset, count in sample_blocks(shard.data_bytes, max(2, SAMPLES_PER_CORPUS // len(shards))):
            start, size = offset // itemsize * itemsize, count // itemsize * itemsize
            ids = np.frombuffer(shard.read_data(start, size), shard.dtype)
            if ids.size:
                found.append((ids.size, int(ids.min()), int(ids.max())))
    if not found:
        return None
    sizes, smallest, largest = zip(*found, strict=True)
    return SampledIds(sum(sizes), min(smallest), max(largest))
