"""The routes that describe corpora."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response as AsgiResponse

from corpus_server.answers.question import CorpusName
from corpus_server.answers.response import json_response
from corpus_server.web.responses import sent
from corpus_server.web.routes.shared import CallHere, Nothing, read_route
from corpus_server.web.schemas import CorporaAnswer, CorpusAnswer

router = APIRouter(tags=["corpora"])


@read_route(router, "/v1/corpora", response_model=CorporaAnswer)
async def corpora(call: CallHere, query: Nothing) -> AsgiResponse:
    """Describe all corpora that the caller may read."""
    served = [each for each in call.service.catalog.corpora.values() if call.head.caller.may_read(each.name)]
    # In a thread: thousands of shards take longer to describe than the loop may stand still.
    described = await call.run(lambda _: json_response({"corpora": [each.describe() for each in served]}, {}))
    return sent(described)


@read_route(router, "/v1/corpora/{name}", response_model=CorpusAnswer)
async def corpus(call: CallHere, name: CorpusName, query: Nothing) -> AsgiResponse:
    """Describe one corpus."""
    corpus = call.service.corpus(name, call.head.caller)
    return sent(await call.run(lambda _: json_response(corpus.describe(), {})))
