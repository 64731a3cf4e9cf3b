"""Whether a request may be answered: access tokens, scopes, limits."""

from corpus_server.admission.access import Access
from corpus_server.admission.request import Caller, RequestHead

__all__ = ["Access", "Caller", "RequestHead"]
