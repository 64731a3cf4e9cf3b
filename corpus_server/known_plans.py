"""The plans that a process knows: in memory by id and by inline spelling, and on disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from corpus_server.admission.access import ANYONE, Caller
from corpus_server.catalog import Catalog
from corpus_server.errors import InvalidParameter, UnknownPlan
from corpus_server.plan import BoundedShuffle, Order, Plan, Stage
from corpus_server.plan_store import PlanStore
from corpus_server.read.bound_plan import BoundPlan

MAX_PLANS = 1024
MAX_BYTES = 64 * 2**20
LARGE_BYTES = 2**20
"""A document of this size takes some 20 times as much memory while it is parsed: one such at a time."""


class Spelling(NamedTuple):
    """A plan of one source as query parameters spell it; None stands for a parameter that is left out."""

    corpus: str | None
    seq_len: int | None
    batch_size: int | None
    seed: int | None
    order: Order | None
    block_windows: int | None
    group_blocks: int | None
    stride: int | None

    def plan(self) -> Plan:
        """Return the plan that is spelled.

        Raises:
            InvalidParameter: a parameter without a default is missing, or parameters contradict each other.
            InvalidPlan: a value is outside its range.
        """
        if self.corpus is None or self.seq_len is None or self.batch_size is None:
            required = ("corpus", "seq_len", "batch_size")
            missing = [name for name in required if getattr(self, name) is None]
            raise InvalidParameter(
                f"{', '.join(missing)} missing",
                parameter=missing[0],
                remedy="name a plan with plan=ID, or spell one with corpus, seq_len and batch_size",
            )
        return Plan(
            seq_len=self.seq_len,
            stride=self.stride,
            seed=self.seed or 0,
            order=self._order(),
            stages=(Stage(global_batch_size=self.batch_size, mixture={self.corpus: 1.0}),),
        )

    def _order(self) -> Order | BoundedShuffle:
        order = self.order or "shuffle"
        if self.block_windows is None and self.group_blocks is None:
            return order
        if order != "shuffle" or self.block_windows is None or self.group_blocks is None:
            raise InvalidParameter(
                "block_windows and group_blocks must be given together, with order shuffle; got "
                f"block_windows {self.block_windows}, group_blocks {self.group_blocks}, order {order}",
                parameter="order" if order != "shuffle" else "block_windows",
            )
        return BoundedShuffle(block_windows=self.block_windows, group_blocks=self.group_blocks)


class KnownPlans:
    """Bound plans by id; safe to use from several threads.

    Memory holds the plans used last, within two bounds; a plan that falls out is bound again from the store.
    Plans that are only spelled inline never reach the store, where a stranger could add one with each GET.

    `max_plans` bounds the spellings that are remembered, too. The plan used last stays, however large it is.
    """

    def __init__(
        self, catalog: Catalog, store: PlanStore, *, max_plans: int = MAX_PLANS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._max_plans, self._max_bytes = max_plans, max_bytes
        self._lock = threading.Lock()  # of the three below; never held while a plan is bound
        self._plans: OrderedDict[str, BoundPlan] = OrderedDict()  # by id, the plan used last at the end
        self._ids: OrderedDict[Spelling, str] = OrderedDict()
        self._num_bytes = 0
        self._large = threading.Lock()

    def in_memory(self, plan_id: str) -> BoundPlan | None:
        """Return the plan if it is in memory; never blocks."""
        with self._lock:
            if plan_id in self._plans:
                self._plans.move_to_end(plan_id)
            return self._plans.get(plan_id)

    def by_id(self, plan_id: str) -> BoundPlan:
        """Return a plan that this process, or a worker beside it, has seen; reads the store.

        Raises:
            UnknownPlan: nobody here has seen it.
            UnknownCorpus, FingerprintMismatch, InvalidPlan: see `Catalog.bind`.
        """
        if (bound := self.in_memory(plan_id)) is not None:
            return bound
        document = self._store.document(plan_id)
        if document is None:
            raise UnknownPlan(
                f"this server has not seen plan {plan_id}",
                parameter="plan",
                received=plan_id,
                remedy="POST its document to /v1/plans, then ask again",
            )
        with self._turn(len(document)):
            if (bound := self.in_memory(plan_id)) is not None:  # another thread bound it meanwhile
                return bound
            return self._remember(self._catalog.bind(Plan.parse(document)))

    def keep_document(
        self, body: bytes | bytearray, caller: Caller = ANYONE, *, keep: bool = True
    ) -> BoundPlan:
        """Bind the plan of a posted document, remember it, and keep it in the store.

        Args:
            keep: else the plan is only bound, as if it had never been posted.

        Raises:
            Forbidden: the caller may not read one of its corpora.
            InvalidPlan: the document is not a plan, or does not fit the corpora.
            UnknownCorpus, FingerprintMismatch: see `Catalog.bind`.
        """
        with self._turn(len(body)):
            plan = Plan.parse(body)
            caller.check_read(plan.sources)  # first: what binding refuses tells what the corpora are
            bound = self._catalog.bind(plan)
            if not keep:
                return bound
            self._store.add(bound.plan, owner=caller.name, most=caller.limits.max_plans)
            return self._remember(bound)

    def spelled(self, spelling: Spelling) -> BoundPlan:
        """Return the plan that is spelled inline; its id can be asked for while it is in memory."""
        with self._lock:
            plan_id = self._ids.get(spelling)
        if plan_id is not None and (bound := self.in_memory(plan_id)) is not None:
            return bound
        bound = self._remember(self._catalog.bind(spelling.plan()))
        with self._lock:
            self._ids[spelling] = bound.plan.id
            if len(self._ids) > self._max_plans:
                self._ids.popitem(last=False)
        return bound

    def _turn(self, num_bytes: int) -> AbstractContextManager[object]:
        return self._large if num_bytes > LARGE_BYTES else nullcontext()

    def _remember(self, bound: BoundPlan) -> BoundPlan:
        """Add a plan to memory, and forget the plans used longest ago while there is too much."""
        with self._lock:
            if bound.plan.id not in self._plans:
                self._num_bytes += bound.num_bytes
            bound = self._plans.setdefault(bound.plan.id, bound)  # one object for all callers
            self._plans.move_to_end(bound.plan.id)
            while len(self._plans) > self._max_plans or (
                len(self._plans) > 1 and self._num_bytes > self._max_bytes
            ):
                _, forgotten = self._plans.popitem(last=False)
                self._num_bytes -= forgotten.num_bytes
            return bound
