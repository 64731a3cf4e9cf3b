"""Whose turn it is to compute: one question at a time, caller after caller.

    caller A   question 1, question 2        turns:  A1  B1  A2  B1  A1  ...
    caller B   question 1

A question computes for `TURN_SECONDS`, then the first waiting question of the next caller does. So a caller
with a hundred questions takes as much time from the others as a caller with one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

TURN_SECONDS: Final = 0.03
"""What another question waits for at most, if the one that computes spends as often as it should."""

LOST_SECONDS: Final = 1.0
"""A question that has spent nothing for so long waits for the disk, or for one call of NumPy: another one
computes beside it, so that a disk that does not answer stops nobody else."""

_LOOK_SECONDS: Final = 0.25


class Turns:
    """The question of a process that computes and those that wait for it; safe to use from several threads.

    One computes at a time: two would hold the interpreter twice as long between two pieces of a batch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._computing: set[Turn] = set()
        self._waiting: OrderedDict[str, deque[Turn]] = OrderedDict()  # by caller, the next one first

    def of(self, caller: str) -> Turn:
        """Return the place of a question that its thread may take, and gives back."""
        return Turn(self, caller)


class Turn:
    """The place of one question; for its own thread, but for `wake`."""

    def __init__(self, turns: Turns, caller: str) -> None:
        self._turns = turns
        self._caller = caller
        self._woken = threading.Event()
        self._since = 0.0

    def take(self, is_over: Callable[[], bool]) -> None:
        """Wait for the turn; return without it once `is_over` says so, which `wake` has it asked for."""
        turns = self._turns
        with turns._lock:
            self._woken.clear()
            _queue(turns, self)
            _start_next(turns)
        while True:
            self._woken.wait(_LOOK_SECONDS)
            with turns._lock:
                if self in turns._computing:
                    return
                if is_over():
                    _withdraw(turns, self)
                    return
                self._woken.clear()
                # A process that was stopped for a while may have lost the turn before this thread saw it.
                _queue(turns, self)
                _start_next(turns)  # those that compute may be lost by now

    def give(self) -> None:
        """Let the next question compute; idempotent."""
        with self._turns._lock:
            self._turns._computing.discard(self)
            _start_next(self._turns)

    def pass_on(self, is_over: Callable[[], bool]) -> bool:
        """Let others compute if the turn has lasted long enough; return whether it had."""
        turns, now = self._turns, time.monotonic()
        if now - self._since < TURN_SECONDS:
            return False
        with turns._lock:
            is_lost = self not in turns._computing
            if not is_lost and not turns._waiting:
                self._since = now
                return True
            turns._computing.discard(self)
        self.take(is_over)
        return True

    def wake(self) -> None:
        """Have a question that waits look whether it is over; from any thread."""
        self._woken.set()


def _start_next(turns: Turns) -> None:
    """Give free turns to those that wait, one caller after another; the lock is held."""
    now = time.monotonic()
    for turn in [each for each in turns._computing if now - each._since > LOST_SECONDS]:
        turns._computing.discard(turn)
    while turns._waiting and not turns._computing:
        caller, queue = turns._waiting.popitem(last=False)
        turn = queue.popleft()
        if queue:
            turns._waiting[caller] = queue
        turn._since = now
        turns._computing.add(turn)
        turn._woken.set()


def _queue(turns: Turns, turn: Turn) -> None:
    queue = turns._waiting.setdefault(turn._caller, deque())
    if turn not in queue:
        queue.append(turn)


def _withdraw(turns: Turns, turn: Turn) -> None:
    queue = turns._waiting.get(turn._caller, deque())
    if turn in queue:
        queue.remove(turn)
    if not queue:
        turns._waiting.pop(turn._caller, None)
