"""The routes of all questions: what is asked is declared in `answers`, beside the function that answers.

The server's own connections answer GETs of `/v1/batches` and `/v1/indices` before the application sees them.
They are here for their descriptions, for HEAD, for paths that are spelled otherwise, and for other servers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response as AsgiResponse

from corpus_server.answers import questions  # noqa: F401 - registers what can be asked
from corpus_server.answers.question import QUESTIONS, Question
from corpus_server.answers.response import MEDIA_TYPES, Response
from corpus_server.web.routes.shared import Call, CallHere, read_route
from corpus_server.work import Budget

_TAGS = {"corpora": "corpora", "plans": "plans", "lookup": "plans", "recordings": "recordings"}
_ARRAY = {"type": "string", "contentMediaType": "application/octet-stream"}

router = APIRouter()


def _endpoint(question: Question) -> Callable[..., Any]:
    """Return what FastAPI calls, with the parameters of a question."""

    async def endpoint(call: Call, **given: Any) -> AsgiResponse:
        def work(budget: Budget) -> Response:
            return question.make(service=call.service, request=call.head, budget=budget, **given)

        return call.made(question, work)

    kinds = dict(question.parameters)
    query = kinds.pop("query")
    kinds |= {"call": CallHere, "query": Annotated[query, Query()]}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, annotation=kind) for name, kind in kinds.items()]
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    endpoint.__name__, endpoint.__doc__ = question.make.__name__, question.about
    return endpoint


def _responses(question: Question) -> dict[int | str, dict[str, Any]]:
    described: dict[int | str, dict[str, Any]] = {}
    if question.is_tagged:
        described[304] = {"description": "What `If-None-Match` names still holds."}
    if question.array:
        schemas = {name: {"schema": _ARRAY if name in ("raw", "npy") else {}} for name in question.formats}
        content = {MEDIA_TYPES[name]: schema for name, schema in schemas.items()}
        described[200] = {"description": question.array, "content": content}
    return described


for _question in QUESTIONS:
    _options: dict[str, Any] = {"response_model": _question.answer}
    if _question.array:
        _options = {"response_class": AsgiResponse}
    read_route(
        router,
        _question.path,
        tags=[_TAGS.get(_question.path.split("/")[2], "training")],
        responses=_responses(_question),
        **_options,
    )(_endpoint(_question))
