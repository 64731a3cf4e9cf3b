"""Whether a request may be answered: access tokens, scopes, limits."""

from corpus_server.admission.access import Access, Caller
from corpus_server.admission.request import RequestHead

__all__ = ["Access", "Caller", "RequestHead"]
