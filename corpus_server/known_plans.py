"""The plans that a process knows: in memory by id and by inline spelling, and on disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import xxhash

from corpus_server.admission.request import Caller
from corpus_server.catalog import Catalog
from corpus_server.errors import Forbidden, UnknownPlan
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.chain import Continued, Link, parse_document
from corpus_server.plan.draft import Draft
from corpus_server.plan.settling import settle
from corpus_server.plan_store import ID_DIGITS, PlanStore, find_by_prefix
from corpus_server.plan_store.links import PlacedLink, add_links, chain, has_link, remove_links
from corpus_server.read.apart import parse_apart
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.work import Budget, Jobs, shared

LOOK_SECONDS = 0.1
"""Between two looks at the tables of a plan; what is answered with tokens looks for itself."""

MAX_PLANS = 1024
MAX_BYTES = 128 * 2**20
"""Room for the longest chain of 64 sources, 80 MB, beside other plans."""
LARGE_BYTES = 2**20
"""A document of this size takes some 20 times as much memory while it is parsed: one such at a time, in a
process of its own."""


_IS_READ: Final = "a plan of more than a megabyte is being read"


class Kept(NamedTuple):
    """A plan that was posted, the one that it continues if it does, and its steps if its stages say so."""

    bound: BoundPlan
    parent: BoundPlan | None
    num_steps: int | None


class KnownPlans:
    """Bound plans by id; safe to use from several threads.

    Memory holds the plans used last, within two bounds; a plan that falls out is bound again from the store.
    Plans that are only spelled inline never reach the store, where a stranger could add one with each GET.

    `max_plans` bounds the spellings that are remembered, too. The plan used last stays, however large it is.
    """

    def __init__(
        self,
        catalog: Catalog,
        store: PlanStore,
        jobs: Jobs | None = None,
        *,
        max_plans: int = MAX_PLANS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._jobs = jobs
        self._max_plans, self._max_bytes = max_plans, max_bytes
        self._lock = threading.Lock()  # of the two below; never held while a plan is bound
        self._plans: OrderedDict[str, BoundPlan] = OrderedDict()  # by id, the plan used last at the end
        self._ids: OrderedDict[frozenset[tuple[str, Any]], str] = OrderedDict()

    def in_memory(self, plan_id: str) -> BoundPlan | None:
        """Return the plan if it is in memory; never blocks."""
        with self._lock:
            if plan_id in self._plans:
                self._plans.move_to_end(plan_id)
            return self._plans.get(plan_id)

    def by_id(self, plan_id: str, caller: Caller, budget: Budget) -> BoundPlan:
        """Return a plan that this process, or a worker beside it, has seen; reads the store.

        Args:
            plan_id: or the beginning of one, of those that the caller may read.

        Raises:
            Forbidden: the caller may not read one of its corpora.
            UnknownPlan: nobody here has seen it.
            InvalidParameter: several ids begin so.
            UnknownCorpus, FingerprintMismatch, InvalidPlan: see `Catalog.fit`.
        """
        if len(plan_id) < ID_DIGITS:
            return self._by_prefix(plan_id, caller, budget)
        if (bound := self._allowed(plan_id, caller)) is not None:
            return bound
        if (document := self._store.document(plan_id)) is not None:
            plan = self._parsed(document, budget)
            assert isinstance(plan, Plan)
            return self._bind(plan, caller, budget, size=len(document))
        links = chain(self._store, plan_id, lambda each: self.in_memory(each) is not None)
        if not links:
            raise _unknown("plan", plan_id)
        return self._restored(links, caller, budget)

    def _by_prefix(self, prefix: str, caller: Caller, budget: Budget) -> BoundPlan:
        with self._lock:
            found = {each for each in self._plans if each.startswith(prefix)}
        plans = {}
        for each in sorted(found.union(self._store.ids(prefix))):
            with suppress(Forbidden):  # what the caller may not read is no candidate
                plans[each] = self.by_id(each, caller, budget)
        return plans[find_by_prefix(prefix, plans, parameter="plan")]

    def keep_document(
        self, body: bytes | bytearray, caller: Caller, budget: Budget, *, keep: bool = True, run: str = ""
    ) -> Kept:
        """Bind the plan of a posted document, remember it, and keep it in the store.

        Args:
            keep: else the plan is only bound, as if it had never been posted.
            run: the name of the run that posts it.

        Raises:
            Forbidden: the caller may not read one of its corpora.
            InvalidPlan: the document is not a plan, or does not fit the corpora.
            UnknownCorpus, FingerprintMismatch: see `Catalog.fit`.
            CorpusChanged, ReadFailed: a file of a corpus is not what was opened.
        """
        parsed, parent, num_steps = self._parsed(body, budget), None, None
        plan: Plan
        if isinstance(parsed, Link):
            parent = self._parent(parsed.parent, caller, budget)
            plan = Continued.of(parent.plan, parsed, is_kept=keep)
        elif isinstance(parsed, Draft):

            def lay(plan: Plan) -> Sampler:
                return self._bind(plan, caller, budget, is_kept=keep, is_remembered=False).sampler

            plan, num_steps = settle(parsed, lay)
        else:
            plan = parsed
        bound = self._bind(plan, caller, budget, parent, size=len(body), is_kept=keep, is_remembered=False)
        for corpus in bound.corpora.values():  # else its client would meet that in the middle of training
            corpus.check_unchanged(budget)
        if not keep:
            return Kept(bound, parent, num_steps)
        self._store.add(bound.plan.root, owner=caller.name, max_owned=caller.max_plans, run=run)
        if isinstance(bound.plan, Continued):
            add_links(self._store, bound.plan, owner=caller.name, max_owned=caller.max_plans)
            bound.plan.forget_links()
        return Kept(self._remember(bound), parent, num_steps)

    def spelled(self, spelling: Mapping[str, Any], caller: Caller, budget: Budget) -> BoundPlan:
        """Return the plan that is spelled inline; its id can be asked for while it is in memory.

        Args:
            spelling: parameters of `INLINE_PLAN`.
        """
        key = frozenset(spelling.items())
        with self._lock:
            plan_id = self._ids.get(key)
        if plan_id is not None and (bound := self._allowed(plan_id, caller)) is not None:
            return bound
        bound = self._bind(Plan.spelled(spelling), caller, budget, is_kept=False)
        with self._lock:
            self._ids[key] = bound.plan.id
            if len(self._ids) > self._max_plans:
                self._ids.popitem(last=False)
        return bound

    def _allowed(self, plan_id: str, caller: Caller) -> BoundPlan | None:
        """Return the plan if it is in memory; raise Forbidden if the caller may not read it.

        One whose tables were changed on the disk is forgotten: binding it again builds them anew.
        """
        if (bound := self.in_memory(plan_id)) is not None:
            caller.check_read(bound.plan.sources)
            if bound.has_changed_tables(since_seconds=LOOK_SECONDS):
                with self._lock:
                    self._plans.pop(plan_id, None)
                return None
        return bound

    def _parent(self, plan_id: str, caller: Caller, budget: Budget) -> BoundPlan:
        """Return a plan that is to be continued."""
        try:
            bound = self.by_id(plan_id, caller, budget)
        except UnknownPlan:
            raise _unknown("parent", plan_id) from None
        if isinstance(bound.plan, Continued) and not has_link(self._store, plan_id):
            # Other workers could not follow the chain. Its client posts it again.
            raise _unknown("parent", plan_id)
        return bound

    def _restored(self, links: Sequence[PlacedLink], caller: Caller, budget: Budget) -> BoundPlan:
        """Bind a plan from its links, oldest first; what they continue is in memory or in the store."""
        parent = self.by_id(links[0].parent, caller, budget)
        plan = Continued.restored(parent.plan, [link.kept for link in links])
        if plan is None:
            remove_links(self._store, links)  # damaged; the client posts them again
            raise _unknown("plan", links[-1].kept.id)
        for number, link in enumerate(links, plan.num_before):
            if (placed := link.placed()) is None:
                break  # those behind it are computed
            plan.log.place(number, *placed)
        return self._bind(plan, caller, budget, parent)

    def _bind(
        self,
        plan: Plan,
        caller: Caller,
        budget: Budget,
        parent: BoundPlan | None = None,
        *,
        size: int = 0,
        is_kept: bool = True,
        is_remembered: bool = True,
    ) -> BoundPlan:
        """Bind a plan and remember it; one of a large document once for all who wait for it.

        Args:
            size: bytes of its document.
            is_kept: whether it is kept on disk, or will be.
            is_remembered: whether others may take it from memory already.
        """
        caller.check_read(plan.sources)  # first: what binding refuses tells what the corpora are
        fitted = self._catalog.fit(plan, budget, is_kept=is_kept)

        def bind(_: Budget) -> BoundPlan:
            bound = fitted.bind(parent)
            return self._remember(bound) if is_remembered else bound

        if size <= LARGE_BYTES:
            return bind(budget)
        key = ("bind", fitted.plan.id, is_remembered)
        return shared(self._jobs, budget, key, bind, is_small=False, what=_IS_READ)

    def _parsed(self, document: bytes | bytearray | str, budget: Budget) -> Plan | Link | Draft:
        if len(document) <= LARGE_BYTES:
            return parse_document(document)
        fingerprints = {name: corpus.fingerprint for name, corpus in self._catalog.corpora.items()}
        key = ("parse", xxhash.xxh3_128_digest(document.encode() if isinstance(document, str) else document))
        work = partial(parse_apart, document, fingerprints)
        return shared(self._jobs, budget, key, work, is_small=False, what=_IS_READ)

    def _remember(self, bound: BoundPlan) -> BoundPlan:
        """Add a plan to memory, and forget the plans used longest ago while there is too much."""
        with self._lock:
            bound = self._plans.setdefault(bound.plan.id, bound)  # one object for all callers
            self._plans.move_to_end(bound.plan.id)
            while len(self._plans) > self._max_plans or (
                len(self._plans) > 1 and self._num_bytes() > self._max_bytes
            ):
                self._plans.popitem(last=False)
            return bound

    def _num_bytes(self) -> int:
        """Add up the memory of all plans; takes less than the ms in which a plan is bound."""
        shared = {each for bound in self._plans.values() for each in bound.shared}
        return sum(each.num_bytes for each in (*self._plans.values(), *shared))


def _unknown(parameter: str, plan_id: str) -> UnknownPlan:
    return UnknownPlan(
        f"this server has not seen plan {plan_id}",
        parameter=parameter,
        received=plan_id,
        remedy="POST its document to /v1/plans, then ask again",
    )
