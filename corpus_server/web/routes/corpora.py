"""The routes of corpora: descriptions, ranges of tokens, documents."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Request
from starlette.responses import Response

from corpus_server import text, wire
from corpus_server.errors import InvalidParameter
from corpus_server.reading import TokenRange, num_bytes, read_all
from corpus_server.web.routes.shared import (
    CorpusName,
    Nothing,
    ServiceHere,
    caching,
    choose_format,
    make_router,
    not_modified,
    read_route,
    representation,
)
from corpus_server.web.schemas import CorporaAnswer, CorpusAnswer, FormatQuery, TokensQuery
from corpus_server.web.service import Service

router = make_router("corpora")


@read_route(router, "/v1/corpora", response_model=CorporaAnswer)
async def corpora(query: Nothing, service: ServiceHere) -> Any:
    """Describe all corpora."""
    return {"corpora": [corpus.describe() for corpus in service.catalog.corpora.values()]}


@read_route(router, "/v1/corpora/{name}", response_model=CorpusAnswer)
async def corpus(name: CorpusName, query: Nothing, service: ServiceHere) -> Any:
    """Describe one corpus."""
    return service.catalog.corpus(name).describe()


@read_route(router, "/v1/corpora/{name}/tokens")
async def tokens(
    request: Request, name: CorpusName, query: Annotated[TokensQuery, Query()], service: ServiceHere
) -> Response:
    """Return a raw range of tokens, corpus-wide, over the borders of shards."""
    corpus = service.catalog.corpus(name)
    available = max(0, corpus.num_tokens - query.start)
    count = min(256, available) if query.count is None else query.count
    if query.start > corpus.num_tokens or count > available:
        raise InvalidParameter(
            f"start + count must be at most {corpus.num_tokens}, the tokens of corpus {name!r}, "
            f"got {query.start} + {count}",
            parameter="count",
            received=count,
            accepted=f"start + count <= {corpus.num_tokens}",
        )
    return await _range(request, service, name, query.start, query.start + count, query, default="raw")


@read_route(router, "/v1/corpora/{name}/documents/{number}")
async def document(
    request: Request,
    name: CorpusName,
    number: Annotated[str, Path(pattern="^[0-9]{1,19}$")],
    query: Annotated[FormatQuery, Query()],
    service: ServiceHere,
) -> Response:
    """Return one document: its token range and its tokens."""
    start, stop = service.catalog.corpus(name).document_range(int(number))
    fields = {"document": int(number)}
    return await _range(request, service, name, start, stop, query, default="json", fields=fields)


async def _range(
    request: Request,
    service: Service,
    name: str,
    start: int,
    stop: int,
    query: FormatQuery,
    *,
    default: wire.Format,
    fields: dict[str, int] | None = None,
) -> Response:
    """Answer tokens [start, stop) of a corpus in the format asked for."""
    corpus = service.catalog.corpus(name)
    chosen = choose_format(request, query, default)
    reading = TokenRange(corpus=corpus, gatherer=service.catalog.gatherer(name), start=start, stop=stop)
    service.answering.check_size(num_bytes(reading), "count")
    if chosen in ("json", "text"):
        service.answering.check_text_size(stop - start, "count")
    if chosen == "text":
        text.check_available(corpus)
    identity = f"{corpus.fingerprint}.{start}.{stop}.{representation(query, chosen)}"
    headers = caching(identity, immutable=False, varies=query.format is None)
    headers[wire.RANGE] = f"{start}-{stop}"
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    if chosen == "json":
        described = {
            "corpus": name,
            **(fields or {}),
            "start": start,
            "stop": stop,
            "dtype": corpus.dtype.name,
        }
        return await service.tokens_as_json(reading, described, headers)
    if chosen == "text":
        content = await service.answering.run_admitted(
            lambda: text.decode(corpus, read_all(reading).tolist())
        )
        return Response(content, headers=headers, media_type=wire.MEDIA_TYPES["text"])
    return service.answering.tokens(
        request, reading, npy=chosen == "npy", checksum=query.checksum, headers=headers
    )
