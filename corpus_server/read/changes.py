"""In what two plans differ: fields, rows, and the documents of sources that are views of one corpus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.views import View
from corpus_server.corpus.views.file import Multiplicities
from corpus_server.described import described
from corpus_server.plan.questions.diff import FieldChange, RowComparison, changed_fields, compare
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.work import Budget

SHOWN_DOCUMENTS: Final = 100

_AT_ONCE: Final = 1 << 21  # documents, in some 10 ms


@described
class DocumentChange:
    """A document that comes more or less often."""

    document: int
    """Its number in the corpus."""
    a: int
    """How often an epoch of the first plan's source shows it."""
    b: int


@described
class ViewChange:
    """How two sources over one corpus differ; exact, of all documents."""

    a: str
    """Source of the first plan."""
    b: str
    """Source of the second one, of the same name if there is one."""
    num_documents: int
    """Documents whose multiplicity differs."""
    num_taken_out: int
    """Those that only the first plan shows."""
    num_put_in: int
    """Those that only the second plan shows."""
    documents: list[DocumentChange]
    """The first of them."""


@described
class Diff:
    """What differs between two plans."""

    a: str
    b: str
    fields: list[FieldChange]
    rows: RowComparison
    views: list[ViewChange]
    """Of sources that are views of one corpus, the documents that come more or less often."""


def compare_plans(a: BoundPlan, b: BoundPlan, budget: Budget, *, num_steps: int) -> Diff:
    """Compare two plans, and up to `num_steps` steps that differ, as far as the budget's rows reach."""
    rows = compare(a.sampler, b.sampler, budget, num_steps=num_steps)
    views = _view_changes(a, b, budget)
    fields = changed_fields(a.plan, b.plan, budget)
    return Diff(a=a.plan.id, b=b.plan.id, fields=fields, rows=rows, views=views)


def _view_changes(a: BoundPlan, b: BoundPlan, budget: Budget) -> list[ViewChange]:
    """Compare the documents of sources by their views alone; nothing for two plain corpora."""
    found = []
    for name, other in _pairs(a, b):
        change = _compared(name, other, a.corpora[name], b.corpora[other], budget)
        if change.num_documents:
            found.append(change)
    return found


def _pairs(a: BoundPlan, b: BoundPlan) -> Iterator[tuple[str, str]]:
    left = [name for name in b.corpora if name not in a.corpora]
    for name, corpus in a.corpora.items():
        others = [name] if name in b.corpora else left
        for other in others:
            its = b.corpora[other]
            is_one = corpus.base.fingerprints["sampled"] == its.base.fingerprints["sampled"]
            if is_one and (isinstance(corpus, View) or isinstance(its, View)):
                yield name, other
                break


def _compared(name: str, other: str, a: Corpus, b: Corpus, budget: Budget) -> ViewChange:
    number = taken = put = 0
    shown: list[DocumentChange] = []
    total = (a if isinstance(a, View) else b).base.num_documents or 0
    for start in range(0, total, _AT_ONCE):
        stop = min(start + _AT_ONCE, total)
        ours, theirs = _counts(a, start, stop), _counts(b, start, stop)
        which = np.flatnonzero(ours != theirs)
        number += which.size
        taken += int(np.count_nonzero(theirs[which] == 0))
        put += int(np.count_nonzero(ours[which] == 0))
        shown += [
            DocumentChange(document=start + each, a=int(ours[each]), b=int(theirs[each]))
            for each in which[: SHOWN_DOCUMENTS - len(shown)].tolist()
        ]
        budget.spend(num_bytes=ours.nbytes + theirs.nbytes)
    return ViewChange(
        a=name, b=other, num_documents=number, num_taken_out=taken, num_put_in=put, documents=shown
    )


def _counts(corpus: Corpus, start: int, stop: int) -> Multiplicities:
    if isinstance(corpus, View):
        return corpus.file.decoded(start, stop)
    return np.ones(stop - start, dtype=np.uint16)
