"""The map of a file whose bytes come and go: local files of its extents lie at addresses that stay.

    addresses    |-------- reserved --------|== extent 1 ==|-------- reserved --------|== extent 3 ==|

The addresses are reserved when the file is opened. Attaching maps a local file over its part of the
reservation, detaching the reservation over the local file. So a `Gatherer` computes its addresses once, as
for local files. Reading the reservation ends the process rather than giving a wrong token; `MappedSpans.held`
prevents it.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from corpus_server.corpus import guard
from corpus_server.corpus.files import HUGE_PAGE, OpenFile, address_of, map_over, reserve
from corpus_server.errors import CorpusServerError, NotStaged, ReadFailed

Span = tuple["PartlyMappedFile", int, int]
"""Bytes [start, stop) of a file that are mapped together: an `Extent`."""


@dataclass(slots=True, eq=False)
class Attached:
    """Bytes [start, stop) of a file that are mapped.

    Attributes:
        sharing: other spans that are mapped, too, and hold some of the same bytes: those are read from any of
            the local files.
    """

    file: PartlyMappedFile
    start: int
    stop: int
    local: OpenFile
    status: tuple[int, ...]  # of the local file, when it was mapped
    guarded: guard.GuardedRange | None
    sharing: tuple[Attached, ...] = ()
    is_attached: bool = True
    looked_at: float = -math.inf  # monotonic time at which the local file was still what it was

    @property
    def num_faults(self) -> int:
        """How many pages the disk did not deliver."""
        return 0 if self.guarded is None else self.guarded.num_faults

    def check_unchanged(self, since_seconds: float) -> None:
        """Raise if bytes copied from the map may be wrong; see `Extent.check_unchanged`."""
        for each in (self, *self.sharing):
            if not each._is_good(since_seconds):
                each.file.report(each)

    def _is_good(self, since_seconds: float) -> bool:
        if self.num_faults:
            return False
        if (now := time.monotonic()) - self.looked_at < since_seconds:
            return True
        is_good = _status(self.local) == self.status
        if is_good:
            self.looked_at = now
        return is_good


class PartlyMappedFile(OpenFile):
    """A file whose map comes and goes; safe to use from several threads.

    Attributes:
        data: the bytes that are mapped, those of its tokens; known with `map`.
    """

    is_local: ClassVar = False

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.name = path.name
        self.owner = ""
        self.size_bytes = size_bytes
        self.data = range(size_bytes)
        self._reserved: mmap.mmap | None = None
        self._address = 0  # of the byte 0 of the file
        self._lock = threading.Lock()
        self._attached: dict[Span, Attached] = {}  # guarded by the lock, with all that is in it

    def _reserve(self, first: int) -> memoryview:
        """Reserve the addresses of a map of which the first span begins at a byte."""
        # Extents begin at huge pages, or at pages: what is mapped there does.
        page = HUGE_PAGE if self.size_bytes >= HUGE_PAGE else mmap.PAGESIZE
        before = -first % page
        # Kept until `close`: whatever was mapped at these addresses afterwards would be overwritten.
        self._reserved = reserve(self.path, before + self.size_bytes)
        self._address = address_of(self._reserved) + before
        return memoryview(self._reserved)[before : before + self.size_bytes]

    def name_of(self, start: int, stop: int) -> str:
        """Return what errors call some bytes: the file, and which of it unless all that are mapped."""
        is_all = (start, stop) == (self.data.start, self.data.stop)
        return self.name if is_all else f"{self.name}[{start}:{stop}]"

    def is_surely_good(self, span: Span) -> bool:
        """Tell whether a span is mapped and is what it was; False also where that must be looked at closely.

        Each request asks for hundreds: `attach` and `Attached.check_unchanged` take thrice as long.
        """
        its = self._attached.get(span)
        if its is None or its.sharing or its.num_faults or _status(its.local) != its.status:
            return False
        its.looked_at = time.monotonic()
        return True

    def is_attached(self, span: Span) -> bool:
        """Tell whether the tokens of a span can be read."""
        return span in self._attached

    def attach(self, span: Span, open_local: Callable[[], OpenFile | None]) -> bool:
        """Map a span if there is a local file of it; return whether it is mapped now."""
        if span in self._attached:  # most often; without the lock, because a request asks for hundreds
            return True
        with self._lock:
            if span in self._attached:
                return True
            if (local := open_local()) is None:
                return False
            _, start, stop = span
            local.name, local.owner = self.name_of(start, stop), self.owner
            guarded = None
            if self._reserved is not None:  # an empty shard has no map
                address = self._address + start
                try:
                    map_over(self.path, address, stop - start, local.fd)
                except CorpusServerError:
                    local.close()
                    raise
                guarded = guard.guard(address, stop - start)
            sharing = [each for each in self._attached.values() if each.start < stop and start < each.stop]
            its = Attached(self, start, stop, local, _status(local), guarded, tuple(sharing))
            for each in sharing:
                each.sharing = (*each.sharing, its)
            self._attached[span] = its
            return True

    def detach(self, span: Span) -> bool:
        """Unmap a span, so that its local file may be removed; return False if tokens are being copied."""
        with self._lock, _holding:
            its = self._attached.get(span)
            if its is not None and any(its in each for each in _held.values()):
                return False
            if its is not None:
                self._detach(its)
            return True

    def attached(self, span: Span) -> Attached | None:
        """Return a span as it is mapped, if it is."""
        return self._attached.get(span)

    def is_resident(self, offset: int) -> bool:
        """Tell whether the page cache holds the byte at `offset`."""
        with self._lock:
            its = (each for each in self._attached.values() if each.start <= offset < each.stop)
            found = next(its, None)
            return found is not None and found.local.is_resident(offset - found.start)

    def drop(self, offset: int, count: int) -> None:
        """Take whole pages of the spans that are mapped out of the page cache."""
        with self._lock:
            for each in self._attached.values():
                begin, end = max(offset, each.start), min(offset + count, each.stop)
                if begin < end:
                    each.local.drop(begin - each.start, end - begin)

    def check_unchanged(self) -> None:
        """Do nothing: a version in a store never changes; see `Attached.check_unchanged` for the copies."""

    def report(self, its: Attached) -> None:
        """Raise what is wrong with a span that is mapped, or was a moment ago."""
        with self._lock:
            if self._attached.get((self, its.start, its.stop)) is not its:
                return
            name = f"{self.owner}{its.local.name}"
            its.local.check_unchanged()
            if not os.fstat(its.local.fd).st_nlink:  # see `Cache.revoke`: what is in use is not removed else
                raise ReadFailed(
                    f"{name}: its copy was taken out of the cache: the disk did not take it, it is wrong, or "
                    "somebody removed it",
                    remedy="it is staged anew",
                )
            if its.num_faults:
                raise ReadFailed(
                    f"{name}: the cache's disk did not deliver {its.num_faults} pages",
                    remedy="look at the kernel's log; it is staged anew",
                )

    def close(self) -> None:
        """Detach for good; a second call does nothing."""
        with self._lock:
            for each in list(self._attached.values()):
                self._detach(each)
            self._reserved, self._address = None, 0

    def _detach(self, its: Attached) -> None:
        del self._attached[self, its.start, its.stop]
        its.is_attached = False
        if its.guarded is not None:
            guard.release(its.guarded)
            self._unmap(its)
        for each in its.sharing:
            each.sharing = tuple(other for other in each.sharing if other is not its)
        its.local.close()

    def _unmap(self, its: Attached) -> None:
        """Map the reservation over a span, but for bytes that others hold: those are mapped from there."""
        low, high = its.start, its.stop
        ends = (at for each in its.sharing for at in (each.start, each.stop))
        for start, stop in pairwise(sorted({low, high, *(min(max(at, low), high) for at in ends)})):
            fd, offset = -1, 0
            for each in its.sharing:
                if each.start <= start and stop <= each.stop:
                    fd, offset = each.local.fd, start - each.start
            map_over(self.path, self._address + start, stop - start, fd, offset)


def _status(file: OpenFile) -> tuple[int, ...]:
    """Return what differs if a local file is not what it was."""
    try:
        status = os.fstat(file.fd)
    except OSError:  # closed a moment ago
        return ()
    return status.st_nlink, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_unchanged(attached: Iterable[Attached], *, since_seconds: float) -> None:
    """Do for several what `Attached.check_unchanged` does."""
    since = time.monotonic() - since_seconds
    for each in attached:
        if each.sharing or each.looked_at <= since or each.num_faults:
            each.check_unchanged(since_seconds)


_held: dict[int, list[Attached]] = {}  # of all copies that are being made, by the identity of the list
_holding = threading.Lock()  # guards what is held; after the lock of a file


class MappedSpans:
    """Spans that responses read again and again, as they are mapped; safe to use from several threads."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._found: list[Attached | None] = [None] * len(spans)

    @contextmanager
    def held(self, numbers: Sequence[int]) -> Iterator[list[Attached]]:
        """Keep some of the spans mapped; yield them as they are mapped.

        All at once, because a response holds a hundred: one after another takes as long as a tenth of its
        copy. Nor is each looked up for each copy: a span that was detached says so.

        Raises:
            NotStaged: one is not.
        """
        found = self._found
        with _holding:
            attached = [its for number in numbers if (its := found[number]) is not None and its.is_attached]
            if len(attached) < len(numbers):
                attached = [self._find(number) for number in numbers]
            _held[id(attached)] = attached
        try:
            yield attached
        finally:
            with _holding:
                del _held[id(attached)]

    def _find(self, number: int) -> Attached:
        file, *bounds = span = self._spans[number]
        if (its := file.attached(span)) is None:
            raise NotStaged(f"{file.owner}{file.name_of(*bounds)} is not on this machine")
        self._found[number] = its
        return its
