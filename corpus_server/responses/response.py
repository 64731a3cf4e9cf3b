"""An HTTP response as the core makes it: status, headers and body, for any server that sends it.

The client's `corpus_client.network.wire` knows the same names of headers and dtypes, and the same checksum.
Golden bytes in `tests/contract` hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final, Literal, get_args

from corpus_server.admission.request import REQUEST_ID, RequestHead
from corpus_server.readers.registry import Reader
from corpus_server.responses.json_parts import PART_BYTES, json_parts
from corpus_server.work import Budget

SHAPE_HEADER = "Corpus-Shape"
DTYPE_HEADER = "Corpus-Dtype"
PLAN_HEADER = "Corpus-Plan"
PLAN_STEP_HEADER = "Corpus-Plan-Step"
CHECKSUM_HEADER = "Corpus-Checksum"
ARRAYS_HEADER = "Corpus-Arrays"
RANGE_HEADER = "Corpus-Range"
TIMING_HEADER = "Server-Timing"

HEADERS: Final = {
    "ETag": "identity of the body, see below",
    "Cache-Control": "see [caching](#caching)",
    "Vary": "`Accept`, if that header could choose another format",
    PLAN_HEADER: "id of the plan, also for an inline plan",
    PLAN_STEP_HEADER: "plan step of the first step, if skipped steps make it differ from `step`",
    SHAPE_HEADER: "sizes of the axes, comma-separated, see [array responses](#array-responses)",
    DTYPE_HEADER: "type of the numbers, see [array responses](#array-responses)",
    ARRAYS_HEADER: "see [arrays beside the tokens](#arrays-beside-the-tokens)",
    CHECKSUM_HEADER: "see [array responses](#array-responses)",
    RANGE_HEADER: "`START-STOP`, half-open, of tokens and documents",
    TIMING_HEADER: "`response;dur=1.767`: milliseconds from the end of the request's head to the beginning "
    "of the response; with `, staging;dur=` where some of it was waiting for an object store",
    REQUEST_ID: "of every response: the request's own, see [errors](#errors)",
    "Retry-After": "seconds; with 429, and with 503 `overloaded`, `not-staged`, `store-failed`, `cache-full` "
    "and `state-unavailable`",
    "WWW-Authenticate": "with 401",
    "Corpus-Access": "of `/v1/access`: `granted`, or `unknown` if no cache may answer",
    "Allow": "with 405",
    "Connection": "`close`: the connection ends with this response",
}
"""Of responses, with their meanings in docs/http.md."""

ChecksumPlace = Literal["true", "tail", "false"]
Format = Literal["raw", "npy", "json", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)

MEDIA_TYPES: Mapping[Format, str] = {
    "raw": "application/octet-stream",
    "npy": "application/x-npy",
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
}

IMMUTABLE = "max-age=31536000, immutable"
"""`Cache-Control` where a plan's id stands for the content of its corpora."""

REVALIDATED = "no-cache"
"""`Cache-Control` where a corpus is named, which another corpus may be called tomorrow: a 304 says if not."""

Buffer = bytes | memoryview

_GROUP_BYTES: Final = 256 * 1024
"""Of JSON, sent together."""


@dataclass(slots=True)
class Response:
    """A response that is ready to be sent.

    Args:
        status: HTTP status.
        headers: values by name; `Content-Length` is always among them, except for 304.
        body: groups of parts, each group at most about 900 KiB; the next group is read when it is asked
            for, and reading may then fail with CorpusChanged or ReadFailed.
        reader, num_steps: whose steps of a plan the body holds, or says where they lie, and how many.
        problem_type: of a problem document.
    """

    status: int
    headers: dict[str, str]
    body: Iterable[list[Buffer]] = ()
    reader: Reader | None = None
    num_steps: int = 0
    problem_type: str = ""
    _calls: tuple[Callable[[], None], ...] = ()

    @classmethod
    def whole(cls, content: bytes, headers: Mapping[str, str], *, status: int = 200) -> Response:
        """Return a response whose body is in memory."""
        return cls(status, {**headers, "Content-Length": str(len(content))}, ([content],))

    def when_sent(self, call: Callable[..., None], *arguments: object) -> None:
        """Have a function called once a body of status 200 was sent as a whole: that is what clients got."""
        self._calls += (partial(call, *arguments),)

    def sent(self) -> None:
        """Call what is to be called then."""
        for call in self._calls:
            call()

    @property
    def is_streamed(self) -> bool:
        """Whether the body is read while it is sent, not in memory."""
        return not isinstance(self.body, tuple)

    @property
    def num_bytes(self) -> int:
        """Bytes of the body."""
        return int(self.headers.get("Content-Length", "0"))

    def head(self, request: RequestHead, more: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return status line and headers, as a connection sends them.

        Args:
            request: that is answered.
            more: headers of the connection.
        """
        headers = {**self.headers, **common_headers(request)}
        lines = [status_line(self.status), *(f"{name}: {value}\r\n" for name, value in headers.items())]
        return b"".join(["".join(lines).encode("latin-1"), *(b"%b: %b\r\n" % each for each in more), b"\r\n"])


# Not frozen: making one would cost as much as counting it.
@dataclass(kw_only=True, slots=True)
class Answered:
    """A request and its response, which was sent or cut.

    Args:
        request: what is known of its head.
        route: template of the path, `unknown` for none, `refused` for what its head alone decided.
        via: which path answered, `fast-path` or `application`.
        status: of the response.
        sent_bytes: of its body.
        seconds: from the request's head to the last byte handed to the kernel.
        problem_type: of a problem document.
        stages: seconds of each of `metrics.STAGES`, if they are known.
    """

    request: RequestHead
    route: str
    via: str
    status: int
    sent_bytes: int
    seconds: float = 0.0
    problem_type: str = ""
    stages: Sequence[float] = ()


def common_headers(request: RequestHead) -> dict[str, str]:
    """Return the headers that every response has, whichever way answers. A new one is added here."""
    return {REQUEST_ID: request.request_id}


def status_line(status: int) -> str:
    """Return the first line of a response."""
    return f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n"


_PHRASES = {status.value: status.phrase for status in HTTPStatus}


def json_response(value: object, headers: Mapping[str, str], budget: Budget) -> Response:
    """Return a JSON response, see `json_parts`.

    After some of it the budget says whether the response may become so large, and whose turn it is.
    """
    groups, group = list[list[Buffer]](), list[bytes]()
    num_bytes = checked = begun = 0
    for part in json_parts(value):
        num_bytes += len(part)
        group.append(part)
        if num_bytes - checked >= PART_BYTES:
            checked = num_bytes
            budget.check_response(num_bytes)
            budget.spend()
            if num_bytes - begun >= _GROUP_BYTES:
                groups.append([b"".join(group)])  # of thousands of parts, which no system call would take
                group, begun = [], num_bytes
    budget.check_response(num_bytes)
    about = {"Content-Length": str(num_bytes), "Content-Type": MEDIA_TYPES["json"]}
    return Response(200, {**headers, **about}, (*groups, [b"".join(group)]))


def text_response(text: str, headers: Mapping[str, str], budget: Budget) -> Response:
    """Return a plain-text response."""
    content = text.encode()
    budget.check_response(len(content))
    return Response.whole(content, {**headers, "Content-Type": MEDIA_TYPES["text"]})


NO_STORE: Final = {"Cache-Control": "no-store"}
"""Headers of a response that depends on more than its URL and an identity tell: text, say, for which the
corpus may be served with another tokenizer tomorrow."""


def caching(request: RequestHead, identity: str, *, immutable: bool, varies: bool = False) -> dict[str, str]:
    """Return the headers by which a response may be cached.

    Args:
        request: what a token was needed for must not be kept by a cache that others share.
        identity: decides every byte of the response.
        immutable: whether the URL will mean the same identity for ever.
        varies: whether `Accept` decided its format.
    """
    control = IMMUTABLE if immutable else REVALIDATED
    place = "private" if request.caller.is_private else "public"
    headers = {"ETag": f'"{identity}"', "Cache-Control": f"{place}, {control}"}
    if varies:
        headers["Vary"] = "Accept"
    return headers


def not_modified(request: RequestHead, headers: Mapping[str, str]) -> Response | None:
    """Return 304 if the client holds the response already; nothing is read for it.

    Call it only after all parameters were checked: a condition is ignored where the response without it
    would be an error (RFC 9110, 13.2.1).
    """
    given = request.headers.get("if-none-match")
    if given is None or "ETag" not in headers:
        return None
    tags = {tag.strip().removeprefix("W/") for tag in given.split(",")}
    return Response(304, dict(headers)) if headers["ETag"] in tags or "*" in tags else None


def timing_value(seconds: float, staging_seconds: float = 0.0) -> str:
    """Return the value of `Server-Timing` (W3C): `response;dur=` and milliseconds; of these, for staging."""
    staging = f", staging;dur={staging_seconds * 1e3:.3f}" if staging_seconds else ""
    return f"response;dur={seconds * 1e3:.3f}{staging}"


def negotiate(request: RequestHead, default: Format) -> Format:
    """Return the response's format for a request's `Accept` header: the known type of the highest weight.

    Of equal weights the first counts (RFC 9110, 12.5.1); where no type is known, the default.
    """
    accept = request.headers.get("accept")
    if accept is None:
        return default
    chosen, best = default, 0.0
    for item in accept.split(","):
        media_type, *parameters = (part.strip().lower() for part in item.split(";"))
        weight = next((_weight(part[2:]) for part in parameters if part.startswith("q=")), 1.0)
        for name in FORMATS:
            if weight > best and media_type == MEDIA_TYPES[name].partition(";")[0]:
                chosen, best = name, weight
    return chosen


def _weight(text: str) -> float:
    """Return a weight in [0, 1]; one that cannot be read counts as not given."""
    try:
        return min(1.0, float(text))
    except ValueError:
        return 1.0
