"""From a request to the bytes of its response, without a web framework."""

from corpus_server.responses.response import Response
from corpus_server.responses.service import Service

__all__ = ["Response", "Service"]
