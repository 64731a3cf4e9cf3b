"""What the routes share: open corpora, known plans, answers under way."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from corpus_server import wire
from corpus_server.catalog import BoundPlan, Catalog
from corpus_server.errors import CorpusServerError, InvalidParameter, UnknownPlan
from corpus_server.plan import Plan, Stage
from corpus_server.plan.document import Order
from corpus_server.plan.store import PlanStore
from corpus_server.prefetch import Prefetcher
from corpus_server.reading import Reading, Windows, checksum, read_all
from corpus_server.settings import Settings
from corpus_server.web import metrics
from corpus_server.web.answers import PIECE_BYTES, Answering
from corpus_server.web.schemas import PlanQuery, StepsQuery

_Key = TypeVar("_Key")
_MAX_BOUND_PLANS = 1024
_MAX_BOUND_BYTES = 64 * 2**20
"""Of their documents; a plan with a million exclusions has 20 MB, and arrays of about twice that."""


class Spelling(NamedTuple):
    """A plan of one source as query parameters spell it; None is left out."""

    corpus: str | None
    seq_len: int | None
    batch_size: int | None
    seed: int | None
    order: Order | None
    stride: int | None


class Service:
    """State of one worker process.

    Args:
        catalog: open corpora.
        store: plans seen.
        settings: limits.
    """

    def __init__(self, catalog: Catalog, store: PlanStore, settings: Settings) -> None:
        self.catalog = catalog
        self.store = store
        self.answering = Answering(settings)
        self.prefetcher = Prefetcher(settings.read_ahead_bytes, on_asked=metrics.READ_AHEAD.inc)
        # Both map to the same objects: by id, and by the inline spelling that was seen.
        self._by_id: OrderedDict[str, BoundPlan] = OrderedDict()
        self._by_spelling: OrderedDict[Spelling, BoundPlan] = OrderedDict()

    def close(self) -> None:
        """Stop the threads that touch the maps; idempotent."""
        self.prefetcher.close()
        self.answering.close()

    def why_not_ready(self) -> str | None:
        """Return None when ready, else one sentence; blocks."""
        try:
            for corpus in self.catalog.corpora.values():
                for shard in corpus.shards:
                    shard.check_unchanged()
            self.store.check_writable()
        except CorpusServerError as error:
            return error.detail
        except sqlite3.Error as error:
            return f"plans cannot be kept in {self.store.path}: {error}"
        return None

    def keep(self, plan: Plan) -> BoundPlan:
        """Bind a plan to the corpora here and keep it; blocks."""
        bound = self.catalog.bind(plan)
        self.store.add(bound.plan)
        return bound

    def read_ahead(self, bound: BoundPlan, query: StepsQuery, rows: int, *, step: int) -> None:
        """Let the disk know of a request for the steps of a query from `step` on; waits for nothing."""
        self.prefetcher.note(
            bound, step=step, count=query.count, rows=rows, rank=query.rank, world_size=query.world_size
        )

    async def tokens_as_json(
        self, reading: Reading, fields: Mapping[str, object], headers: Mapping[str, str]
    ) -> Response:
        """Return an answer that holds tokens as JSON lists."""

        def encode() -> bytes:
            document = {**fields, "tokens": read_all(reading)}
            return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)

        content = await self.answering.run_admitted(encode)
        return Response(content, headers=headers, media_type=wire.MEDIA_TYPES["json"])

    async def global_batch_checksum(self, bound: BoundPlan, step: int, rows: int) -> str:
        """Return the checksum of a step's raw tokens over all ranks, read piece by piece."""
        query = StepsQuery.model_construct(step=step, count=1, rank=0, world_size=1)
        reading = windows_reading(bound, query, rows)
        digest = await self.answering.run_admitted(lambda: checksum(reading, PIECE_BYTES))
        return wire.checksum_value(digest)

    def known(self, plan_id: str | None) -> BoundPlan | None:
        """Return a plan that is in memory."""
        bound = self._by_id.get(plan_id) if plan_id is not None else None
        if bound is not None:
            self._by_id.move_to_end(bound.plan.id)
        return bound

    async def by_id(self, plan_id: str) -> BoundPlan:
        """Return a plan that this server, or a worker beside it, has seen.

        Raises:
            UnknownPlan: nobody here has; post it and go on.
        """
        if (bound := self.known(plan_id)) is not None:
            return bound
        plan = await run_in_threadpool(self.store.get, plan_id)
        if plan is None:
            raise UnknownPlan(
                f"this server has not seen plan {plan_id}",
                parameter="plan",
                received=plan_id,
                remedy="POST its document to /v1/plans, then ask again",
            )
        bound = await run_in_threadpool(self.catalog.bind, plan)
        _remember(self._by_id, plan_id, bound)
        return bound

    async def plan_of(self, query: PlanQuery, *, names_corpus: bool = False) -> BoundPlan:
        """Return the plan that a query names by id or spells inline.

        Args:
            query: the query.
            names_corpus: whether `corpus` also says something else than the plan's only source.
        """
        if names_corpus and query.plan is not None:
            query = query.model_copy(update={"corpus": None})
        spelled = Spelling(
            query.corpus, query.seq_len, query.batch_size, query.seed, query.order, query.stride
        )
        if query.plan is not None:
            given = [name for name, value in zip(Spelling._fields, spelled, strict=True) if value is not None]
            if given:
                raise InvalidParameter(
                    f"plan names the whole plan; leave out {', '.join(given)}",
                    parameter=given[0],
                    remedy="name a plan by its id or spell it inline, not both",
                )
            return await self.by_id(query.plan)
        if (bound := self._by_spelling.get(spelled)) is not None:
            self._by_spelling.move_to_end(spelled)
            return bound
        bound = await run_in_threadpool(self.keep, _inline_plan(spelled))
        _remember(self._by_spelling, spelled, bound)
        _remember(self._by_id, bound.plan.id, bound)
        return bound


def windows_reading(
    bound: BoundPlan, query: StepsQuery, rows: int, *, step: int | None = None, count: int | None = None
) -> Windows:
    """Return the tokens that a query asks for, to be read.

    Args:
        rows: as `check_part` says.
        step, count: instead of the query's.
    """
    first = query.step if step is None else step

    def locate(offset: int, count: int, row: int, number: int) -> NDArray[np.int64]:
        start = query.rank * rows + row
        return bound.sampler.locate_rows(first + offset, range(start, start + number), count=count)

    return Windows(
        gatherer=bound.gatherer,
        locate=locate,
        count=query.count if count is None else count,
        rows=rows,
        length=bound.plan.seq_len + 1,
        dtype=bound.dtype,
    )


def check_part(bound: BoundPlan, query: StepsQuery) -> int:
    """Check the steps and the rank that a query asks for; return the rows per step."""
    return bound.sampler.check_part(
        query.step, count=query.count, rank=query.rank, world_size=query.world_size
    )


def _inline_plan(spelled: Spelling) -> Plan:
    corpus, seq_len, batch_size, seed, order, stride = spelled
    if corpus is None or seq_len is None or batch_size is None:
        required = {"corpus": corpus, "seq_len": seq_len, "batch_size": batch_size}
        missing = [name for name, value in required.items() if value is None]
        raise InvalidParameter(
            f"{', '.join(missing)} missing",
            parameter=missing[0],
            remedy="name a plan with plan=ID, or spell one with corpus, seq_len and batch_size",
        )
    return Plan(
        seq_len=seq_len,
        stride=stride,
        seed=seed or 0,
        order=order or "shuffle",
        stages=(Stage(global_batch_size=batch_size, mixture={corpus: 1.0}),),
    )


def _remember(cache: OrderedDict[_Key, BoundPlan], key: _Key, bound: BoundPlan) -> None:
    """Keep a plan, and forget the ones used longest ago while there are too many or too large ones."""
    cache[key] = bound
    num_bytes = sum(len(each.plan.canonical_json()) for each in cache.values())
    while len(cache) > 1 and (len(cache) > _MAX_BOUND_PLANS or num_bytes > _MAX_BOUND_BYTES):
        _, forgotten = cache.popitem(last=False)
        num_bytes -= len(forgotten.plan.canonical_json())
