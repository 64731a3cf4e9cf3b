"""The next small answers of a stream of steps, made while nobody waits for them.

Whoever asked for steps 7 to 9 will ask for 10 to 12, and which tokens those are is known. So while small
answers leave, the next ones are read and hashed by a thread of their own, several at a time:
for a single one, finding its windows costs as much as reading them. Once asked for they only have to be sent.

    asked for      |
    run being sent |--#--|     |     |
    run being made                   |-----|-----|-----|

What is kept is the value of a pure function: to drop it, or to be asked for another step, costs nothing but
the work. Before it is sent it is checked again that no shard has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from corpus_server.errors import CorpusServerError
from corpus_server.reading import Windows
from corpus_server.web.answers import Answering, Delivery
from corpus_server.wire import ChecksumPlace

MAX_ANSWER_BYTES = 256 * 1024
RUN_BYTES = 512 * 1024
"""Read at a time, and still in the processor's cache when it is hashed and sent."""

MAX_BYTES = 16 * 2**20
"""Of all that a process keeps, two runs a stream: 61 streams of 64 x 1,025 uint16 tokens one by one."""

MAX_STREAMS = 4096

_log = logging.getLogger("corpus_server")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Answers that follow one another.

    Args:
        key: says which stream it is.
        count: steps of an answer.
        num_bytes: of an answer.
        checksum: where it stands.
        windows: returns what (first step, steps) are made of; None where they are not like the others.
    """

    key: Hashable
    count: int
    num_bytes: int
    checksum: ChecksumPlace
    windows: Callable[[int, int], Windows | None]


class Ahead:
    """The next answers of the streams asked for last; used by the event loop's thread alone."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._followed: OrderedDict[Hashable, _Followed] = OrderedDict()  # the stream asked last is last
        self._num_bytes = 0

    def take(self, key: Hashable, step: int) -> Delivery | None:
        """Return the answer from a step on if it was made."""
        run = self._run_of(key, step)
        return run.answer(step) if run is not None and run.is_made else None

    async def await_begun(self, key: Hashable, step: int) -> Delivery | None:
        """Return the answer from a step on if it was made, and wait for it if that has begun."""
        run = self._run_of(key, step)
        return run.answer(step) if run is not None and await run.made() else None

    def follow(self, stream: Stream, step: int) -> None:
        """Have the answers made that follow the one from a step on, and drop the stream's others.

        Only once steps were asked for one after another: many clients may be at many places of one plan.
        """
        if stream.num_bytes > MAX_ANSWER_BYTES:
            return
        current = self._run_of(stream.key, step)
        followed = self._followed.pop(stream.key, None) or _Followed()
        self._followed[stream.key] = followed
        expected, followed.next_step = followed.next_step, step + stream.count
        if current is not None or step == expected:
            stop = followed.next_step if current is None else current.stop
            following = next((run for run in followed.runs if run.first == stop), None)
            following = following or self._new_run(stream, stop)
            kept = tuple(run for run in (current, following) if run is not None)
            self._forget(run for run in followed.runs if run not in kept)
            followed.runs = kept
        while self._num_bytes > MAX_BYTES or len(self._followed) > MAX_STREAMS:
            self._forget(self._followed.popitem(last=False)[1].runs)

    def _run_of(self, key: Hashable, step: int) -> _Run | None:
        followed = self._followed.get(key)
        return None if followed is None else next((run for run in followed.runs if run.holds(step)), None)

    def _new_run(self, stream: Stream, first: int) -> _Run | None:
        """Begin as many answers as fit, or one."""
        fair_bytes = MAX_BYTES // (2 * len(self._followed))
        most = max(1, min(RUN_BYTES, fair_bytes) // stream.num_bytes)
        for number in (most, 1):
            windows = stream.windows(first, number * stream.count)
            if windows is not None:
                run = _Run(stream, first, number, windows)
                self._num_bytes += run.num_bytes
                self._answering.run_ahead(run.make)
                return run
        return None

    def _forget(self, runs: Iterable[_Run]) -> None:
        for run in runs:
            self._num_bytes -= run.num_bytes
            run.cancel()


@dataclass(slots=True)
class _Followed:
    """Where a stream is.

    Args:
        next_step: that will be asked for if steps are asked for one after another.
        runs: the one asked from last, and the one behind it.
    """

    next_step: int = -1
    runs: tuple[_Run, ...] = ()


class _Run:
    """Answers on their way into memory; a thread makes them, which tells only those who wait already.

    Args:
        stream: that they belong to.
        first: step of the first one.
        number: of answers.
        windows: of all their steps.
    """

    def __init__(self, stream: Stream, first: int, number: int, windows: Windows) -> None:
        self.first = first
        self.stop = first + number * stream.count
        self.num_bytes = number * stream.num_bytes
        self._stream = stream
        self._number = number
        self._windows = windows
        self._answers: Sequence[Delivery] = ()
        self._lock = threading.Lock()  # guards what follows
        self._state: Literal["queued", "begun", "made", "none"] = "queued"
        self._waiting: list[asyncio.Future[None]] = []

    def holds(self, step: int) -> bool:
        """Whether an answer begins with a step."""
        return self.first <= step < self.stop and (step - self.first) % self._stream.count == 0

    @property
    def is_made(self) -> bool:
        """Whether the answers are there."""
        return self._state == "made"

    async def made(self) -> bool:
        """Tell whether the answers are there, once that is decided; if not begun, they will not be."""
        with self._lock:
            if self._state == "queued":
                self._state = "none"
            waiting = asyncio.get_running_loop().create_future() if self._state == "begun" else None
            if waiting is not None:
                self._waiting.append(waiting)
        if waiting is not None:
            await waiting
        return self._state == "made"

    def answer(self, step: int) -> Delivery | None:
        """Return the answer from a step on, unless it must not be sent any more."""
        try:
            return self._answers[(step - self.first) // self._stream.count].again()
        except CorpusServerError:  # whoever asks goes the whole way, and hears of it there
            return None

    def cancel(self) -> None:
        """Leave them out if they were not begun."""
        with self._lock:
            if self._state == "queued":
                self._state = "none"

    def make(self) -> None:
        """Make them; blocks."""
        with self._lock:
            if self._state != "queued":
                return
            self._state = "begun"
        try:
            parts = self._windows.read_parts(self._number)
            self._answers = [Delivery(part, b"", self._stream.checksum) for part in parts]
            for answer in self._answers:
                answer.prepare()
        except CorpusServerError:
            self._end("none")
        except BaseException:  # noqa: BLE001 - whoever asks goes the whole way, and meets it there
            self._end("none")
            _log.exception("answers could not be made ahead")
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
