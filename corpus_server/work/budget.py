"""What one question may use, and whether anybody still waits for its response.

A question is a plain function that gets a budget. It calls `spend` at least every 30 ms or so: that
raises the refusal if the question takes more than it may, `ClientLeft` if nobody waits any more, and gives
the thread's turn to another question when it is over. `check` refuses before the work, where its size is
known.

    made for                threads      turns   a wait
    a token response        gather       no      raises `Later`: it is asked again when the wait is over
    a question              question     yes     blocks its own thread, without a turn
    a command, a test       any          no      blocks
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from corpus_server.errors import Overloaded, ResponseTooLarge
from corpus_server.work.turns import Turn

T = TypeVar("T")

WAIT_SECONDS: Final = 10.0
"""A request waits so long for what others wait for, too, then it is told to come again: clients give up a
connection on which nothing comes."""


class ClientLeft(Exception):
    """Nobody waits for the response any more."""


class Later(Exception):
    """Nothing can be done before a future is done; the question is asked again then.

    Attributes:
        future: to be waited for.
        what: is waited for, as a sentence.
    """

    def __init__(self, future: Future[Any], what: str) -> None:
        super().__init__(what)
        self.future, self.what = future, what


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one question may use.

    Args:
        rows: that are computed; one that joins pieces, or lies in a view, counts as several.
        num_bytes: that are read from the files, or made.
        seconds: of processor time, however its work was counted; for questions, which have turns.
    """

    rows: int = 2**62
    num_bytes: int = 2**62
    seconds: float = 30.0


NO_LIMITS: Final = Limits()


class Budget:
    """What one question may use, and has used; made anew for each.

    Args:
        limits: of the question.
        caller: whose turn it takes: a token's name, or an address.
        has_left: whether the client has left, as the connection knows without being told.
        turn: the question's among those that compute; None: it needs none.
        blocks: whether a wait blocks the thread, else it raises `Later`.
        claim: counts the bytes of the response among those under way.
        max_response_bytes: of the response's body.

    Attributes:
        caller, max_response_bytes: see above.
        rows, num_bytes: that were spent.
        locate_seconds: spent on finding out where rows lie.
        staging_since, staging_seconds: when waiting for an object store began, and how long it took.
    """

    # Class attributes until they are needed: one budget is made for each small batch.
    rows = num_bytes = 0
    locate_seconds = staging_since = staging_seconds = 0.0
    _kept: dict[Hashable, Any] | None = None
    _has_ended = False
    _ends: list[Callable[[bool], None]] | None = None
    _wake: threading.Event | None = None
    _waited: Future[Any] | None = None
    _waits_until = math.inf
    _used_seconds = 0.0

    def __init__(
        self,
        limits: Limits = NO_LIMITS,
        *,
        caller: str = "",
        has_left: Callable[[], bool] | None = None,
        turn: Turn | None = None,
        blocks: bool = True,
        claim: Callable[[int], None] | None = None,
        max_response_bytes: int = 2**62,
    ) -> None:
        self.limits, self.caller, self.max_response_bytes = limits, caller, max_response_bytes
        self._has_left, self._turn, self._blocks, self._claim = has_left, turn, blocks, claim

    # -- work

    def spend(self, *, rows: int = 0, num_bytes: int = 0) -> None:
        """Count work, done or about to be; let another question have its turn when this one's is over.

        Raises:
            ResponseTooLarge: the question takes more than it may.
            ClientLeft: nobody waits for the response.
        """
        if rows or num_bytes:
            self.rows += rows
            self.num_bytes += num_bytes
            if self.rows > self.limits.rows or self.num_bytes > self.limits.num_bytes:
                self.check()
        if self._turn is not None and self._turn.pass_on(self._is_over):
            self._check_seconds()
        if self._is_over():
            raise ClientLeft("nobody waits for the response")

    def check(self, *, rows: int = 0, num_bytes: int = 0, parameter: str = "", remedy: str = "") -> None:
        """Refuse what is about to be computed, if that is more than the question may use.

        Args:
            rows, num_bytes: of the work, besides what was spent.
            parameter: what decides the size.
            remedy: what to ask for instead.

        Raises:
            ResponseTooLarge: naming what the question takes, and the limit.
        """
        needed = {"rows": self.rows + rows, "bytes": self.num_bytes + num_bytes}
        limits = {"rows": self.limits.rows, "bytes": self.limits.num_bytes}
        for unit, size in needed.items():
            if size > limits[unit]:
                raise ResponseTooLarge(
                    "a question",
                    size,
                    limits[unit],
                    unit,
                    parameter=parameter,
                    remedy=remedy or "ask for less",
                )

    @property
    def left_rows(self) -> int:
        """Rows that may still be computed."""
        return self.limits.rows - self.rows

    def check_response(self, num_bytes: int, parameter: str = "") -> None:
        """Refuse a response whose body is larger than it may be, before or while it is made.

        Args:
            parameter: what decides the size.

        Raises:
            ResponseTooLarge: naming the size and the limit.
        """
        if num_bytes > self.max_response_bytes:
            less = f"a smaller {parameter}" if parameter else "ask for less"
            raise ResponseTooLarge(
                "a response",
                num_bytes,
                self.max_response_bytes,
                "bytes",
                parameter=parameter,
                remedy=f"{less}, or --max-response-bytes when starting the server",
            )

    def claim(self, num_bytes: int) -> None:
        """Count the bytes of the response among those under way in the process, once.

        Raises:
            Overloaded: they are too many now.
        """
        claim, self._claim = self._claim, None
        if claim is not None:
            claim(num_bytes)

    # -- waiting

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` made when the question came here first, which may be asked again."""
        if self._kept is None:
            self._kept = {}
        if key not in self._kept:
            self._kept[key] = make()
        return cast("T", self._kept[key])

    def wait(self, future: Future[T], what: str) -> T:
        """Return the result of a future, without a turn or, on a gather thread, by being asked again.

        Args:
            future: a new one, or the same one whenever the question is asked again, see `once`. If it fails,
                so does the question when it is asked again.
            what: is waited for, as a sentence.

        Raises:
            ClientLeft: nobody waits for the response.
            Later: see above.
            Overloaded: it took `WAIT_SECONDS`.
        """
        waited, self._waited = self._waited, None
        if waited is not None:
            waited.result()  # raises what it failed with
        if not future.done():
            if not self._blocks:
                self._waited = future
                raise Later(future, what)
            self._block(future, what)
        return future.result()

    def seconds_left(self) -> float:
        """Return how long the question may still wait."""
        if self._waits_until == math.inf:
            self._waits_until = time.monotonic() + WAIT_SECONDS
        return max(0.0, self._waits_until - time.monotonic())

    def tired(self, what: str) -> Overloaded:
        """Return what a client is told that has waited long enough; what it waits for goes on."""
        self.end(comes_again=True)
        return Overloaded(what)

    def _block(self, future: Future[Any], what: str) -> None:
        woken = self._wake = threading.Event()
        future.add_done_callback(lambda _: woken.set())
        if self._turn is not None:
            self._turn.give()
        try:
            is_patient = self._turn is None
            if not woken.wait(None if is_patient else self.seconds_left()):
                raise self.tired(what)
        finally:
            self._wake = None
        if self._is_over():
            raise ClientLeft("nobody waits for the response")
        if self._turn is not None:
            self._turn.take(self._is_over)

    # -- beginning and end

    def begin(self) -> None:
        """Take the first turn, in the thread that computes.

        Raises:
            ClientLeft: nobody waits for the response.
        """
        if self._turn is not None:
            self._used_seconds = -time.thread_time()
            self._turn.take(self._is_over)
        if self._is_over():
            raise ClientLeft("nobody waits for the response")

    def stop(self) -> None:
        """Give the turn back for good, in the thread that computed."""
        if self._turn is not None:
            self._turn.give()
            self._turn = None

    def end(self, *, comes_again: bool = False) -> None:
        """Say that nobody waits for the response any more; from any thread, idempotent.

        Args:
            comes_again: the client was told to ask again soon.
        """
        self._has_ended = True
        # They hold whoever holds this budget: such circles would wait for the garbage collector.
        self._has_left = self._claim = None
        if self._turn is not None:
            self._turn.wake()
        if (woken := self._wake) is not None:
            woken.set()
        while self._ends:
            try:
                call = self._ends.pop()
            except IndexError:  # another thread was faster
                return
            call(comes_again)

    def when_over(self, call: Callable[[bool], None]) -> None:
        """Have a function called at the `end`, with whether the client comes again; now if that has been."""
        if self._ends is None:
            self._ends = []
        self._ends.append(call)
        if self._is_over():
            self.end()

    def _is_over(self) -> bool:
        has_left = self._has_left  # another thread may end it meanwhile
        return self._has_ended or (has_left is not None and has_left())

    def _check_seconds(self) -> None:
        used = self._used_seconds + time.thread_time()
        if used > self.limits.seconds:
            raise ResponseTooLarge(
                "a question",
                math.ceil(used),
                int(self.limits.seconds),
                "seconds of processor time",
                parameter="",
                remedy="ask for less",
            )
