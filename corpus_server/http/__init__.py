"""The HTTP/1.1 connection: parsing, sending, time-outs, and the bridge to the ASGI application."""

from corpus_server.http.connection import Connection

__all__ = ["Connection"]
