"""A list of documents: filtered and sorted by their length and their metadata, some at a time."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from corpus_server.admission.request import RequestHead
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.views import View
from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.read.text import decode_known
from corpus_server.responses.documents import find_metadata, shown
from corpus_server.responses.forms import share_of
from corpus_server.responses.question import CorpusName, QueryParameters, Token, integer, question
from corpus_server.responses.questions.ranges import are_here, read
from corpus_server.responses.response import NO_STORE, Response, json_response
from corpus_server.responses.service import Service
from corpus_server.work import Budget

MAX_LOOKED_AT: Final = 1 << 16
"""Documents of one response: about half a second of reading metadata."""

LENGTH: Final = "num_tokens"
"""What the length of a document is called beside the columns of the metadata."""

_AT_ONCE: Final = 1 << 14
_OF_A_VIEW: Final = 1 << 11  # whose documents lie anywhere, and are read one by one
_SHOWN_TOKENS: Final = 48

_OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<>": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_NAME: Final = r'(?P<{0}>[A-Za-z_]\w*)|"(?P<{0}_quoted>[^"]+)"'
_TEXT: Final = r"'(?P<{0}>(?:[^']|'')*)'"
_CONDITION: Final = re.compile(
    rf"\s*(?:contains\(\s*(?:{_NAME.format('in_name')})\s*,\s*{_TEXT.format('held')}\s*\)"
    rf"|(?:{_NAME.format('name')})\s*(?P<operator><=|>=|!=|<>|=|<|>)\s*"
    rf"(?:{_TEXT.format('text')}|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<truth>true|false)))\s*",
    re.IGNORECASE,
)
_AND: Final = re.compile(r"and\b", re.IGNORECASE)
_ACCEPTED: Final = (
    "conditions joined by `and`, each as score >= 0.5, source = 'web' or contains(url, 'wiki'); "
    f"{LENGTH} is the length"
)


class DocumentsQuery(QueryParameters):
    """Parameters of a list of documents."""

    first: Token = 0
    """Document to begin with."""
    count: Annotated[int, integer(1, 200)] = 50
    """Documents to return at most."""
    where: Annotated[str | None, Field(min_length=1, max_length=2000)] = None
    """Conditions: `score >= 0.5 and contains(url, 'wiki') and num_tokens < 100`. They are an expression of
    `view create --where`, too, unless they name `num_tokens`."""
    sort: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    """Column to sort by, or `num_tokens`; with `-` before it, descending. Those without a value come last."""
    skip: Annotated[int, integer(0, MAX_LOOKED_AT)] = 0
    """With `sort`: documents of the sorted list to leave out, for the next page."""


@described
class ListedDocument:
    """One document."""

    document: int
    base_document: int | None
    """Of a view: its number in the corpus."""
    start: int
    num_tokens: int
    metadata: dict[str, Any] | None
    text: str | None
    """Its beginning; null without a tokenizer, or if its shard is not on the server's machine."""


@described
class Documents:
    """Documents of a corpus, by their number or sorted."""

    corpus: str
    num_documents: int
    looked_at: str
    """How many documents were looked at, for people: `65,536 of 1,000,000 documents (6 %)`."""
    complete: bool
    """Whether all documents from `first` on were looked at."""
    num_found: int
    """Those of them that meet the conditions. Without `sort` the search ends when there are enough."""
    next_first: int | None
    """Without `sort`: the next page's `first`; with it, where to go on behind those that were looked at."""
    columns: dict[str, str]
    """Columns of the metadata and their types."""
    documents: list[ListedDocument]
    metadata_problem: str | None


class _Condition(NamedTuple):
    column: str
    compare: Callable[[Any, Any], Any]
    value: Any

    def holds(self, value: Any) -> bool:
        """Tell whether a document's value meets it; null never does."""
        if value is None:
            return False
        if isinstance(value, str) is not isinstance(self.value, str):
            kinds = [("a text" if isinstance(each, str) else "no text") for each in (value, self.value)]
            said = f"column {self.column!r} holds {kinds[0]}, the condition compares it with {kinds[1]}"
            raise InvalidParameter(f"where: {said}", parameter="where", accepted=_ACCEPTED)
        return bool(self.compare(value, self.value))


@question("/v1/corpora/{name}/documents", Documents)
def documents(
    service: Service, name: CorpusName, query: DocumentsQuery, request: RequestHead, budget: Budget
) -> Response:
    """List documents, filtered and sorted by their length and their metadata."""
    corpus = service.corpus(name, request.caller)
    if (total := corpus.num_documents) is None:
        raise corpus.no_documents()
    if query.first > total:
        raise InvalidParameter.expected("first", f"in [0, {total}]", query.first)
    columns, problem = _columns(corpus)
    conditions = _parsed(query.where)
    by = None if query.sort is None else query.sort.removeprefix("-")
    is_down = by != query.sort
    if query.skip and by is None:
        raise InvalidParameter.expected("skip", "left out without sort", query.skip)
    for parameter, column in (*(("where", each.column) for each in conditions), ("sort", by)):
        if column is not None and column != LENGTH and column not in columns:
            known = ", ".join((LENGTH, *columns))
            raise InvalidParameter.expected(parameter, f"a column of the metadata: {known}", column)
    wanted = {each.column for each in conditions} | ({by} if by is not None else set())
    found: list[tuple[Any, int, int, int]] = []  # sort key, document, first token, tokens
    first, looked_at, is_enough = query.first, 0, False
    limit = _OF_A_VIEW if isinstance(corpus, View) else MAX_LOOKED_AT
    while first < total and looked_at < limit and not is_enough:
        numbers = range(first, min(first + _AT_ONCE, total, first + limit - looked_at))
        edges = _edges(corpus, numbers, budget)
        lengths = (edges[:, 1] - edges[:, 0]).tolist()
        values = _values(corpus, numbers, wanted - {LENGTH}, budget) | {LENGTH: lengths}
        budget.spend(num_bytes=edges.nbytes)
        for place, number in enumerate(numbers):
            first, looked_at = number + 1, looked_at + 1
            if all(each.holds(values[each.column][place]) for each in conditions):
                key = None if by is None else values[by][place]
                found.append((key, number, int(edges[place, 0]), lengths[place]))
                if is_enough := by is None and len(found) == query.count:
                    break
    if by is not None:
        found = _sorted(found, is_down=is_down)
    page = found[query.skip : query.skip + query.count]
    fields = Documents(
        corpus=corpus.name,
        num_documents=total,
        looked_at=share_of(looked_at, total, "documents"),
        complete=first >= total,
        num_found=len(found),
        next_first=None if first >= total else first,
        columns=columns,
        documents=list(_listed(service, corpus, [each[1:] for each in page], budget)),
        metadata_problem=problem,
    )
    return json_response(fields, NO_STORE, budget)


def _edges(corpus: Corpus, numbers: range, budget: Budget) -> NDArray[np.int64]:
    """Return where neighbouring documents begin and end: `(k, 2)`."""
    if not isinstance(corpus, View):
        return corpus.document_edges(np.arange(numbers.start, numbers.stop), 1)
    found = []
    for number in numbers:
        found.append(corpus.document_range(number))
        budget.spend()
    return np.array(found, dtype=np.int64)


def _columns(corpus: Corpus) -> tuple[dict[str, str], str | None]:
    """Return the columns of a corpus's metadata, and why it cannot be read."""
    problem = find_metadata(corpus, (), Budget()).problem
    table = None if problem else corpus.metadata()
    return ({} if table is None else dict(table.columns)), problem


def _parsed(text: str | None) -> list[_Condition]:
    conditions, at = list[_Condition](), 0
    while text:
        if (condition := _CONDITION.match(text, at)) is None:
            raise InvalidParameter.expected("where", _ACCEPTED, text[at:][:80] or text[:80])
        conditions.append(_condition(condition))
        at = condition.end()
        if at == len(text):
            break
        if (joined := _AND.match(text, at)) is None:
            raise InvalidParameter.expected("where", _ACCEPTED, text[at:][:80])
        at = joined.end()
    return conditions


def _condition(found: re.Match[str]) -> _Condition:
    if (held := found["held"]) is not None:
        name = found["in_name"] or found["in_name_quoted"]
        return _Condition(name, operator.contains, held.replace("''", "'"))
    value: Any
    if found["text"] is not None:
        value = found["text"].replace("''", "'")
    elif found["number"] is not None:
        value = float(found["number"]) if re.search("[.eE]", found["number"]) else int(found["number"])
    else:
        value = found["truth"].lower() == "true"
    return _Condition(found["name"] or found["name_quoted"], _OPERATORS[found["operator"]], value)


def _values(corpus: Corpus, numbers: range, columns: set[str], budget: Budget) -> dict[str, Sequence[Any]]:
    """Return values of metadata of neighbouring documents, by column."""
    if not columns:
        return {}
    table = corpus.metadata()
    assert table is not None  # it has the columns
    own = [corpus.base_document(number) for number in numbers] if isinstance(corpus, View) else numbers
    rows = table.rows(own, budget, columns, explains=False)
    return {name: [shown(rows[number].get(name)) for number in own] for name in columns}


def _sorted(found: list[tuple[Any, int, int, int]], *, is_down: bool) -> list[tuple[Any, int, int, int]]:
    known = [each for each in found if each[0] is not None]
    if len({isinstance(each[0], str) for each in known}) > 1 or any(
        isinstance(each[0], list | dict) for each in known
    ):
        raise InvalidParameter.expected(
            "sort", "a column of texts, or one of numbers", "one of several kinds"
        )
    known.sort(key=lambda each: each[0], reverse=is_down)
    return [*known, *(each for each in found if each[0] is None)]


def _listed(
    service: Service, corpus: Corpus, page: Sequence[tuple[int, int, int]], budget: Budget
) -> Iterator[ListedDocument]:
    own = {n: corpus.base_document(n) for n, *_ in page} if isinstance(corpus, View) else {}
    rows = find_metadata(corpus, [own.get(n, n) for n, *_ in page], budget).rows
    for number, start, length in page:
        stop, text = start + min(length, _SHOWN_TOKENS), None
        if length and are_here(service, corpus, start, stop):
            tokens = read(service, corpus, start, stop)
            text = decode_known(corpus.tokenizer, [each for each in tokens.tolist() if each != corpus.eot])
        yield ListedDocument(
            document=number,
            base_document=own.get(number),
            start=start,
            num_tokens=length,
            metadata=rows.get(own.get(number, number)),
            text=text,
        )
        budget.spend()
