"""Whether documents end with their corpus's end-of-text token, by which a trainer masks and numbers them."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.views import View
from corpus_server.corpus.views.view import document_chunks
from corpus_server.errors import InvalidPlan
from corpus_server.read.gather import Gatherer
from corpus_server.work import Budget

_AT_ONCE: Final = 1 << 14


def check_ends(corpus: Corpus, budget: Budget) -> None:
    """Check the last token of every document of two tokens or more, of a view those that it holds.

    An index that was made by looking for that token is right but where a shard ends, which is checked if the
    shard is on this machine.

    Raises:
        InvalidPlan: a document does not end with it, or the id is not known.
    """
    remedy = "name it: corpus-server serve PATH,eot=ID"
    if corpus.eot is None:
        raise _refused(f"corpus {corpus.name!r} has no known end-of-text id", remedy)
    view, corpus = corpus, corpus.base
    is_chosen: NDArray[np.bool_] | bool = True
    if not isinstance(view, View):
        starts, lengths = corpus.sequences()
    else:  # of which a document may be several sequences
        edges = [edges for _, edges in document_chunks(corpus)]
        starts = np.concatenate([np.empty(0, np.int64), *(each[:-1] for each in edges)])
        lengths, is_chosen = np.concatenate([np.empty(0, np.int64), *map(np.diff, edges)]), view.is_chosen()
    ends = starts + lengths
    # A document may be cut where its shard ends.
    checked = (lengths > 1) & is_chosen
    for shard, (first, stop) in zip(corpus.shards, pairwise(corpus.starts), strict=True):
        its = slice(*np.searchsorted(starts, (first, stop)))
        if shard.eot == corpus.eot:
            checked[its] &= (ends[its] == stop) & shard.file.is_local
        elif not shard.file.is_local:
            raise _refused(
                f"corpus {corpus.name!r} lies in an object store, and whether its documents end with "
                "end-of-text cannot be seen without fetching all of it",
                "serve a local copy, or make an index with `corpus-server index` and copy it beside the "
                "shards",
            )
    gatherer = Gatherer(corpus.shards)
    which = np.flatnonzero(checked)
    for begin in range(0, which.size, _AT_ONCE):
        numbers = which[begin : begin + _AT_ONCE]
        last = ends[numbers] - 1
        shards = np.searchsorted(corpus.starts, last, side="right") - 1
        places = np.stack((shards, last - np.array(corpus.starts)[shards]), axis=1)
        tokens = gatherer.gather(places, 1, corpus.dtype)[:, 0]
        budget.spend()
        wrong = np.flatnonzero(tokens != corpus.eot)
        if wrong.size:
            number = int(numbers[wrong[0]])
            raise _refused(
                f"document {number} of corpus {corpus.name!r} ends with token {int(tokens[wrong[0]])}, not "
                f"with end-of-text ({corpus.eot})",
                "name the right id with eot=ID, make a document index with `corpus-server index`, or leave "
                "the unfinished document out of the shard",
            )


def _refused(detail: str, remedy: str) -> InvalidPlan:
    return InvalidPlan(f"rows documents: {detail}", parameter="rows", remedy=remedy)
