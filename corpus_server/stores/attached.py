"""The map of a file whose bytes come and go: local files of its extents lie at addresses that stay.

    addresses    |-------- reserved --------|== extent 1 ==|-------- reserved --------|== extent 3 ==|

The addresses are reserved when the file is opened. Attaching maps a local file over its part of the
reservation, detaching the reservation over the local file. So a `Gatherer` computes its addresses once, as
for local files. Reading the reservation ends the process rather than giving a wrong token; `MappedSpans.held`
prevents it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from corpus_server.corpus import guard
from corpus_server.corpus.files import HUGE_PAGE, OpenFile, address_of, map_over, reserve
from corpus_server.errors import CorpusServerError, NotStaged, ReadFailed

LOOK_SECONDS: Final = 0.1
"""After which a copy looks at local files again to find what other programs did to them; requests look, too.
Whoever takes an extent away says so at once, see `PartlyMappedFile.sign`."""

Span = tuple["PartlyMappedFile", int, int]
"""Bytes [start, stop) of a file that are mapped together: an `Extent`."""

Sign = tuple[bytes, int]
"""See `PartlyMappedFile.sign`."""


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
    looked: tuple[float, Sign] = (-math.inf, (b"", -1))
    """When the local file was last seen to be what it was, monotonic, and the sign before."""

    @property
    def num_faults(self) -> int:
        """How many pages the disk did not deliver."""
        return 0 if self.guarded is None else self.guarded.num_faults

    def good_since(self, sign: Sign, since: float) -> float:
        """Return when the local file was last seen to be what it was; infinitely long ago if it is not.

        Looks at it if that was before `since`, or another sign has come since then.
        """
        seconds, before = self.looked
        if seconds > since and before == sign and not self.sharing:
            return seconds
        return min(each._look(sign, since) for each in (self, *self.sharing))

    def check_unchanged(self) -> None:
        """Look at the local file; raise if bytes copied from the map may be wrong."""
        sign = self.file.sign()
        for each in (self, *self.sharing):
            if each._look(sign, math.inf) == -math.inf:
                each.file.report(each)

    def _look(self, sign: Sign, since: float) -> float:
        seconds, before = self.looked
        if seconds > since and before == sign:
            return seconds
        seconds = time.monotonic()
        if self.num_faults or _status(self.local) != self.status:
            return -math.inf
        self.looked = seconds, sign
        return seconds


class PartlyMappedFile(OpenFile):
    """A file whose map comes and goes; safe to use from several threads.

    Attributes:
        data: the bytes that are mapped, those of its tokens; known with `map`.
    """

    is_local: ClassVar = False

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.name = path.name
        self.corpus = ""
        self.size_bytes = size_bytes
        self.data = range(size_bytes)
        self._reserved: mmap.mmap | None = None
        self._is_closed = False
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

    def sign(self) -> Sign:
        """Return what is another one whenever bytes of a span of any file may have become wrong.

        But for what other programs do. Asked for after a copy, it says whether local files must be looked at.
        """
        return b"", guard.last_fault()

    def is_surely_good(self, span: Span, sign: Sign) -> bool:
        """Look whether a span is mapped and what it was.

        Each request asks for hundreds: `attach` and `Attached.check_unchanged` take thrice as long.
        """
        its = self._attached.get(span)
        return its is not None and its.good_since(sign, math.inf) > -math.inf

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
            if self._is_closed or (local := open_local()) is None:
                return False
            _, start, stop = span
            local.name, local.corpus = self.name_of(start, stop), self.corpus
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
            _last_change[0] = next(_change_numbers)
            return True

    def attach_anew(self, span: Span) -> None:
        """Map a span that a copy is about to read: it was unmapped while the response waited for its reader.

        Raises:
            NotStaged: its local file is gone, too.
        """
        raise self.not_here(span)

    def not_here(self, span: Span) -> NotStaged:
        """Return the error that says so of a span."""
        return NotStaged(f"{self.name_of(*span[1:])} is not on this machine").about(self.corpus)

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
            name = its.local.full_name
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
        with self._lock, _holding:
            for each in list(self._attached.values()):
                self._detach(each)
            self._reserved, self._address, self._is_closed = None, 0, True

    def _detach(self, its: Attached) -> None:
        _last_change[0] = next(_change_numbers)
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


_held: dict[object, list[Attached]] = {}  # of all copies that are being made, each under a key of its own
_holding = threading.Lock()  # guards what is held, and detaching; after the lock of a file
_change_numbers, _last_change = itertools.count(1), [0]  # of what is mapped of all files


class MappedSpans:
    """Spans that responses read again and again, as they are mapped; safe to use from several threads.

    A response holds hundreds of them for each of its copies. As long as nothing was unmapped or given up, and
    the last look is not long ago, it looks at none: one after another would take a fifth of its CPU.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._all: list[Attached] | None = None  # as they are mapped, if all are
        self._all_as_of = -1
        self._good: _Good | None = None

    @property
    def spans(self) -> Sequence[Span]:
        """Return the spans."""
        return self._spans

    def are_mapped(self) -> bool:
        """Tell whether all are mapped."""
        with _holding:
            return self._all_mapped() is not None

    def are_good(self) -> bool:
        """Look whether all are mapped and what they were."""
        with _holding:
            found = self._all_mapped()
        return found is not None and (not found or self._look(found, found[0].file.sign(), math.inf))

    def held(self, needed: Callable[[], Sequence[Span]]) -> _Holding:
        """Keep spans mapped while their bytes are copied, in a block; raise afterwards if those may be wrong.

        Args:
            needed: those that are read. Not asked for while all are mapped, and good.

        Raises:
            NotStaged: one is not mapped, and its local file is gone.
            CorpusChanged, ReadFailed: see `Attached.check_unchanged`.
        """
        return _Holding(self, needed)

    def _hold(self, key: object, needed: Callable[[], Sequence[Span]]) -> list[Attached]:
        """Keep those mapped that are read until `key` is taken out of `_held`, or all."""
        with _holding:
            if (found := self._all_mapped()) is not None:
                _held[key] = found
                return found
        spans = needed()
        while True:
            with _holding:
                mapped = [span[0].attached(span) for span in spans]
                found = [each for each in mapped if each is not None]
                if len(found) == len(spans):
                    _held[key] = found
                    return found
            for span, its in zip(spans, mapped, strict=True):
                if its is None:
                    span[0].attach_anew(span)

    def _check(self, held: list[Attached], needed: Callable[[], Sequence[Span]]) -> None:
        """Raise if what was read may be wrong."""
        if not self._are_good(held):
            for span in needed():
                if (its := span[0].attached(span)) is None:  # its file was closed
                    raise span[0].not_here(span)
                its.check_unchanged()

    def _all_mapped(self) -> list[Attached] | None:
        if self._all_as_of != _last_change[0]:
            as_of = _last_change[0]
            found = [each[0].attached(each) for each in self._spans]
            mapped = [each for each in found if each is not None]
            self._all = mapped if len(mapped) == len(found) else None
            self._all_as_of = as_of
        return self._all

    def _are_good(self, held: list[Attached]) -> bool:
        """Tell whether all bytes that were copied a moment ago are right."""
        if not held:
            return True
        sign, now = held[0].file.sign(), time.monotonic()  # the sign of all: their files lie in one cache
        good = self._good
        if good is not None and good.held is held and good.sign == sign and now < good.until:
            return True
        return self._look(held, sign, now - LOOK_SECONDS)

    def _look(self, held: list[Attached], sign: Sign, since: float) -> bool:
        """Look at local files that nobody has looked at since then; tell whether they are what they were."""
        looked_at = min([each.good_since(sign, since) for each in held])
        if held is self._all:
            self._good = _Good(held, sign, looked_at + LOOK_SECONDS)
        return looked_at > -math.inf


class _Holding:
    """The block of `MappedSpans.held`; a generator would take three times as long, for each copy."""

    __slots__ = ("_held", "_needed", "_spans")

    def __init__(self, spans: MappedSpans, needed: Callable[[], Sequence[Span]]) -> None:
        self._spans, self._needed = spans, needed

    def __enter__(self) -> None:
        self._held = self._spans._hold(self, self._needed)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._spans._check(self._held, self._needed)
        finally:
            with _holding:
                del _held[self]


class _Good(NamedTuple):
    """Spans that were looked at and good, the sign then, and until when nobody need look again."""

    held: list[Attached]
    sign: Sign
    until: float
