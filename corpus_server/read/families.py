"""What a plan of a family needs of its corpora: documents, and digests of what decides its rows.

These are where documents end and, with `by`, what they have in a column of metadata. The hashes of a column
are a table, kept as those of rows are: 8 bytes a document.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.metadata.values import hashed_values
from corpus_server.corpus.views.view import documents_digest
from corpus_server.errors import FingerprintMismatch, InvalidPlan
from corpus_server.plan import Plan
from corpus_server.plan.tables import Job
from corpus_server.read.table_files import TableInUse
from corpus_server.read.tables import Tables
from corpus_server.work import Budget

_END_BYTES: Final = 8
_digesting: Final = threading.Lock()
_digests: Final[WeakKeyDictionary[Corpus, str]] = WeakKeyDictionary()


def with_documents(plan: Plan, corpora: Mapping[str, Corpus], budget: Budget) -> Plan:
    """Return a plan with digests of its documents, if it is a member of a family: they decide its rows.

    Raises:
        InvalidPlan: a corpus has no documents.
        FingerprintMismatch: a corpus has other documents than the plan was made for.
    """
    if (family := plan.family) is None:
        return plan
    for name, corpus in corpora.items():
        if corpus.base.num_documents is None:
            raise InvalidPlan(
                f"family: corpus {name!r} has no document index, and a member leaves out documents",
                parameter="family",
                remedy="make one with `corpus-server index PATH,eot=ID`, then restart the server",
            )
    with _digesting:
        digests = {name: _digest(corpus.base, budget) for name, corpus in corpora.items()}
    plan.require_sources("family.documents", family.documents)
    if any(family.documents.get(name, digest) != digest for name, digest in digests.items()):
        raise FingerprintMismatch(
            "the documents of the plan's corpora are others than those that its family was made for: "
            f"the plan says {dict(family.documents)}, this server {digests}",
            parameter="family.documents",
            remedy="serve the document indices that the plan was made for",
        )
    return plan if family.documents == digests else plan.changed(family=replace(family, documents=digests))


def _digest(corpus: Corpus, budget: Budget) -> str:
    """Return the digest of where the documents of a corpus end; read once, in bounded memory."""
    if (found := _digests.get(corpus)) is None:
        budget.spend(num_bytes=_END_BYTES * (corpus.num_documents or 0))
        found = _digests[corpus] = documents_digest(corpus, budget)
    return found


class Values(NamedTuple):
    """The table of a column: what stands for each document, `(documents,) uint64`."""

    hashes: NDArray[np.uint64]


def _build(corpus: ref[Corpus], name: str, run: object = None) -> Values:
    found = corpus()
    assert found is not None  # whoever binds a plan has it open
    table = found.metadata()
    assert table is not None  # see `_values`
    return Values(hashed_values(table, name))


def with_values(
    plan: Plan, corpora: Mapping[str, Corpus], tables: Tables, budget: Budget
) -> tuple[Plan, list[TableInUse]]:
    """Return a plan with digests of the values in the column of its family, and the tables of these.

    Raises:
        InvalidPlan: a corpus has no such column.
        FingerprintMismatch: a corpus has other values there than the plan was made for.
    """
    if (family := plan.family) is None or family.by is None:
        return plan, []
    found = {name: _values(corpus, family.by, tables, budget) for name, corpus in corpora.items()}
    digests = {name: digest for name, (_, digest) in found.items()}
    plan.require_sources("family.values", family.values)
    if any(family.values.get(name, digest) != digest for name, digest in digests.items()):
        raise FingerprintMismatch(
            f"the values of column {family.by!r} are others than those that the plan's family was made for: "
            f"the plan says {dict(family.values)}, this server {digests}",
            parameter="family.values",
            remedy="serve the metadata that the plan was made for, or make a new family",
        )
    if family.values != digests:
        plan = plan.changed(family=replace(family, values=digests))
    return plan, [table for table, _ in found.values()]


def _values(corpus: Corpus, column: str, tables: Tables, budget: Budget) -> tuple[TableInUse, str]:
    """Return what stands for the documents of a corpus, and its digest; the metadata is that at opening."""
    known = _columns.setdefault(corpus, {})
    if (found := known.get(column)) is not None and not found[0].is_changed():
        return found
    if (metadata := corpus.metadata()) is None:
        raise InvalidPlan(
            f"family.by: corpus {corpus.name!r} has no metadata of its documents",
            parameter="family.by",
            remedy="leave by out, or put metadata beside the shards",
        )
    num_documents = corpus.base.num_documents or 0
    decides = {"metadata": metadata.key, "tag": metadata.tag, "column": column, "documents": num_documents}
    build = partial(_build, ref(corpus), column)
    job = Job(Values, decides, lambda: num_documents, build, is_apart=False)
    budget.spend(num_bytes=_END_BYTES * num_documents)
    table = tables.table(job, {}, budget)
    digest = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(table.table[0], dtype="<u8").data)
    found = known[column] = table, f"xxh3-{digest}"
    return found


_columns: Final[WeakKeyDictionary[Corpus, dict[str, tuple[TableInUse, str]]]] = WeakKeyDictionary()
