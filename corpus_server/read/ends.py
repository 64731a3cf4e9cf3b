"""Whether documents begin or end with their corpus's end-of-text token, by which a trainer tells them apart.

Shards may be cut inside a document. What is left of a document there is *open*: it lacks the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.index import looks_first
from corpus_server.corpus.views import View
from corpus_server.corpus.views.view import document_chunks
from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Int64Array
from corpus_server.plan import Plan
from corpus_server.read.gather import Gatherer
from corpus_server.work import Budget

_AT_ONCE: Final = 1 << 14
_HOW: Final = {True: ("begins", "begin", "first"), False: ("ends", "end", "last")}


def check_eots(plan: Plan, corpora: Mapping[str, Corpus]) -> None:
    """Check that the end-of-text token is known of each source, if rows may end with it.

    Raises:
        InvalidPlan: naming the first corpus whose token is not.
    """
    for name, corpus in corpora.items() if plan.rows.fills_ends else ():
        if corpus.eot is None:
            raise InvalidPlan(
                f"rows {plan.rows.name}: corpus {name!r} has no known end-of-text id",
                parameter="rows",
                remedy=f"name it: corpus-server serve {name}=PATH,eot=ID",
            )


def open_documents(corpus: Corpus, starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return which documents of a corpus are open, ascending: numbers in its `sequences`.

    At most one of each shard of the corpus, unless a view holds it several times: the first one, if documents
    begin with end-of-text, or else the last one, if it has two tokens or more. Shards whose
    edges are not known, see `Shard.known_edges`, count as whole.
    """
    base = corpus.base
    if corpus.eot is None or not starts.size:
        return np.empty(0, np.int64)
    edge = 0 if corpus.eot_first else 1
    found = [
        first if corpus.eot_first else stop - 1
        for shard, (first, stop) in zip(base.shards, pairwise(base.starts), strict=True)
        if (edges := shard.known_edges) is not None and edges[edge] != corpus.eot
    ]
    cut = np.array(found, dtype=np.int64)
    ranges = corpus.ranges_of(cut, cut + 1)
    # An empty document begins where the next one does, and comes before it.
    numbers = np.unique(starts.searchsorted(ranges[:, 0], side="right") - 1)
    return numbers if corpus.eot_first else numbers[lengths[numbers] > 1]


def check_ends(corpus: Corpus, budget: Budget) -> None:
    """Check that every document of two tokens or more has end-of-text where the corpus's documents have it.

    Documents at the edge of a shard may be open. An index that was made by looking for the token is right.

    Raises:
        InvalidPlan: a document lacks it, or nothing tells where documents have it.
    """
    view, corpus, eot_first = corpus, corpus.base, corpus.eot_first
    is_chosen: NDArray[np.bool_] | bool = True
    if not isinstance(view, View):
        starts, lengths = corpus.sequences()
    else:  # of which a document may be several sequences
        edges = [edges for _, edges in document_chunks(corpus)]
        starts = np.concatenate([np.empty(0, np.int64), *(each[:-1] for each in edges)])
        lengths, is_chosen = np.concatenate([np.empty(0, np.int64), *map(np.diff, edges)]), view.is_chosen()
    checked = (lengths > 1) & is_chosen
    for shard, (first, stop) in zip(corpus.shards, pairwise(corpus.starts), strict=True):
        its = slice(*np.searchsorted(starts, (first, stop)))
        if shard.eot == corpus.eot:
            checked[its] = False
        elif not shard.file.is_local:
            raise _refused(
                f"corpus {corpus.name!r} lies in an object store, and whether its documents "
                f"{_HOW[eot_first][1]} with end-of-text cannot be seen without fetching all of it",
                "serve a local copy, or make an index with `corpus-server index` and copy it beside the "
                "shards",
            )
    opened = open_documents(corpus, starts, lengths)
    _check_place(corpus, is_cut=opened.size > 0)
    checked[opened] = False
    places = starts if eot_first else starts + lengths - 1
    which = np.flatnonzero(checked)
    for begin in range(0, which.size, _AT_ONCE):
        numbers = which[begin : begin + _AT_ONCE]
        tokens = _tokens(corpus, places[numbers])
        budget.spend()
        wrong = np.flatnonzero(tokens != corpus.eot)
        if wrong.size:
            number, token = int(numbers[wrong[0]]), int(tokens[wrong[0]])
            begins, (_, others, other) = _HOW[eot_first][0], _HOW[not eot_first]
            raise _refused(
                f"document {number} of corpus {corpus.name!r} {begins} with token {token}, not with "
                f"end-of-text ({corpus.eot})",
                f"name the right id with eot=ID, say eot_at={other} if documents {others} with it, or make a "
                "document index with `corpus-server index`",
            )


def _check_place(corpus: Corpus, *, is_cut: bool) -> None:
    """Refuse a corpus whose shards look as if documents had end-of-text at their other end.

    Where shards are cut and tell nothing, somebody must have said it.
    """
    assert corpus.eot is not None  # see `check_eots`
    said, looks = corpus.eot_first, looks_first(corpus.shards, corpus.eot)
    index = f"index it again: corpus-server index PATH,eot={corpus.eot}"
    if looks is None and is_cut and not said and not corpus.is_eot_place_said:
        raise _refused(
            f"nothing tells whether the documents of corpus {corpus.name!r} end or begin with end-of-text "
            f"({corpus.eot}): its shards are cut inside documents",
            f"{index},eot_at=first, or say eot_at=last where it is served",
        )
    if looks is (not said):
        (_, its, _), (_, others, other) = _HOW[said], _HOW[not said]
        raise _refused(
            f"the shards of corpus {corpus.name!r} look as if documents {others} with end-of-text "
            f"({corpus.eot}), and it is served as one whose documents {its} with it",
            f"{index},eot_at={other}",
        )


def _tokens(corpus: Corpus, places: Int64Array) -> NDArray[np.integer]:
    """Return single tokens of a corpus that is no view, by their numbers."""
    starts = np.array(corpus.starts)
    shards = np.searchsorted(starts, places, side="right") - 1
    located = np.stack((shards, places - starts[shards]), axis=1)
    return Gatherer(corpus.shards).gather(located, 1, corpus.dtype)[:, 0]


def _refused(detail: str, remedy: str) -> InvalidPlan:
    return InvalidPlan(f"rows documents: {detail}", parameter="rows", remedy=remedy)
