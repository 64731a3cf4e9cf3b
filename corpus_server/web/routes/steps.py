"""The routes of training: where the rows of steps lie, and their tokens.

The server's own connections answer GETs of both before the application sees them. They are here for their
descriptions, for HEAD, for paths that are spelled otherwise, and for other ASGI servers.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response as AsgiResponse

from corpus_server.answers import tokens
from corpus_server.answers.tokens import BatchesQuery
from corpus_server.web.routes.shared import CallHere, read_route
from corpus_server.web.schemas import INDICES, TOKENS

router = APIRouter(tags=["training"])


@read_route(router, "/v1/indices", response_class=AsgiResponse, responses=INDICES)
async def indices(call: CallHere, query: Annotated[BatchesQuery, Query()]) -> AsgiResponse:
    """Return where the rows of a rank lie: shards (over the plan's shard list) and tokens."""
    return call.made(tokens.indices(call.service, query, call.head))


@read_route(router, "/v1/batches", response_class=AsgiResponse, responses=TOKENS)
async def batches(call: CallHere, query: Annotated[BatchesQuery, Query()]) -> AsgiResponse:
    """Return the tokens of a rank: `(count, rows, seq_len + 1)`, C order, little-endian."""
    return call.made(tokens.batches(call.service, query, call.head))
