"""What all routes share: registration, the call that they answer, common parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response as AsgiResponse

from corpus_server.admission.request import RequestHead
from corpus_server.answers.question import QueryParameters, Question
from corpus_server.answers.response import Response
from corpus_server.answers.service import Service
from corpus_server.web.responses import HEAD, has_left, made
from corpus_server.work import Budget

T = TypeVar("T")
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def read_route(router: APIRouter, path: str, **options: Any) -> Callable[[_Endpoint], _Endpoint]:
    """Register an endpoint for GET and HEAD.

    The first route answers both. The second is there for the OpenAPI description, in which one route with
    two methods would give two operations the same id.
    """

    def register(endpoint: _Endpoint) -> _Endpoint:
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False, **options)
        router.add_api_route(path, endpoint, methods=["GET"], **options)
        return endpoint

    return register


class Call(NamedTuple):
    """A request, its head with the caller, and the service that answers it."""

    request: Request
    head: RequestHead
    service: Service

    async def run(self, work: Callable[[Budget], T]) -> T:
        """Run short blocking work off the event loop; see `Service.run`."""
        return await self.service.run(work, self.head, partial(has_left, self.request))

    def made(self, question: Question, work: Callable[[Budget], Response]) -> AsgiResponse:
        """Return the response that the work of a question makes."""
        return made(self.service, self.request, self.head, question, work)


async def _call(request: Request) -> Call:
    # A coroutine although it awaits nothing: FastAPI runs plain functions in a thread.
    return Call(request, request.scope[HEAD], request.app.state.service)


CallHere = Annotated[Call, Depends(_call)]
Nothing = Annotated[QueryParameters, Query()]  # not for routes of probes, which add parameters
