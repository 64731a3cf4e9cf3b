"""Of what was found in the corpus of a view: what lies in documents that the view holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.pieces import Int64Array, expanded
from corpus_server.tools.finding.decoded import DecodedText
from corpus_server.tools.finding.ngrams import AT_ONCE
from corpus_server.tools.finding.scan import Runs, runs_of
from corpus_server.tools.finding.spans import documents_at


def held_runs(
    runs: Runs, n: int, corpus: Corpus, is_held: NDArray[np.bool_], text: DecodedText | None
) -> Runs:
    """Return runs, ascending, without the n-grams that hold a token of a document that is not held.

    Args:
        n: tokens of an n-gram.
        corpus: in which they are.
        is_held: `(documents,)`.
        text: in which the runs are; None: they are in the tokens of the corpus.
    """
    lost_before = np.concatenate(([0], np.cumsum(~is_held)))

    def are_held(starts: Int64Array, lasts: Int64Array) -> NDArray[np.bool_]:
        if text is not None:
            starts, lasts = text.tokens_at(starts), text.tokens_at(lasts)
        first, last = documents_at(corpus, starts), documents_at(corpus, lasts)
        held: NDArray[np.bool_] = (first >= 0) & (last >= 0) & (lost_before[last + 1] == lost_before[first])
        return held

    start, _, counts = runs.T
    are_whole = are_held(start, start + counts + n - 2)
    found = [runs[are_whole]]
    cut = runs[~are_whole]
    before = cut[:, 2].cumsum() - cut[:, 2]
    at = 0
    while at < len(cut):  # a bounded number of n-grams at a time
        stop = max(at + 1, int(before.searchsorted(before[at] + AT_ONCE)))
        which, starts = expanded(cut[at:stop, 0], cut[at:stop, 2])
        places = cut[at:stop, 1][which] + (starts - cut[at:stop, 0][which])
        held = are_held(starts, starts + n - 1)
        found.append(runs_of(starts[held], places[held]))
        at = stop
    joined = np.concatenate(found)
    return joined[joined[:, 0].argsort(kind="stable")]
