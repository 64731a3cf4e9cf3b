"""The routes: what is asked in `responses`, and the short ones of corpora, plans and operation."""

from corpus_server.web.routes import asked, corpora, operation, plans
from corpus_server.web.routes.route import ROUTES, Call, Route

__all__ = ["ROUTES", "Call", "Route", "asked", "corpora", "operation", "plans"]
