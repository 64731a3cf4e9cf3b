"""The routes of all questions: what is asked is declared in `responses`, beside the function that answers.

The server's own connections answer GETs of `/v1/batches` and `/v1/indices` before the application sees them.
They are here for HEAD, for their descriptions, and for other servers.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response as AsgiResponse

from corpus_server.responses import questions  # noqa: F401 - registers what can be asked
from corpus_server.responses.question import QUESTIONS, Question
from corpus_server.responses.response import MEDIA_TYPES, Response
from corpus_server.web.responses import made
from corpus_server.web.routes.route import ROUTES, Call, Handler, Route
from corpus_server.work import Budget

_TAGS = {
    "corpora": "corpora",
    "plans": "plans",
    "lookup": "plans",
    "recordings": "recordings",
    "reports": "reports",
}
_ARRAY = {"type": "string", "contentMediaType": "application/octet-stream"}


def _handler(question: Question) -> Handler:
    async def handler(call: Call, **given: Any) -> AsgiResponse:
        def work(budget: Budget) -> Response:
            return question.make(service=call.service, request=call.head, budget=budget, **given)

        return made(call.service, call.request, call.head, question, work)

    handler.__name__ = question.make.__name__
    return handler


def _described(question: Question) -> dict[str, Any]:
    responses: dict[int | str, dict[str, Any]] = {}
    if question.is_tagged:
        responses[304] = {"description": "What `If-None-Match` names still holds."}
    described: dict[str, Any] = {"tags": [_TAGS.get(question.path.split("/")[2], "training")]}
    if question.array:
        schemas = {name: {"schema": _ARRAY if name in ("raw", "npy") else {}} for name in question.formats}
        content = {MEDIA_TYPES[name]: schema for name, schema in schemas.items()}
        responses[200] = {"description": question.array, "content": content}
        described["response_class"] = AsgiResponse
    else:
        described["response_model"] = question.response
    return {**described, "responses": responses}


for _question in QUESTIONS:
    ROUTES.append(
        Route(
            path=_question.path,
            method="GET",
            handler=_handler(_question),
            types=_question.parameters,
            about=_question.about,
            described=_described(_question),
        )
    )
