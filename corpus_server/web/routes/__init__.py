"""The routes: what is asked in `answers`, and the short ones of corpora, plans and operation."""

from corpus_server.web.routes import asked, corpora, operation, plans

__all__ = ["ROUTERS"]

ROUTERS = (asked.router, corpora.router, plans.router, operation.router)
