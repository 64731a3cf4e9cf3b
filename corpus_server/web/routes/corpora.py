"""The routes of corpora: descriptions, ranges of tokens, documents."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response as AsgiResponse

from corpus_server.answers import inspection
from corpus_server.answers.inspection import SearchQuery, SpansQuery, StatisticsQuery
from corpus_server.answers.response import json_response
from corpus_server.answers.tokens import FormatQuery, TokensQuery, token_range
from corpus_server.web.responses import sent
from corpus_server.web.routes.shared import CallHere, CorpusName, Nothing, read_route
from corpus_server.web.schemas import TOKENS, CorporaAnswer, CorpusAnswer

DEFAULT_COUNT = 256
"""Tokens of a range whose length is not given."""

router = APIRouter(tags=["corpora"])


@read_route(router, "/v1/corpora", response_model=CorporaAnswer)
async def corpora(call: CallHere, query: Nothing) -> AsgiResponse:
    """Describe all corpora that the caller may read."""
    served = [each for each in call.service.catalog.corpora.values() if call.head.caller.may_read(each.name)]
    # In a thread: thousands of shards take longer to describe than the loop may stand still.
    return sent(await call.run(lambda: json_response({"corpora": [each.describe() for each in served]}, {})))


@read_route(router, "/v1/corpora/{name}", response_model=CorpusAnswer)
async def corpus(call: CallHere, name: CorpusName, query: Nothing) -> AsgiResponse:
    """Describe one corpus."""
    corpus = call.service.corpus(name, call.head.caller)
    return sent(await call.run(lambda: json_response(corpus.describe(), {})))


@read_route(router, "/v1/corpora/{name}/tokens", response_class=AsgiResponse, responses=TOKENS)
async def tokens(call: CallHere, name: CorpusName, query: Annotated[TokensQuery, Query()]) -> AsgiResponse:
    """Return a raw range of tokens, corpus-wide, across the borders of shards."""
    corpus = call.service.corpus(name, call.head.caller)
    available = max(0, corpus.num_tokens - query.start)
    stop = query.start + (min(DEFAULT_COUNT, available) if query.count is None else query.count)
    work = token_range(call.service, corpus, query.start, stop, query, call.head, default="raw", fields={})
    return call.made(work)


@read_route(router, "/v1/corpora/{name}/documents/{number}", response_class=AsgiResponse, responses=TOKENS)
async def document(
    call: CallHere,
    name: CorpusName,
    number: Annotated[str, Path(pattern="^[0-9]{1,19}$")],
    query: Annotated[FormatQuery, Query()],
) -> AsgiResponse:
    """Return one document: its token range and its tokens."""
    fields = {"document": int(number)}
    corpus = call.service.corpus(name, call.head.caller)
    start, stop = await call.run(lambda: corpus.document_range(int(number)))
    work = token_range(call.service, corpus, start, stop, query, call.head, default="json", fields=fields)
    return call.made(work)


@read_route(router, "/v1/corpora/{name}/spans", response_model=inspection.Spans)
async def spans(call: CallHere, name: CorpusName, query: Annotated[SpansQuery, Query()]) -> AsgiResponse:
    """Show a range of tokens as text, cut at the borders of documents."""
    corpus = call.service.corpus(name, call.head.caller)
    return call.made(inspection.corpus_spans(call.service, corpus, query))


@read_route(router, "/v1/corpora/{name}/statistics", response_model=inspection.Statistics)
async def statistics(
    call: CallHere, name: CorpusName, query: Annotated[StatisticsQuery, Query()]
) -> AsgiResponse:
    """Return frequencies of tokens and lengths of documents in a sample."""
    corpus = call.service.corpus(name, call.head.caller)
    return call.made(inspection.statistics(call.service, corpus, query))


@read_route(router, "/v1/corpora/{name}/search", response_model=inspection.Search)
async def search(call: CallHere, name: CorpusName, query: Annotated[SearchQuery, Query()]) -> AsgiResponse:
    """Find a text in a sample of about a million tokens, or in all of a small corpus."""
    corpus = call.service.corpus(name, call.head.caller)
    return call.made(inspection.search(call.service, corpus, query))
