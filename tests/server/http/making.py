"""Responses as their functions make them, without a connection."""

from __future__ import annotations

from corpus_server.responses.response import Response


def body(response: Response) -> bytes:
    """Return the bytes of a body; it can be read once."""
    return b"".join(bytes(part) for group in response.body for part in group)
