"""All errors that are raised on purpose.

Every error says what was expected, what came and what to do. `slug` is the stable `type` of the problem
document that an HTTP response makes of it (RFC 9457), `status` the response's status. The first paragraph of
its docstring and `advice`, what to do, are its row in docs/http.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class CorpusServerError(Exception):
    """The server failed; its log says why.

    Base of all errors raised on purpose.

    Args:
        detail: one sentence for a person: expectation, value, remedy.
        parameter: name of the offending parameter or field, if there is one.
        received: the offending value.
        accepted: the valid range or choices.
        remedy: what to do, if `accepted` does not say so.
        retry_after_seconds: when to ask again, if not after the time of its class.
    """

    slug = "internal-error"
    status = 500
    retry_after_seconds: int | None = None
    advice = "another server, later this one"

    def __init_subclass__(
        cls, *, slug: str, status: int, retry_after_seconds: int | None = None, advice: str = ""
    ) -> None:
        cls.slug, cls.status, cls.retry_after_seconds, cls.advice = slug, status, retry_after_seconds, advice

    def __init__(
        self,
        detail: str,
        *,
        parameter: str | None = None,
        received: object = None,
        accepted: str | None = None,
        remedy: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds or self.retry_after_seconds
        if remedy is None and self.retry_after_seconds is not None:
            remedy = f"try again after {self.retry_after_seconds} s"
        self.detail = detail
        self.parameter = parameter
        self.received = received
        self.accepted = accepted
        self.remedy = remedy

    def about(self, corpus: str) -> Self:
        """Begin with the name of the corpus, unless the error does; "" is no name. Returns the error."""
        if corpus and not self.detail.startswith(f"corpus {corpus!r}"):
            self.detail = f"corpus {corpus!r}: {self.detail}"
            self.args = (self.detail,)
        return self

    @property
    def with_remedy(self) -> str:
        """What is wrong and, in brackets, what to do, if that was not said."""
        return (
            f"{self.detail} ({self.remedy})"
            if self.remedy and self.remedy not in self.detail
            else self.detail
        )

    @classmethod
    def expected(cls, parameter: str, accepted: str, received: object, *, remedy: str | None = None) -> Self:
        """Return the error for a value that is not accepted: `step must be in [0, 9], got 12`."""
        detail = f"{parameter} must be {accepted}, got {received!r:.200}"
        accepted = accepted.removeprefix("in ")
        return cls(detail, parameter=parameter, received=received, accepted=accepted, remedy=remedy)


class InvalidParameter(
    CorpusServerError, slug="invalid-parameter", status=422, advice="`accepted` has the range"
):
    """A parameter is missing, unknown, repeated or outside its range."""


class InvalidPlan(CorpusServerError, slug="invalid-plan", status=422):
    """A plan document contradicts itself, the corpora or the limits."""

    def renamed(self, before: str, after: str) -> Self:
        """Return the same error about a field that has a more precise name."""
        parameter = self.parameter and self.parameter.replace(before, after)
        return self._again(self.detail.replace(before, after, 1), parameter)

    def in_file(self, where: str) -> Self:
        """Return the same error about the document of a file."""
        return self._again(f"{where}: {self.detail}", self.parameter)

    def _again(self, detail: str, parameter: str | None) -> Self:
        return type(self)(
            detail, parameter=parameter, received=self.received, accepted=self.accepted, remedy=self.remedy
        )


class ResponseTooLarge(
    CorpusServerError, slug="response-too-large", status=422, advice="ask for fewer steps"
):
    """The response would exceed a limit of the server.

    Args:
        what: the kind of response that has the limit.
        size: of this response, in `unit`.
        limit: the largest size.
    """

    def __init__(self, what: str, size: int, limit: int, unit: str, *, parameter: str, remedy: str) -> None:
        accepted = f"at most {limit} {unit}"
        super().__init__(
            f"{what} takes {accepted}, this one would take {size}",
            parameter=parameter,
            received=size,
            accepted=accepted,
            remedy=remedy,
        )


class TextUnavailable(CorpusServerError, slug="text-unavailable", status=422, advice="another format"):
    """Text was asked of a corpus that has no tokenizer here."""


class UnknownCorpus(
    CorpusServerError,
    slug="unknown-corpus",
    status=404,
    advice="`accepted` lists the corpora, unless the server requires tokens",
):
    """No corpus of that name is served."""


class UnknownPlan(
    CorpusServerError, slug="unknown-plan", status=404, advice="post it to the same server, ask again"
):
    """This server has not seen the plan."""


class UnknownDocument(CorpusServerError, slug="unknown-document", status=404):
    """The corpus has no such document, or no document index."""


class UnknownRecording(
    CorpusServerError, slug="unknown-recording", status=404, advice="`/v1/recordings` lists them"
):
    """No run has recorded losses under that name, or none that the caller may know of."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the error for a name."""
        return cls.expected("recording", "one that /v1/recordings lists", name)


class UnknownReport(CorpusServerError, slug="unknown-report", status=404, advice="`/v1/reports` lists them"):
    """No report has that name, or none that the caller may know of."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the error for a name."""
        return cls.expected("report", "one that /v1/reports lists", name)


class FingerprintMismatch(
    CorpusServerError, slug="fingerprint-mismatch", status=409, advice="serve that corpus"
):
    """The plan was made for a corpus of other content."""


class UnreadableCorpus(
    CorpusServerError, slug="unreadable-corpus", status=503, advice="the command line shows it"
):
    """The files cannot be opened as a corpus: the server does not start."""

    def for_clients(self) -> Self:
        """Return the same error without the folders of its file, which are for the log alone."""
        path = str(self.received or "")
        folder, _, name = path.rpartition("/")
        texts = (text.replace(path, name) for text in (self.detail, self.remedy or ""))
        detail, remedy = (text.replace(f"{folder}/", "") if folder else text for text in texts)
        return type(self)(detail, remedy=remedy or None)


class MissingPackage(
    CorpusServerError, slug="missing-package", status=503, advice="`remedy` has the `pip` line"
):
    """An optional package is not installed: the server does not start, or shows no recordings."""


class CorpusChanged(
    CorpusServerError, slug="corpus-changed", status=503, advice="another server; this one needs a restart"
):
    """A file of the corpus changed on disk after it was opened."""


class ReadFailed(
    CorpusServerError, slug="read-failed", status=503, advice="another server; this one may need a restart"
):
    """The disk did not deliver the tokens."""


class Overloaded(CorpusServerError, slug="overloaded", status=503, retry_after_seconds=1):
    """The server is at its limit of concurrent requests or connections."""


class TooManyRequests(CorpusServerError, slug="too-many-requests", status=429, retry_after_seconds=1):
    """The token is at a limit of its own."""


class NotStaged(CorpusServerError, slug="not-staged", status=503, retry_after_seconds=1):
    """Extents of shards in an object store are on their way to this machine."""


class StoreFailed(
    CorpusServerError,
    slug="store-failed",
    status=503,
    retry_after_seconds=2,
    advice="another server; `remedy` says what to check",
):
    """An object store did not deliver."""


class CacheFull(CorpusServerError, slug="cache-full", status=503, retry_after_seconds=2):
    """All staged extents are in use, or the disk is full."""


class CacheTooSmall(
    CorpusServerError, slug="cache-too-small", status=422, advice="`remedy` has an order that fits"
):
    """The plan's order needs more [staged](stores.md) extents at a time than the cache holds."""


class StateUnavailable(
    CorpusServerError, slug="state-unavailable", status=503, retry_after_seconds=5, advice="another server"
):
    """The folder of plans cannot be read or written; plans that are known are served."""


class Unauthorized(
    CorpusServerError, slug="unauthorized", status=401, advice="`Authorization: Bearer TOKEN`"
):
    """The server requires a token, and the request has no valid one.

    Args:
        is_given: whether it has one.
    """

    def __init__(self, *, is_given: bool) -> None:
        what = "the token is not valid (any more)" if is_given else "this server asks for a token"
        super().__init__(what, remedy="send `Authorization: Bearer TOKEN`")
        self.challenge = 'Bearer error="invalid_token"' if is_given else "Bearer"


class Forbidden(CorpusServerError, slug="forbidden", status=403, advice="`remedy` says what"):
    """A [check](operations.md#checks) refuses the request, or the token may not read the corpus."""


class NotReady(CorpusServerError, slug="not-ready", status=503, advice="another server"):
    """Of `/readyz`: shutting down, a file of a corpus changed, the disk hangs, or plans cannot be stored."""


class BadRequest(CorpusServerError, slug="bad-request", status=400, advice="fix the client"):
    """The bytes received are no HTTP/1.x request, or one that could be read in two ways."""


class RequestTimeout(CorpusServerError, slug="request-timeout", status=408, advice="a new connection"):
    """The head or the body did not arrive in time."""


class BodyTooLarge(CorpusServerError, slug="body-too-large", status=413):
    """The request's body exceeds the limit of its route."""


class UrlTooLong(CorpusServerError, slug="url-too-long", status=414):
    """The request's target exceeds its limit."""


class HeadTooLarge(CorpusServerError, slug="head-too-large", status=431):
    """The request's head exceeds its limit."""


@contextmanager
def naming(corpus: str) -> Iterator[None]:
    """Have errors of a block name their corpus, see `CorpusServerError.about`."""
    try:
        yield
    except CorpusServerError as error:
        error.about(corpus)
        raise


def printable(text: str) -> str:
    """Return a text whose line ends, terminal commands and undecodable bytes are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def counted(count: int, unit: str) -> str:
    """Return how many of something there are: `1 item`, `2,000 items`."""
    return f"{count:,} {unit if count == 1 else f'{unit}s'}"
