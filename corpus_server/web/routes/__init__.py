"""The routes: parse, call the core, answer. A file for each kind of thing that is asked about."""

from corpus_server.web.routes import corpora, operation, plans, steps

__all__ = ["ROUTERS"]

ROUTERS = (steps.router, corpora.router, plans.router, operation.router)
