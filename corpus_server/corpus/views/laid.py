"""Groups of a view laid end to end on one line, so that positions of many ranges are found together.

Passes of a group between two multiplicities that it has hold the same documents: they are a *layer*. With
multiplicities 1, 0, 3, 3 of documents A, B, C, D:

    layer 0, one pass      A C D
    layer 1, two passes    C D | C D
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.views.file import GROUP, Multiplicities
from corpus_server.pieces import Int64Array, expanded


class Laid:
    """Some groups with all copies of their documents.

    Args:
        edges: `(k, GROUP + 1)`, where the documents begin, and where the last one ends.
        counts: `(k, GROUP)`, how often each comes.
        passes: from `layers_of`; each layer takes 4 KiB.

    Attributes:
        bounds: `(k + 1,)`, where each group begins on the line; then the end.
    """

    def __init__(self, edges: Int64Array, counts: Multiplicities, passes: Multiplicities) -> None:
        self._edges = edges
        self._groups, layers = passes.nonzero()
        reached = passes.cumsum(axis=1, dtype=counts.dtype)[self._groups, layers, None]
        table = np.diff(edges)[self._groups]
        table *= counts[self._groups] >= reached  # a choice by `where` takes five times as long
        self._lengths, self._ends = table.ravel(), table.cumsum()  # of a layer's documents, of one pass each
        self._sizes = np.diff(self._ends[GROUP - 1 :: GROUP], prepend=0)
        self._line = np.append(0, (self._sizes * passes[self._groups, layers]).cumsum())
        self.bounds = self._line[self._groups.searchsorted(np.arange(len(edges) + 1))]

    def find(
        self, groups: NDArray[np.intp], begins: Int64Array, ends: Int64Array
    ) -> tuple[NDArray[np.intp], Int64Array, Int64Array]:
        """Return where positions [begin, end) of groups lie in the corpus, in order.

        Args:
            groups, begins, ends: `(n,)` each.

        Returns:
            `(m,)` each: the number of the range, start, stop.
        """
        which, layers, begins, ends = self._in_layers(
            begins + self.bounds[groups], ends + self.bounds[groups]
        )
        part, begins, ends = self._in_passes(layers, begins, ends)
        which, layers = which[part], layers[part]
        low = self._ends.searchsorted(begins, side="right")
        part, members = expanded(low, self._ends.searchsorted(ends) + 1 - low)
        some = self._lengths[members] > 0
        part, members = part[some], members[some]
        origin = self._ends[members] - self._lengths[members]
        shift = self._edges[self._groups[layers[part]], members % GROUP] - origin
        return (
            which[part],
            np.maximum(begins[part], origin) + shift,
            np.minimum(ends[part], self._ends[members]) + shift,
        )

    def _in_layers(
        self, begins: Int64Array, ends: Int64Array
    ) -> tuple[NDArray[np.intp], Int64Array, Int64Array, Int64Array]:
        """Return ranges of the line in parts of one layer: which range, layer, begin and end in the layer."""
        line = self._line
        low, high = line[1:].searchsorted(begins, side="right"), line[1:].searchsorted(ends)
        which, layers = expanded(low, np.maximum(high + 1 - low, 0))
        some = self._sizes[layers] > 0
        which, layers = which[some], layers[some]
        begins, ends = np.maximum(begins[which], line[layers]), np.minimum(ends[which], line[layers + 1])
        return which, layers, begins - line[layers], ends - line[layers]

    def _in_passes(
        self, layers: Int64Array, begins: Int64Array, ends: Int64Array
    ) -> tuple[NDArray[np.intp], Int64Array, Int64Array]:
        """Return parts of layers in parts of one pass: which part, begin and end among all layers' passes."""
        sizes = self._sizes[layers]
        low = begins // sizes
        part, passes = expanded(low, (ends - 1) // sizes + 1 - low)
        sizes = sizes[part]
        before = self._ends[GROUP * layers + GROUP - 1][part] - sizes
        begins, ends = begins[part] - passes * sizes, ends[part] - passes * sizes
        return part, before + np.maximum(begins, 0), before + np.minimum(ends, sizes)


def layers_of(counts: Multiplicities) -> Multiplicities:
    """Return the passes of each layer of groups, `(k, most layers)`; 0 behind a group's last one.

    Args:
        counts: `(k, GROUP)`.
    """
    most, reached = counts.max(axis=1), np.zeros(len(counts), dtype=counts.dtype)
    passes = []
    while (is_below := reached < most).any():
        # Those that are reached wrap around, and are above all others.
        passes.append(((counts - (reached + 1)[:, None]).min(axis=1) + 1) * is_below)
        reached += passes[-1]
    return np.array(passes, dtype=counts.dtype).reshape(-1, len(counts)).T
