"""HTTP over the core: parse, call the core, map errors, answer."""

from corpus_server.web.app import create_app

__all__ = ["create_app"]
