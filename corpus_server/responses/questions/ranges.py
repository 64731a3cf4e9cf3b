"""Tokens of a corpus, whatever plans say: a range, a document, and a range as text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from corpus_server import metrics
from corpus_server.admission.request import RequestHead
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.views import View
from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.read import text
from corpus_server.read.bound_plan import Source
from corpus_server.read.reading import RangeReading, num_bytes, read_arrays
from corpus_server.responses.arrays import array_response
from corpus_server.responses.documents import find_metadata
from corpus_server.responses.forms import check_form, json_arrays
from corpus_server.responses.question import (
    CorpusName,
    FormatQuery,
    QueryParameters,
    Token,
    integer,
    question,
)
from corpus_server.responses.requests import count_tokens
from corpus_server.responses.response import (
    NO_STORE,
    RANGE_HEADER,
    Format,
    Response,
    caching,
    json_response,
    negotiate,
    not_modified,
    text_response,
)
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import TOKEN_LIMITS, TOKENS, representation
from corpus_server.stores import Extent, Extents
from corpus_server.work import Budget

DocumentNumber = Annotated[str, Field(pattern="^[0-9]{1,19}$")]


class TokensQuery(FormatQuery):
    """Parameters of a raw range."""

    start: Token = 0
    """First token, corpus-wide."""
    count: Token | None = None
    """Tokens; default: up to 256, as many as there are."""


class DocumentQuery(FormatQuery):
    """Parameters of a document."""

    base: Literal["true", "false"] = "false"
    """`true`: of a view, the number is that of its corpus, and the first copy is meant."""


class SpansQuery(QueryParameters):
    """Parameters of a range of tokens as text."""

    start: Token = 0
    """First token, corpus-wide."""
    count: Annotated[int, integer(1, 2**20)] = 1024
    """Tokens; fewer where the corpus ends."""
    targets: Literal["true", "false"] = "false"
    """`true`: a span also ends where the loss mask changes, and says what it says of its tokens."""


@described
class Spans:
    """A range of tokens as text."""

    corpus: str
    start: int
    base_start: int | None
    """The first token as `/v1/lookup` counts it: of a view, in its corpus; null behind the last token."""
    stop: int
    num_tokens: int
    """Tokens of the corpus."""
    spans: list[text.Span]


@question("/v1/corpora/{name}/tokens", array=TOKENS, is_tagged=True, is_token_path=True, limits=TOKEN_LIMITS)
def tokens(
    service: Service, name: CorpusName, query: TokensQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return a raw range of tokens, corpus-wide, across the borders of shards."""
    corpus, start = service.corpus(name, request.caller), query.start
    count = min(256, max(0, corpus.num_tokens - start)) if query.count is None else query.count
    return token_range(
        service, corpus, start, start + count, query, request, budget, default="raw", fields={}
    )


@question("/v1/corpora/{name}/documents/{number}", array=TOKENS, is_tagged=True)
def document(
    service: Service,
    name: CorpusName,
    number: DocumentNumber,
    query: DocumentQuery,
    request: RequestHead,
    budget: Budget,
) -> Response:
    """Return one document: its token range, its tokens and, if the corpus has any, its metadata.

    Of a view, `base_document` is its corpus's own number. Long values of the metadata are cut. If the
    metadata cannot be read, `metadata_problem` says why.
    """
    corpus, own = service.corpus(name, request.caller), int(number)
    if isinstance(corpus, View) and query.base == "true":
        own = corpus.own_document(own)
    fields: dict[str, Any] = {"document": own}
    if isinstance(corpus, View):
        fields["base_document"] = corpus.base_document(own)
    start, stop = corpus.document_range(own)
    tag = ""
    if corpus.metadata_paths and (query.format or negotiate(request, "json")) == "json":
        own = fields.get("base_document", own)
        metadata = find_metadata(corpus, [own], budget)
        fields |= {"metadata": metadata.rows.get(own), "metadata_problem": metadata.problem}
        tag = metadata.tag
    response = token_range(
        service, corpus, start, stop, query, request, budget, default="json", fields=fields, tag=tag
    )
    response.when_sent(metrics.DOCUMENTS.add, 1, corpus.name)
    return response


@question("/v1/corpora/{name}/spans", Spans)
def spans(
    service: Service, name: CorpusName, query: SpansQuery, request: RequestHead, budget: Budget
) -> Response:
    """Show a range of tokens as text, cut at the borders of documents."""
    corpus = service.corpus(name, request.caller)
    if query.start > corpus.num_tokens:
        raise InvalidParameter.expected("start", f"in [0, {corpus.num_tokens}]", query.start)
    stop = min(query.start + query.count, corpus.num_tokens)
    service.admission.check_text_size(stop - query.start, "count")
    masks = _masks(corpus, query.start, stop) if query.targets == "true" else []
    service.stage(chain(_reading(service, corpus, query.start, stop).extents(), masks), budget)
    tokens = read(service, corpus, query.start, stop)
    budget.spend(num_bytes=tokens.nbytes)
    mask = text.mask_of(corpus, query.start, stop) if query.targets == "true" else None
    shown = list[text.Span]()
    for span in text.spans(corpus, query.start, tokens.tolist(), mask):
        shown.append(span)
        budget.spend()
    fields = Spans(
        corpus=corpus.name,
        start=query.start,
        base_start=corpus.base_token(query.start) if query.start < corpus.num_tokens else None,
        stop=stop,
        num_tokens=corpus.num_tokens,
        spans=shown,
    )
    return json_response(fields, NO_STORE, budget)


def token_range(
    service: Service,
    corpus: Corpus,
    start: int,
    stop: int,
    query: FormatQuery,
    request: RequestHead,
    budget: Budget,
    *,
    default: Format,
    fields: Mapping[str, Any],
    tag: str = "",
) -> Response:
    """Make the response that holds tokens [start, stop) of a corpus.

    Args:
        start, stop: corpus-wide, inside the corpus.
        default: format where the request names none.
        fields: what a JSON response says besides.
        tag: tells what they say apart from what they said before, if the corpus's fingerprint does not.
    """
    chosen = query.format or negotiate(request, default)
    reading = _reading(service, corpus, start, stop)
    budget.check_response(num_bytes(reading), "count")
    if chosen in ("json", "text"):
        check_form(service, chosen, [corpus], reading)
    identity = f"{corpus.fingerprint}.{start}.{stop}.{representation(query, chosen)}"
    identity += f".{tag}" if tag else ""
    if chosen == "text":
        headers = dict(NO_STORE)
    else:
        headers = caching(request, identity, immutable=False, varies=query.format is None)
    headers[RANGE_HEADER] = f"{start}-{stop}"
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    budget.claim(num_bytes(reading))
    service.stage(reading.extents(), budget)
    if chosen == "json":
        where = {"start": start, "stop": stop, "dtype": corpus.dtype.name}
        described = {"corpus": corpus.name, **fields, **where}
        response = json_arrays(described, headers, {"tokens": reading}, budget)
    elif chosen == "text":
        tokens = [each for part in read_arrays(reading) for each in part.tolist()]
        budget.spend(num_bytes=num_bytes(reading))
        response = text_response(text.decode(corpus, tokens), headers, budget)
    else:
        response = array_response(reading, headers, chosen, query.checksum, request, budget)
    source = Source.of("", {corpus.name: 1.0})
    response.when_sent(count_tokens, source, stop - start, request.run)
    return response


def read(service: Service, corpus: Corpus, start: int, stop: int) -> NDArray[np.integer]:
    """Return tokens [start, stop) of a corpus, which are on this machine."""
    parts = (part.copy() for part in read_arrays(_reading(service, corpus, start, stop)))
    return np.concatenate([np.empty(0, corpus.dtype), *parts])


def are_here(service: Service, corpus: Corpus, start: int, stop: int) -> bool:
    """Tell whether tokens [start, stop) of a corpus are on this machine."""
    return all(each.is_cached for each in _reading(service, corpus, start, stop).extents())


def _reading(service: Service, corpus: Corpus, start: int, stop: int) -> RangeReading:
    return RangeReading(corpus, service.catalog.gatherer(corpus.name), start=start, stop=stop)


def _masks(corpus: Corpus, start: int, stop: int) -> list[Extent]:
    """Return what holds the loss mask of tokens [start, stop)."""
    found = list[Extent]()
    for piece in corpus.pieces(np.array([start]), np.array([stop])).places:
        found += Extents([corpus.shards[piece[0]].mask]).of(piece[None] * (0, 1, 1))
    return found
