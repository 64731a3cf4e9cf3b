"""Why extents were not staged, when each is tried again, and what of it is logged."""

from __future__ import annotations

import logging
import math
import sys
from typing import NamedTuple

from corpus_server.errors import CacheFull, CorpusChanged, CorpusServerError
from corpus_server.stores import Extent

_LAST_RETRY_SECONDS = 30.0
_LOOK_SECONDS = 0.1  # whether another process has staged an extent, or the cache has room by now
_MAX_LOOK_SECONDS = (
    2.0  # for room for what is planned: a look at a cache of 10,000 extents takes 50 ms of CPU
)
_SAY_AGAIN_SECONDS = 60.0  # until a failure that goes on is logged again

_log = logging.getLogger("corpus_server")


def log_failed(what: str) -> None:
    """Log the error that is being handled; one that says what is wrong with a corpus is no unexpected one."""
    error = sys.exception()
    if isinstance(error, CorpusServerError):
        _log.warning("%s: %s", what, error.detail)
    else:
        _log.exception("%s", what)


class _Failure(NamedTuple):
    """An error, when to try again, and how often it came in a row: 0 where requests go on waiting."""

    error: CorpusServerError | BlockingIOError
    retry_at: float
    times: int


class Failures:
    """The extents that were not staged; not safe to use from several threads."""

    def __init__(self) -> None:
        self._failures: dict[Extent, _Failure] = {}
        self._said: dict[tuple[object, type], float] = {}  # what was logged, and when
        self._times_full = 0  # in a row
        self._room_at = 0.0  # when to look for room again; infinity while that is being done

    def note(self, extent: Extent, error: CorpusServerError | BlockingIOError, now: float) -> bool:
        """Note that an extent was not staged; return whether requests that wait for it must be told.

        They go on waiting where there may be room, or the extent, soon: the cache is full, or another process
        stages it.
        """
        if not isinstance(error, CacheFull):
            self._times_full = 0
        elif not now < self._room_at < math.inf:  # else others that were under way found no room either
            self._room_at = now + min(_LOOK_SECONDS * 2.0**self._times_full, _MAX_LOOK_SECONDS)
            self._times_full += 1
        if isinstance(error, CacheFull | BlockingIOError):
            self._failures[extent] = _Failure(error, now + _LOOK_SECONDS, 0)
            return False
        times = self._failures[extent].times + 1 if extent in self._failures else 1
        seconds = min(0.5 * 2.0 ** min(times, 10), _LAST_RETRY_SECONDS)
        self._failures[extent] = _Failure(error, now + seconds, times)
        return True

    def end(self, extent: Extent, now: float) -> None:
        """Note that an extent has come: failures are logged anew, but for those that others still have."""
        self._failures.pop(extent, None)
        self._times_full = 0
        for about, kind in [each for each in self._said if each[0] in (extent.file, extent.file.corpus)]:
            if not any(
                type(failure.error) is kind
                and about in (each.file, each.file.corpus)
                and now - failure.retry_at < _SAY_AGAIN_SECONDS
                for each, failure in self._failures.items()
            ):
                del self._said[about, kind]

    def may_try(self, extent: Extent, now: float) -> bool:
        """Tell whether it is time to stage an extent, again or for the first time."""
        failure = self._failures.get(extent)
        return failure is None or failure.retry_at <= now

    def may_begin_planned(self, now: float) -> bool:
        """Tell whether what no request waits for may be staged; the caller does so then.

        After one found no room, they are tried one at a time, and less and less often: each looks at all of
        the cache.
        """
        if self._times_full:
            if now < self._room_at:
                return False
            self._room_at = math.inf
        return True

    def retries_after(self, now: float) -> list[float]:
        """Return the times at which extents are tried again."""
        return [each.retry_at for each in self._failures.values() if each.retry_at > now]

    def fresh(self, extent: Extent, now: float) -> CorpusServerError | None:
        """Return why an extent cannot be staged, until it is tried again; None where requests wait for it."""
        failure = self._failures.get(extent)
        if failure is None or not failure.times or failure.retry_at <= now:
            return None
        return self.last(extent)

    def last(self, extent: Extent) -> CorpusServerError | None:
        """Return why an extent was not staged when it was last tried; None if another process does it."""
        error = self._failures[extent].error if extent in self._failures else None
        return error if isinstance(error, CorpusServerError) else None

    def say(self, extent: Extent, error: CorpusServerError | BlockingIOError, now: float) -> None:
        """Log why an extent was not staged: once for a store that fails, and once for a file that changed.

        The limit of the cache is reached all the time, and is not logged; the end of the disk is.
        """
        is_limit = isinstance(error, CacheFull) and not isinstance(error.__cause__, OSError)
        if isinstance(error, BlockingIOError) or is_limit:
            return
        about = extent.file if isinstance(error, CorpusChanged) else extent.file.corpus
        if now - self._said.get((about, type(error)), -math.inf) >= _SAY_AGAIN_SECONDS:
            self._said[about, type(error)] = now
            _log.warning("%s was not staged: %s", extent.name, error.detail)
