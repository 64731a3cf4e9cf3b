"""Requests that wait for shards, without a thread."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

from corpus_server.errors import CorpusServerError
from corpus_server.stores import StagedFile


@dataclass(slots=True, eq=False)
class _Request:
    files: set[StagedFile]
    missing: set[StagedFile]
    deadline: float
    future: Future[None] = field(default_factory=Future)


class WaitingRequests:
    """The requests of a process whose shards are not here yet; not safe to use from several threads."""

    def __init__(self) -> None:
        self._requests: list[_Request] = []

    def add(self, files: set[StagedFile], missing: set[StagedFile], deadline: float) -> Future[None]:
        """Return what is done when the missing shards are here; all its files stay mapped until then."""
        request = _Request(files, missing, deadline)
        self._requests.append(request)
        return request.future

    def files(self) -> set[StagedFile]:
        """Return the shards that these requests are about to read."""
        return {file for each in self._requests for file in each.files}

    def missing(self) -> list[StagedFile]:
        """Return the shards that are waited for, those of the oldest request first."""
        return list(dict.fromkeys(file for each in self._requests for file in each.missing))

    def first_deadline(self) -> float:
        """Return when the next one has waited long enough."""
        return min((each.deadline for each in self._requests), default=float("inf"))

    def finish(self, file: StagedFile, error: CorpusServerError | None) -> None:
        """Let those go on that wait for nothing but this shard, or fail all that wait for it."""
        for each in [each for each in self._requests if file in each.missing]:
            each.missing.discard(file)
            if error is not None:
                self._fail(each, error)
            elif not each.missing:
                self._requests.remove(each)
                each.future.set_result(None)

    def expire(self, now: float, error: Callable[[Collection[StagedFile]], CorpusServerError]) -> None:
        """Fail those that have waited long enough, by the error for the shards that they miss."""
        for each in [each for each in self._requests if each.deadline <= now]:
            self._fail(each, error(each.missing))

    def _fail(self, request: _Request, error: CorpusServerError) -> None:
        self._requests.remove(request)
        request.future.set_exception(error)
