"""The short way for what training asks for: `GET /v1/batches?plan=...&step=N...`, step after step.

Such requests differ in their step alone. The first one goes the whole way, through the framework, where it is
checked, understood and answered. What it came to is remembered by the text around its step; the next one with
the same text is answered from that, by the same delivery, at less than half of the cost of a small answer.
Whatever is out of the ordinary, an error above all, goes the whole way.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.types import Scope

from corpus_server.catalog import BoundPlan
from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.web import metrics
from corpus_server.web.ahead import Ahead
from corpus_server.web.answers import Delivery, TokenResponse
from corpus_server.web.connection import Connection
from corpus_server.web.schemas import BatchesQuery
from corpus_server.web.service import Service, windows_reading

PATH = "/v1/batches"

_Text = tuple[bytes, bytes | None]
_STEP = re.compile(rb"(.*&step=)([0-9]{1,13})(&.*)?", re.DOTALL)
_MAX_KINDS = 1024
_MAX_TEXT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Kind:
    """What requests that differ in their step have in common.

    Args:
        text: around their steps.
        query: of one of them.
        rows: of a step.
        head: the answer's headers, with places for the step and the milliseconds it took.
    """

    text: _Text
    query: BatchesQuery
    rows: int
    head: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was recognised."""

    kind: _Kind
    bound: BoundPlan
    step: int


class Lane:
    """Recognises and answers; used by the event loop's thread alone.

    Args:
        service: of this process.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ahead = Ahead(service.answering)
        self._kinds: OrderedDict[_Text, _Kind] = OrderedDict()

    def learn(self, query_string: bytes, query: BatchesQuery, answer: TokenResponse) -> None:
        """Remember what a request came to, if the next one of its kind can be answered from that."""
        match, bound = _STEP.fullmatch(query_string), self._service.known(query.plan)
        if (
            match is None
            or len(query_string) > _MAX_TEXT_BYTES
            or bound is None  # a plan that is spelled is looked up by its spelling
            or bound.plan.skip_steps  # from the first skip on, answers have a header more
            or query.format != "raw"  # else a request's Accept header decides
            or query.checksum == "true"  # its header is another one for each step
        ):
            return
        lines = b"".join(b"%b: %b\r\n" % line for line in answer.raw_headers).replace(b"%", b"%%")
        tag = b".batches.%d." % query.step
        if lines.count(tag) != 1:
            return
        text = (match[1], match[3])
        lines = lines.replace(tag, b".batches.%d.") + b"server-timing: answer;dur=%.3f\r\n"
        self._kinds[text] = _Kind(text, query, answer.reading.shape[1], lines)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)

    def recognise(self, scope: Scope) -> Asked | None:
        """Return what a request asks for if it goes this way."""
        if scope["path"] != PATH or scope["method"] != "GET":
            return None
        match = _STEP.fullmatch(scope["query_string"])
        if match is None or (kind := self._kinds.get((match[1], match[3]))) is None:
            return None
        if any(name == b"if-none-match" for name, _ in scope["headers"]):
            return None
        bound, step = self._service.known(kind.query.plan), int(match[2])
        return Asked(kind, bound, step) if bound is not None and _fits(kind, bound, step) else None

    async def answer(self, asked: Asked, connection: Connection) -> bool:
        """Answer; return whether that was done, with nothing sent if it was not."""
        kind, bound, step = asked.kind, asked.bound, asked.step
        checksum, following = kind.query.checksum, step + kind.query.count
        began = time.perf_counter()
        self._service.read_ahead(bound, kind.query, kind.rows, step=step)
        metrics.ACTIVE.inc()
        try:
            delivery = await self._ahead.take(kind.text, step)
            await self._service.answering.deliver(
                delivery or Delivery(windows_reading(bound, kind.query, kind.rows, step=step), b"", checksum),
                connection,
                lambda _, seconds: connection.head_of(kind.head % (step, seconds * 1e3)),
            )
        except CorpusServerError:
            return False
        finally:
            metrics.ACTIVE.dec()
        metrics.count(PATH, 200, connection.sent_bytes, time.perf_counter() - began)
        if _fits(kind, bound, following):
            self._ahead.make(
                kind.text, following, windows_reading(bound, kind.query, kind.rows, step=following), checksum
            )
        return True


def _fits(kind: _Kind, bound: BoundPlan, step: int) -> bool:
    """Whether steps exist and have the rows that are known of their kind."""
    query = kind.query
    try:
        return kind.rows == bound.sampler.check_part(
            step, count=query.count, rank=query.rank, world_size=query.world_size
        )
    except InvalidParameter:
        return False
