"""The routes that describe corpora."""

from __future__ import annotations

from starlette.responses import Response as AsgiResponse
from typing_extensions import TypedDict

from corpus_server.corpus.corpus import CorpusDescription
from corpus_server.described import described_keys
from corpus_server.errors import Forbidden
from corpus_server.responses.question import CorpusName, QueryParameters
from corpus_server.responses.response import json_response
from corpus_server.web.responses import sent
from corpus_server.web.routes.route import Call, route


@described_keys
class Corpora(TypedDict):
    """All corpora."""

    corpora: list[CorpusDescription]


@described_keys
class Paths(TypedDict):
    """Where the files of a corpus lie."""

    paths: dict[str, str]
    """By `file` of the shards; shards of object stores have none."""


@route("/v1/corpora", tags=["corpora"], response_model=Corpora)
async def corpora(call: Call, query: QueryParameters) -> AsgiResponse:
    """Describe all corpora that the caller may read."""
    served = [each for each in call.service.catalog.corpora.values() if call.head.caller.may_read(each.name)]

    def described() -> Corpora:
        return {"corpora": [each.describe() for each in served]}

    # In a thread: thousands of shards take longer to describe than the loop may stand still.
    return sent(await call.run(lambda budget: json_response(described(), {}, budget)))


@route("/v1/corpora/{name}", tags=["corpora"], response_model=CorpusDescription)
async def corpus(call: Call, name: CorpusName, query: QueryParameters) -> AsgiResponse:
    """Describe one corpus."""
    corpus = call.service.corpus(name, call.head.caller)
    return sent(await call.run(lambda budget: json_response(corpus.describe(), {}, budget)))


@route("/v1/corpora/{name}/paths", tags=["corpora"], response_model=Paths)
async def paths(call: Call, name: CorpusName, query: QueryParameters) -> AsgiResponse:
    """Say where the files of a corpus lie, to the processes for which the server runs (`--while-locked`)."""
    corpus = call.service.corpus(name, call.head.caller)
    if call.service.settings.while_locked is None or call.head.address:
        raise Forbidden(
            "only a server that runs with --while-locked says where files lie, on its Unix socket",
            parameter="name",
        )

    def found() -> Paths:
        return {"paths": {each.file.name: str(each.path) for each in corpus.shards if each.file.is_local}}

    return sent(await call.run(lambda budget: json_response(found(), {}, budget)))
