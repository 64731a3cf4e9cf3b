"""How a route is declared: its path, its parameters, and the function that answers it.

The application answers by these declarations alone. FastAPI takes half a second of CPU to make routes of
them: it is asked for their description (`web/description.py`), when somebody wants to read that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response as AsgiResponse

from corpus_server.admission.request import RequestHead
from corpus_server.responses.problem import invalid_parameter
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import parameters
from corpus_server.web.responses import has_left
from corpus_server.work import Budget

T = TypeVar("T")
Handler = Callable[..., Awaitable[AsgiResponse]]


class Call(NamedTuple):
    """A request, its head with the caller, and the service that answers it."""

    request: Request
    head: RequestHead
    service: Service

    async def run(self, work: Callable[[Budget], T]) -> T:
        """Run short blocking work off the event loop; see `Service.run`."""
        return await self.service.run(work, self.head, partial(has_left, self.request))


@dataclass(frozen=True, kw_only=True)
class Route:
    """A path and the function that answers it.

    Args:
        path: with the names of parameters in braces; no value holds a slash.
        method: `GET`, which answers HEAD too, or `POST`.
        handler: gets the `Call`, the `query` if it has one, and what the path names.
        types: of `query` and of what the path names.
        about: what the route answers, for people.
        described: what the description says of it besides, as arguments of FastAPI's `add_api_route`.
    """

    path: str
    method: str
    handler: Handler
    types: Mapping[str, Any]
    about: str
    described: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _adapters(self) -> Mapping[str, TypeAdapter[Any]]:
        return {name: TypeAdapter(kind) for name, kind in self.types.items()}

    def given(self, named: Mapping[str, str], query: bytes) -> dict[str, Any]:
        """Return the arguments of `handler` that a path and a query string give.

        Raises:
            InvalidParameter: one of them is unknown, missing or not accepted.
        """
        received: dict[str, Any] = dict(named)
        if "query" in self.types:
            received["query"] = parameters(query)
        given: dict[str, Any] = {}
        errors, query_name = [], ""
        for name, adapter in self._adapters.items():
            try:
                given[name] = adapter.validate_python(received[name])
            except ValidationError as error:
                errors += [{**each, "loc": each["loc"] or (name,)} for each in error.errors()]
                query_name = error.title if name == "query" else query_name
        if errors:
            raise invalid_parameter(errors, query_name)
        return given


ROUTES: Final[list[Route]] = []
"""Those of the modules that were imported."""


def route(path: str, *, method: str = "GET", **described: Any) -> Callable[[Handler], Handler]:
    """Register a function as what answers a path; see `Route`."""

    def register(handler: Handler) -> Handler:
        hints = get_type_hints(handler, include_extras=True)
        names = (*re.findall(r"{(\w+)}", path), "query")
        ROUTES.append(
            Route(
                path=path,
                method=method,
                handler=handler,
                types={name: hints[name] for name in names if name in hints},
                about=inspect.getdoc(handler) or "",
                described=described,
            )
        )
        return handler

    return register
