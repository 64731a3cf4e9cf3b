"""The page's views: each is one template, whose script asks the public routes for its data.

The HTML holds nothing of a corpus, so a browser gets it without a token; the scripts send the token that the
reader types in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.responses import Response as AsgiResponse
from starlette.staticfiles import StaticFiles

from corpus_server import __version__
from corpus_server.live import TOOLS
from corpus_server.plan import ORDERS, ROWS
from corpus_server.plan.declared import declared_fields

View = Callable[[Request], Awaitable[AsgiResponse]]

VIEWS: Final = {
    "/": ("corpora", "Corpora"),
    "/page/corpora/{name}": ("corpus", "Corpus"),
    "/page/plans": ("plans", "Plans"),
    "/page/plans/new": ("new", "New plan"),
    "/page/plans/{plan_id}": ("plan", "Plan"),
    "/page/plans/{plan_id}/diff/{other}": ("diff", "Difference"),
    "/page/plans/{plan_id}/steps/{step}": ("step", "Step"),
    "/page/lookup": ("lookup", "Look-up"),
    "/page/recordings": ("recordings", "Losses"),
    "/page/recordings/{name}": ("recording", "Losses"),
    "/page/reports": ("reports", "Contamination"),
    "/page/reports/{name}": ("report", "Contamination"),
    "/page/live": ("live", "Live"),
}
"""Address -> name of the template and of the script, title."""

# Nothing from elsewhere, nothing inline: text of a corpus that looks like markup stays text even if a script
# made a mistake. Styles that a script sets on an element are not inline in this sense.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_HERE: Final = Path(__file__).parent


def views() -> dict[str, View]:
    """Return what answers each path of the page, and of its files."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    templates.globals["orders"] = [each for each in ORDERS if not declared_fields(each)]
    templates.globals["rows"] = list(ROWS)
    templates.globals["tools"] = sorted(TOOLS)
    files = _Files(directory=_HERE / "static")

    async def file(request: Request) -> AsgiResponse:
        return await files.get_response(request.path_params["path"], request.scope)

    pages = {path: _view(templates, name, title) for path, (name, title) in VIEWS.items()}
    missing = _view(templates, "missing", "No such page", status=404)
    return {**pages, "/page/static/{path:path}": file, "/page/{path:path}": missing}


def _view(templates: jinja2.Environment, name: str, title: str, *, status: int = 200) -> View:
    def render(parameters: Mapping[str, Any]) -> str:
        # Compiled when it is asked for, and kept: 10 ms and more, for which the event loop cannot wait.
        template = templates.get_template(f"{name}.html")
        return template.render(view=name, title=title, version=__version__, parameters=parameters)

    async def view(request: Request) -> AsgiResponse:
        shown = await asyncio.to_thread(render, dict(request.path_params))
        return HTMLResponse(shown, status, headers=_HEADERS)

    return view


class _Files(StaticFiles):
    """The page's files; a browser asks again whether they changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Any:
        response = super().file_response(*args, **kwargs)
        response.headers.update({"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"})
        return response
