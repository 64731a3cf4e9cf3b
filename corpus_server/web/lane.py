"""The short way for what training asks for: `GET /v1/batches?plan=...&step=N...`, step after step.

Such requests of a client differ in their step alone. The first one goes the whole way, through uvicorn's
parser and the framework, where it is checked, understood and answered. What it came to is remembered by the
text around its step: whatever has the same text asks the same of another step.

    same text, and the answer was made ahead (web/ahead.py)   sent as soon as the text is there, unparsed
    same text                                                 past the framework, by the same delivery
    anything else, an error above all                         the whole way
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass

from starlette.types import Scope

from corpus_server.catalog import BoundPlan
from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.reading import Windows
from corpus_server.web import metrics
from corpus_server.web.ahead import Ahead, Stream
from corpus_server.web.answers import Delivery, Head, TokenResponse
from corpus_server.web.connection import Connection, connection_of
from corpus_server.web.schemas import BatchesQuery
from corpus_server.web.service import Service, windows_reading

PATH = "/v1/batches"

MAX_TEXT_BYTES = 2048
"""Longer requests are not remembered."""

_Text = tuple[bytes, bytes]
_STEP = re.compile(rb"(GET /v1/batches\?[^ ]*&step=)([0-9]{1,13})([& ].*)", re.DOTALL)
_ONE_HEAD = re.compile(rb"(?:[^\r\n]+\r\n)+\r\n")
_TELLING = {b"if-none-match", b"connection", b"upgrade", b"expect", b"content-length", b"transfer-encoding"}
"""Headers that make the answer another one, or say that more of the request will come."""

_MAX_KINDS = 4096
"""Every rank of every plan is one; of 1 kB each."""


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

    def head(self, connection: Connection) -> Head:
        """Return what makes the head of its answer."""
        return lambda _, seconds: connection.head_of(self.kind.head % (self.step, seconds * 1e3))


class Lane:
    """Recognises and answers; used by the event loop's thread alone.

    Args:
        service: of this process.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ahead = Ahead(service.answering)
        self._kinds: OrderedDict[_Text, _Kind] = OrderedDict()

    def learn(self, scope: Scope, query: BatchesQuery, answer: TokenResponse) -> None:
        """Remember what a request came to, if the next one of its kind can be answered from that."""
        connection, bound = connection_of(scope), self._service.known(query.plan)
        match = _STEP.fullmatch(connection.text if connection is not None else b"")
        if (
            match is None
            or len(match[0]) > MAX_TEXT_BYTES
            or not _ONE_HEAD.fullmatch(match[0])
            or scope["http_version"] != "1.1"
            or any(name in _TELLING for name, _ in scope["headers"])
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
        around = (match[1], match[3])
        lines = lines.replace(tag, b".batches.%d.") + b"server-timing: answer;dur=%.3f\r\n"
        self._kinds[around] = _Kind(around, query, answer.reading.shape[1], lines)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)

    def recognise(self, text: bytes) -> Asked | None:
        """Return what the text of a request, or of anything else, asks for if it goes this way."""
        match = _STEP.fullmatch(text)
        if match is None or (kind := self._kinds.get((match[1], match[3]))) is None:
            return None
        bound, step = self._service.known(kind.query.plan), int(match[2])
        return (
            Asked(kind, bound, step)
            if bound is not None and _fits(kind, bound, step, kind.query.count)
            else None
        )

    def answer(self, asked: Asked, connection: Connection) -> Coroutine[None, None, bool] | None:
        """Answer what was recognised; return what is to be awaited, unless it was answered at once.

        That tells whether it was answered; if not, nothing was sent, and the request has to go the whole way.
        """
        answering, began = self._service.answering, time.perf_counter()
        delivery = self._ahead.take(asked.kind.text, asked.step) if answering.has_room else None
        if delivery is None:
            return self._answer_later(asked, connection, began)
        sending = answering.deliver_at_once(delivery, connection, asked.head(connection))
        self._note(asked)
        self._make_following(asked)
        if sending is not None:
            return self._await(sending, connection, began)
        self._count(connection, began)
        return None

    async def _answer_later(self, asked: Asked, connection: Connection, began: float) -> bool:
        kind, step = asked.kind, asked.step
        self._note(asked)
        delivery = await self._ahead.await_begun(kind.text, step)
        if delivery is None:
            reading = windows_reading(asked.bound, kind.query, kind.rows, step=step)
            delivery = Delivery(reading, b"", kind.query.checksum)
        sending = self._service.answering.deliver(delivery, connection, asked.head(connection))
        if not await self._await(sending, connection, began):
            return False
        self._make_following(asked)
        return True

    async def _await(
        self, sending: Coroutine[None, None, None], connection: Connection, began: float
    ) -> bool:
        """Wait until an answer has left, and count it; return whether it has."""
        with metrics.ACTIVE.track_inprogress():
            try:
                await sending
            except CorpusServerError:
                return False
        self._count(connection, began)
        return True

    def _count(self, connection: Connection, began: float) -> None:
        metrics.count(PATH, 200, connection.sent_bytes, time.perf_counter() - began)

    def _note(self, asked: Asked) -> None:
        """Let reading ahead know of a request."""
        self._service.read_ahead(asked.bound, asked.kind.query, asked.kind.rows, step=asked.step)

    def _make_following(self, asked: Asked) -> None:
        """Have the next answers of the same stream made, if they are small."""
        kind, bound, query = asked.kind, asked.bound, asked.kind.query

        def windows(step: int, count: int) -> Windows | None:
            return (
                windows_reading(bound, query, kind.rows, step=step, count=count)
                if _fits(kind, bound, step, count)
                else None
            )

        num_bytes = query.count * kind.rows * (bound.plan.seq_len + 1) * bound.dtype.itemsize
        self._ahead.follow(
            Stream(
                key=kind.text,
                count=query.count,
                num_bytes=num_bytes,
                checksum=query.checksum,
                windows=windows,
            ),
            asked.step,
        )


def _fits(kind: _Kind, bound: BoundPlan, step: int, count: int) -> bool:
    """Whether steps exist and have the rows that are known of their kind."""
    query = kind.query
    try:
        return kind.rows == bound.sampler.check_part(
            step, count=count, rank=query.rank, world_size=query.world_size
        )
    except InvalidParameter:
        return False
