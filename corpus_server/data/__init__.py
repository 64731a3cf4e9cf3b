"""The data plane: from a request for tokens to the bytes on its connection, without a web framework.

door        accepts every connection; answers token requests itself, hands all others over
exchange    one request and its response: made and sent in a thread, slice by slice
gate        decides whether a request may be answered; asked by the door and by the application
tokens      the responses themselves: batches, indices, ranges of a corpus
service     what one process has open: corpora, plans, threads, limits
"""

from corpus_server.data.door import Door
from corpus_server.data.service import Service

__all__ = ["Door", "Service"]
