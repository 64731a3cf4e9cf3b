"""The errors of the client, drawn once.

CorpusClientError
|- InvalidArgument (ValueError)   an argument that cannot work, found before anything is sent
|- DataTooShort (ValueError)      fewer tokens than one window
|- StateMismatch (ValueError)     a state of another run; each differing field is named
|- HistoryChanged                 a successor plan gives other tokens for a step before its new stage
|- LocalCopyMismatch              the local shards are not the corpus that is served
|- LoaderClosed                   a batch was asked of a closed loader
|- PinningFailed                  the slots' memory could not be page-locked
|- ForkedLoader                   a loader was used in a process that did not make it
|- ReplicaRefused                 a replica serves another plan or another corpus
|- DeadlineExceeded               no good answer in time; chained from the last failure
|- TransportError                 retried: the path failed, not the request
|   |- ConnectionFailed           no connection, or one that broke
|   |- NoProgress                 nothing came for too long
|   `- AnswerCorrupt              length, shape, dtype, plan or checksum is wrong
`- ServerError                    the server answered with a problem document
    |- InvalidParameter | InvalidPlan | AnswerTooLarge | TextUnavailable
    |- UnknownCorpus | UnknownPlan | UnknownDocument | NotFound | MethodNotAllowed
    |- FingerprintMismatch
    `- CorpusChanged | ReadFailed | Overloaded | InternalError      (5xx: retried)
"""

from __future__ import annotations


class CorpusClientError(Exception):
    """Base of all errors that this package raises on purpose."""


class InvalidArgument(CorpusClientError, ValueError):
    """An argument is outside its range, or contradicts another."""


class DataTooShort(CorpusClientError, ValueError):
    """The data holds fewer tokens than one window needs."""


class StateMismatch(CorpusClientError, ValueError):
    """The state belongs to another run."""


class HistoryChanged(CorpusClientError):
    """A successor plan must leave every step before its new stage as it was."""


class LocalCopyMismatch(CorpusClientError):
    """A local shard is missing, has another size or holds other tokens."""


class LoaderClosed(CorpusClientError):
    """The loader was closed; make a new one."""


class ForkedLoader(CorpusClientError):
    """Threads and sockets do not survive a fork."""


class PinningFailed(CorpusClientError):
    """The slots' memory could not be page-locked."""


class ReplicaRefused(CorpusClientError):
    """A replica would give other tokens than the plan says."""


class DeadlineExceeded(CorpusClientError):
    """No replica gave a good answer within the deadline."""


class TransportError(CorpusClientError):
    """The way to the server failed; the same request may succeed elsewhere or later."""


class ConnectionFailed(TransportError):
    """No connection, or one that broke.

    Args:
        detail: what happened, with the URL.
        stale: the server had closed an idle connection before this request reached it.
    """

    def __init__(self, detail: str, *, stale: bool = False) -> None:
        super().__init__(detail)
        self.stale = stale


class NoProgress(TransportError):
    """Connected, but nothing came for too long."""


class AnswerCorrupt(TransportError):
    """The answer is not what was asked for: length, shape, dtype, plan or checksum."""


class ServerError(CorpusClientError):
    """An error answer of the server, rebuilt from its problem document.

    Args:
        detail: the server's sentence.
        status: HTTP status.
        parameter, received, accepted, remedy: as in the document, where given.
        retry_after_seconds: what `Retry-After` asked for.
    """

    slug = ""

    def __init__(
        self,
        detail: str,
        *,
        status: int,
        parameter: str | None = None,
        received: object = None,
        accepted: str | None = None,
        remedy: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{detail} ({remedy})" if remedy else detail)
        self.detail = detail
        self.status = status
        self.parameter = parameter
        self.received = received
        self.accepted = accepted
        self.remedy = remedy
        self.retry_after_seconds = retry_after_seconds

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later: 5xx, and the two 4xx that say so."""
        return self.status >= 500 or self.status in (408, 429)


class InvalidParameter(ServerError):
    """A parameter is missing, unknown or outside its range."""

    slug = "invalid-parameter"


class InvalidPlan(ServerError):
    """The plan contradicts itself or the corpora it names."""

    slug = "invalid-plan"


class AnswerTooLarge(ServerError):
    """The answer would exceed the server's limit."""

    slug = "answer-too-large"


class TextUnavailable(ServerError):
    """Text was asked of a corpus without a tokenizer."""

    slug = "text-unavailable"


class UnknownCorpus(ServerError):
    """No corpus of that name is served."""

    slug = "unknown-corpus"


class UnknownPlan(ServerError):
    """This replica has not seen the plan; it is posted there and the request repeated."""

    slug = "unknown-plan"


class UnknownDocument(ServerError):
    """The corpus has no such document."""

    slug = "unknown-document"


class NotFound(ServerError):
    """No such route."""

    slug = "not-found"


class MethodNotAllowed(ServerError):
    """The route does not take this method."""

    slug = "method-not-allowed"


class FingerprintMismatch(ServerError):
    """The plan was made for a corpus of other content."""

    slug = "fingerprint-mismatch"


class CorpusChanged(ServerError):
    """A shard changed on the server's disk."""

    slug = "corpus-changed"


class ReadFailed(ServerError):
    """The server's disk did not deliver."""

    slug = "read-failed"


class Overloaded(ServerError):
    """The server is at its limit; it says when to come again."""

    slug = "overloaded"


class InternalError(ServerError):
    """The server failed in a way that it does not explain."""

    slug = "internal-error"
