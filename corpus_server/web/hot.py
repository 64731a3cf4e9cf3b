"""In front of the router: repeated parameters refused, and the one hot path answered.

FastAPI's routing and dependency injection cost several times what the rest of a small answer does. The
route is declared there like every other one, for the API's description; requests for it are answered
here, by the same function, from the same schema, with the same errors.
"""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from urllib.parse import parse_qsl

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.web.answers import TokenResponse
from corpus_server.web.lane import PATH, Lane
from corpus_server.web.problems import core_error, problem, validation_error
from corpus_server.web.routes.steps import batches
from corpus_server.web.schemas import BatchesQuery

_log = logging.getLogger("corpus_server")
_ROUTE = SimpleNamespace(path=PATH)


class HotPath:
    """ASGI application that answers `GET /v1/batches` itself and passes everything else on."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.lane: Lane | None = None
        """The short way past this one, once there is a request to learn from."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on."""
        # What watches over servers adds parameters of its own to the routes outside /v1.
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        answer: ASGIApp
        try:
            parameters = _parameters(scope["query_string"])
            if scope["path"] == PATH and scope["method"] in ("GET", "HEAD"):
                scope["route"] = _ROUTE  # as the router would, for the metrics
                query = BatchesQuery.model_validate(parameters)
                answer = await batches(request, query, self._app.state.service)
                if isinstance(answer, TokenResponse):
                    self._lane().learn(scope, query, answer)
                await answer(scope, receive, send)  # it reads now, and raises only while it has not sent
                return
            answer = self._app
        except ValidationError as error:
            answer = validation_error(request, RequestValidationError(error.errors()))
        except CorpusServerError as error:
            answer = core_error(request, error)
        except Exception:  # noqa: BLE001 - the last resort
            _log.exception("%s failed", PATH)
            answer = problem(500, "internal-error", "the server failed; its log says why")
        await answer(scope, receive, send)

    def _lane(self) -> Lane:
        if self.lane is None:
            self.lane = Lane(self._app.state.service)
        return self.lane


def _parameters(query_string: bytes) -> dict[str, str]:
    """Return the query's parameters; a repeated one is refused, as it cannot be known which was meant."""
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    parameters = dict(pairs)
    if len(parameters) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name in counts if counts[name] > 1)
        raise InvalidParameter(f"{repeated} is given twice", parameter=repeated)
    return parameters
