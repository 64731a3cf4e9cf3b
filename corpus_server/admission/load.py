"""What is under way in one process, and how much may be: connections, responses, bodies, and their bytes."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from operator import itemgetter

from corpus_server.admission.access import Access
from corpus_server.admission.request import Caller
from corpus_server.errors import BodyTooLarge, Overloaded, ResponseTooLarge
from corpus_server.settings import Settings

MAX_BODY_BYTES = 32 * 2**20
"""Bytes of one request's body, and of all large bodies that a process is receiving at the same time; a plan
that leaves out 10^6 steps takes about 20 MB of JSON."""

SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to here are always received: one that never ends costs no more than its connection does. Routes
that read no body drop it."""

MAX_QUESTIONS = 256
"""Questions of a process that compute or wait; and of one token or address a quarter of them."""

_BEGUN, _BEGUN_OWN = 16, 4
"""Questions that have a thread, and those of one token or address: a few callers leave threads to others."""

MAX_FOLLOWERS = 32
"""Streams of events of a process. They hold no slot and read one small file for all."""

MAX_BYTES = 2**30
"""Bytes of all token responses under way in a process, give or take one: 64 of 16 MiB, the most that a loader
asks for at a time. They leave within seconds; if all readers stop, no more than this stays in memory."""

SMALL_BYTES = 256 * 1024
"""A response up to here is never refused for its bytes, because the kernel buffers most of them immediately.
A loader of small steps must not wait for those of large ones."""

FAIR_SHARE = 4
"""A token may hold at most this many times the slots that are still free. One alone gets four fifths of all,
and several busy ones get the same each: nobody finds all slots taken by another."""

BURST_SECONDS = 1.0
"""Time over which `max_bytes_per_second` is averaged."""

STALLED_SECONDS = 2.0
"""A reader that took nothing for so long may be dropped when its slot is needed. A client that was only busy
asks again and gets the same bytes."""

LOOK_SECONDS = 0.1
"""Between two looks for stalled readers. A look passes all slots, and a burst of refusals must not wait for
one each."""

_log = logging.getLogger("corpus_server")


@dataclass(eq=False, slots=True)
class Usage:
    """What a token uses of this process now."""

    num_slots: int = 0
    num_short: int = 0  # short responses that are made
    num_bytes: int = 0  # of responses under way
    paid_until: float = 0.0  # monotonic second until which what it took is within its bytes per second


@dataclass(eq=False, slots=True)
class Slot:
    """The right to have one costly response under way; give it back with `release`."""

    _load: Load
    _caller: Caller
    _usage: Usage
    reader: asyncio.WriteTransport | None
    _unsent_bytes: int = 0
    _unsent_since: float = 0.0
    num_bytes: int = 0  # of the body, once that is known

    def charge(self, num_bytes: int) -> None:
        """Count the body of the response, once its size is known; from any thread.

        Raises:
            Overloaded: it is not small, and all bytes are taken, or the token's share of them.
        """
        rate = self._caller.max_bytes_per_second
        with self._load.lock:
            if num_bytes > SMALL_BYTES:
                self._load.check_share(
                    "bytes of responses", self._load.num_bytes, self._usage.num_bytes, MAX_BYTES
                )
            self.num_bytes = num_bytes
            self._load.num_bytes += num_bytes
            self._usage.num_bytes += num_bytes
            if rate is not None:
                self._usage.paid_until = max(self._usage.paid_until, time.monotonic()) + num_bytes / rate

    def release(self) -> None:
        """Give the slot back; idempotent."""
        if self in self._load.slots:
            self._load.slots.discard(self)
            self._usage.num_slots -= 1
            with self._load.lock:
                self._load.num_bytes -= self.num_bytes
                self._usage.num_bytes -= self.num_bytes

    def stalled_seconds(self, now: float) -> float:
        """Return for how long the client was seen to take nothing, 0 if it was not looked at before."""
        unsent_bytes = 0 if self.reader is None else self.reader.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent_bytes, now
        return now - self._unsent_since


class Load:
    """What is under way in one process, and its limits.

    The `check_...` methods and `Slot.charge` may be called from any thread, everything else from the event
    loop's alone.

    Attributes:
        slots: of the costly responses under way.
        num_bytes: of those whose sizes are known; changed under `lock`.
        connections: open ones by address.
        usage: what each token uses, by its name.
    """

    def __init__(self, settings: Settings, access: Access) -> None:
        self.settings = settings
        self.access = access
        self.slots: set[Slot] = set()
        self.num_bytes = 0
        self.lock = threading.Lock()
        self.num_connections = 0
        self.connections: Counter[str] = Counter()
        self.usage: defaultdict[str, Usage] = defaultdict(Usage)
        self._num_short = self._num_followers = self._body_bytes = 0
        self._questions: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # that wait, by caller
        self._begun: Counter[str] = Counter()  # questions that have a thread, by caller
        self._looked_at = -math.inf  # monotonic second of the last look for stalled readers

    def connect(self, address: str) -> None:
        """Count a connection."""
        self.num_connections += 1
        self.connections[address] += 1

    def disconnect(self, address: str) -> None:
        """Count a connection no longer."""
        self.num_connections -= 1
        self.connections[address] -= 1
        if not self.connections[address]:
            del self.connections[address]

    def check_share(self, what: str, num_all: int, num_own: int, limit: int) -> None:
        """Raise Overloaded unless there is room for something more of a token."""
        num_free = limit - num_all
        is_shared = (self.access.num_tokens or 0) > 1
        if num_free <= 0 or (is_shared and num_own >= FAIR_SHARE * num_free):
            raise Overloaded(f"{num_all} {what} are under way in this process")

    def drop_stalled(self) -> None:
        """Drop readers that have taken nothing for longest, until such hold at most half of the limits.

        It is called where all slots or bytes are taken and a request comes.
        """
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        looked_at = [(slot.stalled_seconds(now), slot) for slot in self.slots]
        stalled = [each for each in looked_at if each[0] > STALLED_SECONDS]
        stalled.sort(key=itemgetter(0))
        num_bytes = sum(slot.num_bytes for _, slot in stalled)
        while len(stalled) > self.settings.max_concurrent_responses // 2 or num_bytes > MAX_BYTES // 2:
            seconds, slot = stalled.pop()
            num_bytes -= slot.num_bytes
            _log.warning("dropped a reader that took nothing for %.1f s: its slot was needed", seconds)
            slot.release()
            if slot.reader is not None:
                slot.reader.abort()

    @contextmanager
    def short(self, caller: Caller) -> Iterator[None]:
        """Count a short response, such as a description, while it is made.

        As many as costly ones: two threads make them, and who comes later would wait for all others.

        Raises:
            Overloaded: as many are being made as may be, or the token has its share of them.
        """
        usage = self.usage[caller.name]
        limit = self.settings.max_concurrent_responses
        self.check_share("responses", self._num_short, usage.num_short, limit)
        self._num_short += 1
        usage.num_short += 1
        try:
            yield
        finally:
            self._num_short -= 1
            usage.num_short -= 1

    @asynccontextmanager
    async def question(self, caller: str) -> AsyncIterator[None]:
        """Wait for a thread for a question, in turns with other callers; count the question while it has it.

        Args:
            caller: a token's name, or an address.

        Raises:
            Overloaded: too many of the process, or of the caller, compute or wait.
        """
        own = len(self._questions.get(caller, ())) + self._begun[caller]
        if sum(map(len, self._questions.values())) + self._begun.total() >= MAX_QUESTIONS:
            raise Overloaded(f"{MAX_QUESTIONS} questions are under way in this process")
        if own >= MAX_QUESTIONS // 4:
            raise Overloaded(f"{own} questions of yours are under way in this process, as many as may be")
        turn = asyncio.get_running_loop().create_future()
        self._questions.setdefault(caller, deque()).append(turn)
        self._begin_questions()
        try:
            await turn
            yield
        finally:
            waiting = self._questions.get(caller, ())
            if turn in waiting:  # cancelled
                self._questions[caller].remove(turn)
            else:
                self._begun -= Counter((caller,))
            self._begin_questions()

    def _begin_questions(self) -> None:
        """Give threads to questions, to one caller after another."""
        while self._begun.total() < _BEGUN:
            waiting = [each for each, queue in self._questions.items() if queue]
            caller = next((each for each in waiting if self._begun[each] < _BEGUN_OWN), None)
            if caller is None:
                break
            self._begun[caller] += 1
            self._questions.move_to_end(caller)
            turn = self._questions[caller].popleft()
            if not turn.done():  # else cancelled
                turn.set_result(None)
        for each in [each for each, queue in self._questions.items() if not queue]:
            del self._questions[each]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count a stream of events while it is sent; raise Overloaded if there are `MAX_FOLLOWERS`."""
        if self._num_followers >= MAX_FOLLOWERS:
            raise Overloaded(f"this process sends {MAX_FOLLOWERS} streams of events, as many as it may")
        self._num_followers += 1
        try:
            yield
        finally:
            self._num_followers -= 1

    @contextmanager
    def receiving(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of one request's body while it is received and worked on.

        Yields:
            A function to be called with the size of the body so far; it raises BodyTooLarge or Overloaded.
        """
        counted = 0

        def count(num_bytes: int) -> None:
            nonlocal counted
            if num_bytes > MAX_BODY_BYTES:
                raise BodyTooLarge(f"a plan must have at most {MAX_BODY_BYTES} bytes")
            if num_bytes > SMALL_BODY_BYTES:
                if self._body_bytes + num_bytes - counted > MAX_BODY_BYTES:
                    raise Overloaded(f"{self._body_bytes} bytes of other bodies are being received")
                self._body_bytes += num_bytes - counted
                counted = num_bytes

        try:
            yield count
        finally:
            self._body_bytes -= counted

    def check_extents(self, size_bytes: int) -> None:
        """Raise ResponseTooLarge if the extents of a response exceed the cache."""
        remedy = "ask for fewer steps, or give a larger --cache-bytes when starting the server"
        what, limit = "the cache for the extents of a response", self.settings.cache_bytes
        _check(what, size_bytes, limit, "bytes", "count", remedy)

    def check_text_size(self, num_tokens: int, parameter: str) -> None:
        """Raise ResponseTooLarge for a JSON or text response of more than `max_text_tokens`."""
        what, remedy = "a response of format json or text", "format=raw or format=npy, or ask for less"
        _check(what, num_tokens, self.settings.max_text_tokens, "tokens", parameter, remedy)


def _check(what: str, size: int, limit: int, unit: str, parameter: str, remedy: str) -> None:
    if size > limit:
        raise ResponseTooLarge(what, size, limit, unit, parameter=parameter, remedy=remedy)
