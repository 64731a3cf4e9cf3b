"""Responses as their functions make them, without a connection."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import TypeVar

from corpus_server.answers.response import Response

T = TypeVar("T")


def made(work: Generator[Future[None] | None, None, T]) -> T:
    """Do work in slices to its end, which waits for nothing."""
    while True:
        try:
            assert next(work) is None
        except StopIteration as end:
            result: T = end.value
            return result


def body(response: Response) -> bytes:
    """Return the bytes of a body; it can be read once."""
    return b"".join(bytes(part) for group in response.body for part in group)
