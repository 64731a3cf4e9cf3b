"""What is under way in one process: connections, costly responses and their bytes, by who asked for them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter

from corpus_server.admission.access import Access, Caller
from corpus_server.errors import Overloaded
from corpus_server.settings import Settings

STALLED_SECONDS = 2.0
"""A reader that took nothing for so long may be dropped when its slot is needed. A client that was only busy
asks again and gets the same bytes."""

FAIR_SHARE = 4
"""A token may hold at most this many times the slots that are still free. One alone gets four fifths of all,
and several busy ones get the same each: nobody finds all slots taken by another."""

MAX_BYTES = 2**30
"""Bytes of all token responses under way in a process, give or take one: 64 of 16 MiB, the most that a loader
asks for at a time. They leave within seconds; if all readers stop, no more than this stays in memory."""

SMALL_BYTES = 256 * 1024
"""A response up to here is never refused for its bytes, because the kernel buffers most of them immediately.
A loader of small steps must not wait for those of large ones."""

LOOK_SECONDS = 0.1
"""Between two looks for stalled readers. A look passes all slots, and a burst of refusals must not wait for
one each."""

_log = logging.getLogger("corpus_server")


@dataclass(eq=False, slots=True)
class Usage:
    """What a token uses of this process now."""

    num_slots: int = 0
    num_bytes: int = 0  # of responses under way
    paid_until: float = 0.0  # monotonic second until which what it took is within its bytes per second


@dataclass(eq=False, slots=True)
class Slot:
    """The right to have one costly response under way; give it back with `release`."""

    _load: Load
    _caller: Caller
    _usage: Usage
    _reader: asyncio.WriteTransport | None
    _unsent_bytes: int = 0
    _unsent_since: float = 0.0
    num_bytes: int = 0  # of the body, once that is known

    def charge(self, num_bytes: int) -> None:
        """Count the body of the response, once its size is known; from any thread.

        Raises:
            Overloaded: it is not small, and all bytes are taken, or the token's share of them.
        """
        limits = self._caller.limits
        with self._load.lock:
            if num_bytes > SMALL_BYTES:
                self._load.check_share(
                    "bytes of answers", self._load.num_bytes, self._usage.num_bytes, MAX_BYTES
                )
            self.num_bytes = num_bytes
            self._load.num_bytes += num_bytes
            self._usage.num_bytes += num_bytes
            if limits.max_bytes_per_second is not None:
                paid_until = max(self._usage.paid_until, time.monotonic())
                self._usage.paid_until = paid_until + num_bytes / limits.max_bytes_per_second

    def release(self) -> None:
        """Give the slot back; idempotent."""
        if self in self._load.slots:
            self._load.slots.discard(self)
            self._usage.num_slots -= 1
            with self._load.lock:
                self._load.num_bytes -= self.num_bytes
                self._usage.num_bytes -= self.num_bytes

    def drop(self) -> None:
        """Cut the connection of the client and give the slot back."""
        self.release()
        if self._reader is not None:
            self._reader.abort()

    def stalled_seconds(self, now: float) -> float:
        """Return for how long the client was seen to take nothing, 0 if it was not looked at before."""
        unsent_bytes = 0 if self._reader is None else self._reader.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent_bytes, now
        return now - self._unsent_since


class Load:
    """What is under way; for the event loop's thread, but for what is changed under `lock`.

    Attributes:
        settings, access: the limits, and the tokens.
        slots: of the responses under way.
        num_bytes: of the responses under way whose sizes are known; changed under `lock`.
        num_connections: open ones.
        connections: open ones by address.
    """

    def __init__(self, settings: Settings, access: Access) -> None:
        self.settings = settings
        self.access = access
        self.slots: set[Slot] = set()
        self.num_bytes = 0
        self.lock = threading.Lock()
        self.num_connections = 0
        self.connections: Counter[str] = Counter()
        self._usage: dict[str, Usage] = {}  # by the name of the token
        self._looked_at = -math.inf  # monotonic second of the last look for stalled readers

    def usage(self, caller: Caller) -> Usage:
        """Return what a token uses now."""
        return self._usage.setdefault(caller.name, Usage())

    def take(self, caller: Caller, reader: asyncio.WriteTransport | None) -> Slot:
        """Take a slot."""
        usage = self.usage(caller)
        slot = Slot(self, caller, usage, reader)
        self.slots.add(slot)
        usage.num_slots += 1
        return slot

    def check_share(self, what: str, num_all: int, num_own: int, limit: int) -> None:
        """Raise Overloaded unless there is room for something more of a token."""
        num_free = limit - num_all
        is_shared = (self.access.num_tokens or 0) > 1
        if num_free <= 0 or (is_shared and num_own >= FAIR_SHARE * num_free):
            raise Overloaded(f"{num_all} {what} are under way in this process")

    def drop_stalled(self) -> None:
        """Drop readers that have taken nothing for longest, until such hold at most half of the limits."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        looked_at = [(slot.stalled_seconds(now), slot) for slot in self.slots]
        stalled = [each for each in looked_at if each[0] > STALLED_SECONDS]
        stalled.sort(key=itemgetter(0))
        num_bytes = sum(slot.num_bytes for _, slot in stalled)
        while len(stalled) > self.settings.max_concurrent_answers // 2 or num_bytes > MAX_BYTES // 2:
            seconds, slot = stalled.pop()
            num_bytes -= slot.num_bytes
            _log.warning("dropped a reader that took nothing for %.1f s: its slot was needed", seconds)
            slot.drop()
