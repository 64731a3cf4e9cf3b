"""Make the index of the layers of a view, see `Layers`."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.views.file import SECTION, SECTIONS, Layers, Multiplicities
from corpus_server.pieces import Int64Array, UInt64Array

_WEIGHTS: Final = np.full(SECTION + 1, 0x9E3779B97F4A7C15, dtype=np.uint64).cumprod()


def section_checks(begins: Int64Array, ends: Int64Array) -> NDArray[np.uint32]:
    """Return a number by which a section of other documents is noticed: of `(...)` sections.

    Args:
        begins: `(..., SECTION)`, of documents; behind the last one of a shard, its end.
        ends: `(...)`, of the last documents.
    """
    sums: UInt64Array = begins.view(np.uint64) @ _WEIGHTS[:SECTION]
    sums += ends.view(np.uint64) * _WEIGHTS[SECTION]
    return (sums >> np.uint64(32)).astype(np.uint32)


def layers_of(edges: Int64Array, counts: Multiplicities) -> Layers:
    """Return the layers of groups.

    Args:
        edges: `(k, GROUP + 1)`, where the documents of each begin in the corpus, and where the last one ends.
        counts: `(k, GROUP)`, how often each comes.
    """
    lengths = np.diff(edges)
    most, reached = counts.max(axis=1, initial=0), np.zeros(len(counts), dtype=counts.dtype)
    layers = []
    while (groups := np.flatnonzero(reached < most)).size:
        # Those that are reached wrap around, and are above all others.
        passes = (counts[groups] - (reached[groups] + 1)[:, None]).min(axis=1) + 1
        reached[groups] += passes
        held = lengths[groups] * (counts[groups] >= reached[groups, None])
        in_sections = np.add.reduceat(held.ravel(), np.arange(0, held.size, SECTION))
        ends = in_sections.reshape(-1, SECTIONS).cumsum(axis=1)
        layers.append((groups, passes * ends[:, -1], ends, reached[groups]))
    if not layers:
        return Layers.joined([])
    groups, num_tokens, ends, reached = map(np.concatenate, zip(*layers, strict=True))
    order = groups.argsort(kind="stable")
    token = np.append(0, num_tokens[order].cumsum())
    checks = section_checks(edges[:, :-1].reshape(-1, SECTIONS, SECTION), edges[:, SECTION::SECTION])
    return Layers(token, groups[order], ends[order], checks, reached[order].astype(np.uint16))
