"""The next small answer of a stream of steps, made while nobody waits for it.

Whoever asked for steps 7 to 9 will ask for 10 to 12, and which tokens those are is known. So when a small
answer has left, the next one is read and hashed by a thread that has nothing else to do; once it is asked
for it only has to be sent. What is kept is the value of a pure function: to drop it, or to be asked for
another step, costs nothing but the work. Before it is sent it is checked again that no shard has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Literal

from corpus_server.errors import CorpusServerError
from corpus_server.reading import Windows, num_bytes
from corpus_server.web.answers import Answering, Delivery
from corpus_server.wire import ChecksumPlace

MAX_ANSWER_BYTES = 256 * 1024
MAX_BYTES = 16 * 2**20
"""Of all that a process keeps: 64 streams of the largest answers, or 128 of 64 x 1,025 uint16 tokens."""

_log = logging.getLogger("corpus_server")


class Ahead:
    """The next answers of the streams asked for last; used by the event loop's thread alone."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._next: OrderedDict[Hashable, _Making] = OrderedDict()
        self._num_bytes = 0

    async def take(self, stream: Hashable, step: int) -> Delivery | None:
        """Return the answer of a step if it was made, or wait for it if that has begun."""
        making = self._next.get(stream)
        if making is None or making.step != step:
            return None
        if await making.made():
            try:
                return making.delivery.again()
            except CorpusServerError:
                pass  # whoever asks goes the whole way, and hears of it there
        if self._next.get(stream) is making:
            self._drop(stream)
        return None

    def make(self, stream: Hashable, step: int, reading: Windows, checksum: ChecksumPlace) -> None:
        """Make the answer of a step soon, unless it is there, or is large."""
        making, size = self._next.get(stream), num_bytes(reading)
        if size > MAX_ANSWER_BYTES or (making is not None and making.step == step):
            return
        self._drop(stream)
        self._next[stream] = _Making(self._answering, step, size, Delivery(reading, b"", checksum))
        self._num_bytes += size
        while self._num_bytes > MAX_BYTES:
            self._drop(next(iter(self._next)))

    def _drop(self, stream: Hashable) -> None:
        making = self._next.pop(stream, None)
        if making is not None:
            self._num_bytes -= making.num_bytes
            making.cancel()


class _Making:
    """An answer on its way into memory; a thread makes it, which tells only those who wait already."""

    def __init__(self, answering: Answering, step: int, size: int, delivery: Delivery) -> None:
        self.step = step
        self.num_bytes = size
        self.delivery = delivery
        self._lock = threading.Lock()  # guards what follows
        self._state: Literal["queued", "begun", "made", "none"] = "queued"
        self._waiting: list[asyncio.Future[None]] = []
        answering.run_later(self._make)

    async def made(self) -> bool:
        """Tell whether the answer is there, once that is decided; one that was not begun will not be."""
        with self._lock:
            if self._state == "queued":
                self._state = "none"
            waiting = asyncio.get_running_loop().create_future() if self._state == "begun" else None
            if waiting is not None:
                self._waiting.append(waiting)
        if waiting is not None:
            await waiting
        return self._state == "made"

    def cancel(self) -> None:
        """Leave it out if it was not begun."""
        with self._lock:
            if self._state == "queued":
                self._state = "none"

    def _make(self) -> None:
        with self._lock:
            if self._state != "queued":
                return
            self._state = "begun"
        try:
            self.delivery.prepare()
        except CorpusServerError:
            self._end("none")
        except BaseException:  # noqa: BLE001 - whoever asks goes the whole way, and meets it there
            self._end("none")
            _log.exception("an answer could not be made ahead")
        else:
            self._end("made")

    def _end(self, state: Literal["made", "none"]) -> None:
        with self._lock:
            self._state = state
            waiting = self._waiting
        for future in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.set_result(None)
