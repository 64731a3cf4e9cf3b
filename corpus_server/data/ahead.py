"""The next small responses of a client that asks step after step, made before they are asked for.

    request       5     6                  7     8     9     10    11
    made          5     6   then 7 to 14   -     -     -     -     then 15 to 22

A response is made by the function that answers requests, from the whole text of the request that is expected,
and is sent only if exactly that text comes: a wrong guess costs time, and can never be a wrong answer. The
p50 of a client that asks for a small step at a time is 1.5 times lower; clients that ask for megabytes at a
time are not followed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

from corpus_server.data.head import RequestHead
from corpus_server.data.response import Response

MAX_RESPONSE_BYTES = 256 * 1024
"""Bytes of a response; for larger ones the latency is that of sending them."""

RUN_BYTES = 512 * 1024
"""Bytes made in one go: they are still in the L2 cache when they are sent."""

MAX_BYTES = 16 * 2**20
"""Bytes of all connections of a process. The connections that asked longest ago lose theirs first."""

_STEP = re.compile(rb"(?<=[?&]step=)[0-9]{1,13}(?=[& ])")
_COUNT = re.compile(rb"(?<=[?&]count=)[0-9]{1,4}(?=[& ])")


class Made(NamedTuple):
    """A response that was made ahead, whole and in memory, and the request that it answers."""

    request: RequestHead
    response: Response


def following(text: bytes, most: int = 1) -> list[bytes]:
    """Return the texts of requests for the steps that follow those of `text`; none if it names no step."""
    step, count = _STEP.search(text), _COUNT.search(text)
    if step is None:
        return []
    first, size = int(step[0]), 1 if count is None else int(count[0])
    before, after = text[: step.start()], text[step.end() :]
    return [b"%b%d%b" % (before, first + k * size, after) for k in range(1, most + 1)]


def step_of(text: bytes) -> int:
    """Return the step that `following` has put into a text."""
    found = _STEP.search(text)
    return -1 if found is None else int(found[0])


class Ahead:
    """The responses made ahead for one connection; used by the event loop's thread alone."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._expected: bytes | None = None
        self._making: tuple[bytes, ...] = ()
        self._made: dict[bytes, Made] = {}

    def take(self, text: bytes) -> Made | None:
        """Return, for good, what was made for a request; None if nothing was."""
        return self._made.pop(text, None)

    def is_making(self, text: bytes) -> bool:
        """Tell whether a thread is at work on the response to a request."""
        return text in self._making

    def next_run(self, text: bytes, num_bytes: int) -> tuple[bytes, ...]:
        """Note that `text` was answered with `num_bytes`; return the texts whose responses to make now."""
        is_next = text == self._expected
        if not is_next:
            self.drop()
        self._expected = next(chain(self._made, self._making), None) or next(iter(following(text)), None)
        if not is_next or self._making or not 0 < num_bytes <= MAX_RESPONSE_BYTES:
            return ()
        most = min(RUN_BYTES, self._budget.share(self)) // num_bytes
        if len(self._made) > most // 2 or not most:
            return ()
        self._making = tuple(following(next(reversed(self._made), text), most))
        return self._making

    def keep(self, run: tuple[bytes, ...], made: Mapping[bytes, Made]) -> None:
        """Keep the responses of a run, unless it was dropped meanwhile."""
        if self._making is run:
            self._making = ()
            self._made.update(made)
            self._budget.note(self, sum(num_bytes(made.response) for made in self._made.values()))

    def drop(self) -> None:
        """Forget everything, also that the connection goes step by step."""
        self._making = ()
        self._made.clear()
        self._budget.forget(self)

    def clear(self) -> None:
        """Forget what was made."""
        self._made.clear()


class Budget:
    """What all connections of a process keep together."""

    def __init__(self) -> None:
        self._num_bytes: OrderedDict[Ahead, int] = OrderedDict()  # of all that go step by step
        self._total = 0

    def share(self, ahead: Ahead) -> int:
        """Return how many bytes may be made in one go, so that a run and a half of each connection has room.

        Without shares 64 workers took the room from one another before they had used anything, and their
        server needed 2.5 times the CPU.
        """
        self._num_bytes.setdefault(ahead, 0)
        return MAX_BYTES // len(self._num_bytes) * 2 // 3

    def note(self, ahead: Ahead, num_bytes: int) -> None:
        """Note what a connection keeps; the others that asked longest ago make room for it."""
        self._set(ahead, num_bytes)
        self._num_bytes.move_to_end(ahead)
        for other in self._num_bytes:
            if self._total <= MAX_BYTES:
                break
            other.clear()
            self._set(other, 0)

    def forget(self, ahead: Ahead) -> None:
        """Note that a connection is gone or asks in another order; idempotent."""
        self._total -= self._num_bytes.pop(ahead, 0)

    def _set(self, ahead: Ahead, num_bytes: int) -> None:
        self._total += num_bytes - self._num_bytes.get(ahead, 0)
        self._num_bytes[ahead] = num_bytes


def num_bytes(response: Response) -> int:
    """Return the bytes of a body that is in memory."""
    return sum(len(part) for group in response.body for part in group)
