"""What `corpus-server find` reported: how much of which items corpora hold, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, NotRequired, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from corpus_server.admission.request import Caller, RequestHead
from corpus_server.described import described, described_keys
from corpus_server.errors import ReadFailed, UnknownReport
from corpus_server.reports import read_head, read_items
from corpus_server.responses.question import QueryParameters, ReportName, integer, question
from corpus_server.responses.response import NO_STORE, Response, json_response
from corpus_server.responses.service import Service
from corpus_server.work import Budget, Limits

SPANS: Final = 100
"""Of one item, that are shown."""

_PAGE_BYTES: Final = 4 << 20  # of items in one response, before it ends early
T = TypeVar("T")
Count = Annotated[int, Field(ge=0, le=2**53)]
"""What a number of JavaScript holds."""


class ItemsQuery(QueryParameters):
    """Parameters of the items of a report."""

    first: Annotated[int, integer(0, 2**40)] = 0
    """First item, counted over those of the report."""
    count: Annotated[int, integer(1, 200)] = 20
    """Items at most; fewer where they are long."""


@described_keys
class ReportCorpus(TypedDict):
    """What a report says of a corpus."""

    corpus: str
    fingerprint: str
    num_tokens: Count
    num_documents: Count | None
    num_items_too_short: Count
    num_items_found: Count
    num_items_by_share: dict[str, Count]
    """Least share of an item -> items of which as much was found."""
    num_spans: Count
    num_documents_found: Count | None
    num_items_seen: NotRequired[Count]
    """By the steps of the plan."""
    first_step: NotRequired[Count | None]
    """First of those steps that saw one."""
    is_served: NotRequired[bool]
    """Whether the server has these tokens under this name; added by the server."""


@described_keys
class ReportHead(TypedDict):
    """What a report says besides its items."""

    n: Count
    """Tokens that must stand together."""
    by: Literal["tokens", "text"]
    """What was compared: n counts tokens, or bytes of text."""
    min_share: float
    """Least share of an item that is listed."""
    num_items: Count
    """That were looked for."""
    num_items_listed: Count
    """That the report has, counted for each corpus."""
    corpora: list[ReportCorpus]
    plan: NotRequired[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    """Whose steps were looked up."""
    before_step: NotRequired[Count]
    """The run's steps are those before."""


@described_keys
class SeenBy(TypedDict):
    """The steps that saw a span."""

    num_rows: Count
    steps: list[Count]
    is_complete: bool


@described_keys
class ReportSpan(TypedDict):
    """A place of the corpus that has n tokens or more of an item."""

    start: Count
    """First token, corpus-wide."""
    stop: Count
    num_tokens: Count
    item_start: Count
    """Its first token in the item, a byte of its text where `by` is text."""
    item_stop: Count
    documents: list[Count]
    """The first and the last document that hold it."""
    seen: NotRequired[SeenBy]


@described_keys
class ReportPart(TypedDict):
    """A part of an item's text."""

    text: str
    is_found: bool


@described_keys
class ReportItem(TypedDict):
    """An item of which a corpus holds something."""

    corpus: str
    item: Count
    source: str
    """File of the item."""
    number: Count
    """Of the item in its file."""
    num_tokens: Count
    num_covered: Count
    share: float
    """Of its tokens, that are in the corpus."""
    longest: Count
    is_complete: bool
    """Whether all its places are listed."""
    parts: list[ReportPart]
    spans: list[ReportSpan]
    """The first 100."""
    num_spans: NotRequired[Count]
    """Added by the server."""
    first_step: NotRequired[Count | None]


@described
class ListedReport:
    """A report, without its items."""

    name: str
    written_unix_seconds: float
    report: ReportHead | None
    problem: str | None
    """Why it cannot be shown; else null."""


@described
class ReportList:
    """The reports of a server on corpora that the caller may read."""

    reports: list[ListedReport]


@described
class ReportPage:
    """A report with some of its items: corpus by corpus, those first of which most was found."""

    name: str
    report: ReportHead
    first: int
    items: list[ReportItem]
    too_long: list[int]
    """Numbers of items in between that have too many places to be shown."""
    next_first: int | None
    """First item of the next page; null if there is none."""


_HEAD: Final = TypeAdapter(ReportHead)
_ITEM: Final = TypeAdapter(ReportItem)


@question("/v1/reports", ReportList)
def reports(service: Service, query: QueryParameters, request: RequestHead, budget: Budget) -> Response:
    """List the reports of `corpus-server find`, as far as the caller may read their corpora."""
    listed = []
    for name, path in service.reports.names().items():
        head, problem = None, None
        try:
            head, written = _head(service, name, path, budget), path.stat().st_mtime
        except OSError:  # it has just gone
            continue
        except ReadFailed as error:
            problem, written = error.detail, 0.0
        if _may_read(request.caller, head):
            listed.append(ListedReport(name=name, written_unix_seconds=written, report=head, problem=problem))
        budget.spend()
    return json_response(ReportList(reports=listed), NO_STORE, budget)


@question("/v1/reports/{name}", ReportPage, limits=Limits(rows=0, num_bytes=2**32, seconds=30))
def report(
    service: Service, name: ReportName, query: ItemsQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return a report with some of its items."""
    path = service.reports.find(name)
    try:
        head = _head(service, name, path, budget)
    except ReadFailed:
        if not request.caller.may_read("*"):
            raise UnknownReport.of(name) from None
        raise
    if not _may_read(request.caller, head):
        raise UnknownReport.of(name)  # a refusal would tell that it exists, and of what it is
    items: list[ReportItem] = []
    too_long, num_bytes, next_first = list[int](), 0, None
    for line in read_items(path, query.first, budget):
        num_bytes += len(line.content or b"")
        if len(items) + len(too_long) == query.count or (num_bytes > _PAGE_BYTES and items):
            next_first = line.number
            break
        if line.content is None:
            too_long.append(line.number)
            continue
        item = _read(_ITEM, line.content, name, f"item {line.number}")
        items.append({**item, "spans": item["spans"][:SPANS], "num_spans": len(item["spans"])})
        budget.spend()
    fields = ReportPage(
        name=name, report=head, first=query.first, items=items, too_long=too_long, next_first=next_first
    )
    return json_response(fields, NO_STORE, budget)


def _head(service: Service, name: str, path: Path, budget: Budget) -> ReportHead:
    head = _read(_HEAD, read_head(path, budget), name, "its first line")
    for each in head["corpora"]:
        served = service.catalog.corpora.get(each["corpus"])
        each["is_served"] = (
            served is not None
            and served.base is served
            and each["fingerprint"] in served.fingerprints.values()
        )
    return head


def _may_read(caller: Caller, head: ReportHead | None) -> bool:
    """Tell whether a caller may read all corpora of a report; all corpora, where none can be known."""
    names = [] if head is None else [each["corpus"] for each in head["corpora"]]
    return all(map(caller.may_read, names or ["*"]))


def _read(kind: TypeAdapter[T], content: bytes, name: str, what: str) -> T:
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ReadFailed(
            f"the report {name!r} cannot be read: {what}: {where:.100}: {first['msg']:.200}"
        ) from None
