"""The routes that describe corpora."""

from __future__ import annotations

from starlette.responses import Response as AsgiResponse

from corpus_server.errors import Forbidden
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


@route("/v1/corpora/{name}/paths", tags=["corpora"])
async def paths(call: Call, name: CorpusName, query: QueryParameters) -> AsgiResponse:
    """Say where the files of a corpus lie, to the processes for which the server runs (`--while-locked`)."""
    corpus = call.service.corpus(name, call.head.caller)
    if call.service.settings.while_locked is None:
        raise Forbidden("only a server that runs with --while-locked says where files lie", parameter="name")
    files = {shard.file.name: str(shard.path) for shard in corpus.shards if shard.file.is_local}
    return sent(await call.run(lambda _: json_response({"paths": files}, {})))
