"""The errors of the client, drawn once.

CorpusClientError
|- InvalidArgument, StateMismatch                       each a ValueError, too
|- HistoryChanged, LocalCopyMismatch
|- LoaderClosed, RunComplete, SecondThread, ForkedLoader
|- WrongRows, StepOutOfOrder
|- FetchFailed, PinningFailed, DeadlineExceeded, ServerNotStarted
|- ReplicaUnusable                                      not asked again
|   `- ReplicaRefused, HostNotFound, CertificateRefused
|- TransportError                                       retried: the path failed, not the request
|   `- ConnectionFailed, NoProgress, ResponseCorrupt
|       `- NotCorpusServer                             not retried where no other response came before
`- ServerError                                          the server answered with a problem document
    `- AccessDenied, UnknownCorpus, UnknownPlan         the others are told apart by `kind`
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


class CorpusClientError(Exception):
    """Base of all errors that this package raises on purpose."""


class InvalidArgument(CorpusClientError, ValueError):
    """An argument is outside its range, or contradicts another; found before anything is sent."""


class StateMismatch(CorpusClientError, ValueError):
    """The state belongs to another run; each differing field is named."""


class HistoryChanged(CorpusClientError):
    """A successor plan gives other tokens for a step before its new stage."""


class LocalCopyMismatch(CorpusClientError):
    """The local shards are not the corpus that is served: one is missing, unreadable or another."""


class LoaderClosed(CorpusClientError):
    """A batch was asked of a closed loader; make a new one."""


class RunComplete(CorpusClientError):
    """Every step before `num_steps` was yielded; `seek` goes back."""


class SecondThread(CorpusClientError):
    """Two threads would get the same step twice; each needs a loader of its own."""


class FetchFailed(CorpusClientError):
    """Fetching ended by an error that the client does not know, which is the cause of this one."""


class ForkedLoader(CorpusClientError):
    """A loader was used in a process that did not make it; threads and sockets do not survive a fork."""


class WrongRows(CorpusClientError):
    """A rank would train on rows that are not its own: they were divided twice, or over other ranks."""


class StepOutOfOrder(CorpusClientError):
    """A step came twice, was left out, or was trained on without having been yielded."""


class PinningFailed(CorpusClientError):
    """The slots' memory could not be page-locked."""


class ReplicaUnusable(CorpusClientError):
    """A server is not asked again, since the response would be the same."""


class ReplicaRefused(ReplicaUnusable):
    """A replica serves another plan or another corpus, and would give other tokens."""


class HostNotFound(ReplicaUnusable):
    """No host has the name in the URL."""


class CertificateRefused(ReplicaUnusable):
    """One side does not accept the other's certificate."""


class DeadlineExceeded(CorpusClientError):
    """No replica gave a good response within the deadline; chained from the last failure."""


class ServerNotStarted(CorpusClientError):
    """The server of a path did not start; the message is its own."""


class TransportError(CorpusClientError):
    """The way to the server failed; the same request may succeed elsewhere or later."""


class ConnectionFailed(TransportError):
    """No connection, or one that broke.

    stale: the server had closed an idle connection before this request reached it.
    """

    def __init__(self, detail: str, *, stale: bool = False) -> None:
        super().__init__(detail)
        self.stale = stale


class NoProgress(TransportError):
    """Connected, but nothing came for too long."""


class ResponseCorrupt(TransportError):
    """The response is not what was asked for: length, shape, dtype, plan, step or checksum."""


class NotCorpusServer(ResponseCorrupt):
    """Something else answered: a login page, or another server on that port."""


@dataclass(eq=False, repr=False)
class ServerError(CorpusClientError):
    """An error response of the server, rebuilt from its problem document, of which a proxy may send none."""

    detail: str  # the server's sentence
    _: KW_ONLY
    status: int
    kind: str = ""  # the document's `type`, as `invalid-plan` or `overloaded`
    parameter: str | None = None
    received: object = None
    accepted: str | None = None
    remedy: str | None = None
    retry_after_seconds: float | None = None  # what `Retry-After` asked for
    request_id: str | None = None  # by which the server's log names the request

    def __str__(self) -> str:
        text = f"{self.detail} ({self.remedy})" if self.remedy else self.detail
        return f"{text}; request {self.request_id}" if self.request_id else text

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later: 5xx, and the two 4xx that say so."""
        return self.status >= 500 or self.status in (408, 429)


class AccessDenied(ServerError):
    """401 or 403: the token is missing, wrong, expired or of another scope."""


class UnknownCorpus(ServerError):
    """No corpus of that name is served."""


class UnknownPlan(ServerError):
    """This replica has not seen the plan; it is posted there and the request repeated."""
