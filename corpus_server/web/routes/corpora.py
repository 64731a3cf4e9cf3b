"""The routes that describe corpora."""

from __future__ import annotations

from starlette.responses import Response as AsgiResponse

from corpus_server.responses.question import CorpusName, QueryParameters
from corpus_server.responses.response import json_response
from corpus_server.web.responses import sent
from corpus_server.web.routes.route import Call, route


@route("/v1/corpora", tags=["corpora"])
async def corpora(call: Call, query: QueryParameters) -> AsgiResponse:
    """Describe all corpora that the caller may read."""
    served = [each for each in call.service.catalog.corpora.values() if call.head.caller.may_read(each.name)]
    # In a thread: thousands of shards take longer to describe than the loop may stand still.
    described = await call.run(lambda _: json_response({"corpora": [each.describe() for each in served]}, {}))
    return sent(described)


@route("/v1/corpora/{name}", tags=["corpora"])
async def corpus(call: Call, name: CorpusName, query: QueryParameters) -> AsgiResponse:
    """Describe one corpus."""
    corpus = call.service.corpus(name, call.head.caller)
    return sent(await call.run(lambda _: json_response(corpus.describe(), {})))
