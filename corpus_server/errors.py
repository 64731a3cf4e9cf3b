"""The errors of the core, drawn once.

Every error says what was expected, what came and what to do. `slug` is the stable `type` of the
problem document that the web layer makes of it (RFC 9457); its HTTP status stands in one table,
`corpus_server.web.problems`.

    CorpusServerError
    |- InvalidParameter        a number or a name outside its range
    |- InvalidPlan             a plan document that contradicts itself or the corpora
    |- AnswerTooLarge          the product of the sizes exceeds the server's limit
    |- TextUnavailable         text was asked of a corpus without a tokenizer
    |- UnknownCorpus | UnknownPlan | UnknownDocument
    |- FingerprintMismatch     the plan was made for other content
    |- UnreadableCorpus        files that cannot be opened as a corpus
    |- CorpusChanged           a shard changed on disk after it was opened
    |- ReadFailed              the disk did not deliver
    `- Overloaded              try again after `retry_after_seconds`
"""

from __future__ import annotations


class CorpusServerError(Exception):
    """Base of all errors raised on purpose.

    Args:
        detail: one sentence for a person: expectation, value, remedy.
        parameter: name of the offending parameter or field, if there is one.
        received: the value that came.
        accepted: the range or the choices that are valid.
        remedy: what to do, where it is more than reading `accepted`.
    """

    slug = "internal-error"

    def __init__(
        self,
        detail: str,
        *,
        parameter: str | None = None,
        received: object = None,
        accepted: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.parameter = parameter
        self.received = received
        self.accepted = accepted
        self.remedy = remedy


class InvalidParameter(CorpusServerError):
    """A parameter is missing, unknown or outside its range."""

    slug = "invalid-parameter"


class InvalidPlan(CorpusServerError):
    """A plan document contradicts itself or the corpora it names."""

    slug = "invalid-plan"


class AnswerTooLarge(CorpusServerError):
    """The answer would exceed the server's limit."""

    slug = "answer-too-large"


class TextUnavailable(CorpusServerError):
    """Text was asked of a corpus that has no tokenizer here."""

    slug = "text-unavailable"


class UnknownCorpus(CorpusServerError):
    """No corpus of that name is served."""

    slug = "unknown-corpus"


class UnknownPlan(CorpusServerError):
    """This replica has not seen the plan; post it and go on."""

    slug = "unknown-plan"


class UnknownDocument(CorpusServerError):
    """The corpus has no such document."""

    slug = "unknown-document"


class FingerprintMismatch(CorpusServerError):
    """The plan was made for a corpus of other content."""

    slug = "fingerprint-mismatch"


class UnreadableCorpus(CorpusServerError):
    """The files cannot be opened as a corpus."""

    slug = "unreadable-corpus"


class CorpusChanged(CorpusServerError):
    """A shard changed on disk after it was opened."""

    slug = "corpus-changed"


class ReadFailed(CorpusServerError):
    """The disk did not deliver the tokens."""

    slug = "read-failed"


class Overloaded(CorpusServerError):
    """The server is at its limit of concurrent answers."""

    slug = "overloaded"

    def __init__(self, detail: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(detail, remedy=f"try again after {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds
