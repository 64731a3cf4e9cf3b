"""What a format reader finds out: where the tokens of a file lie, and of which type they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from corpus_server.errors import InvalidParameter, UnreadableCorpus

TokenDtype = np.dtype[Any]

# On disk and on the wire tokens are little-endian.
TOKEN_DTYPES: Final[dict[str, TokenDtype]] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "int32": np.dtype("<i4"),
}
ACCEPTED_DTYPES: Final = ", ".join(TOKEN_DTYPES)


class DocumentIndex(Protocol):
    """Boundaries of the documents of one shard, looked up on disk; nothing is read whole."""

    @property
    def num_documents(self) -> int:
        """Number of documents in the shard."""

    @property
    def size_bytes(self) -> int:
        """Size of the index file."""

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of document `number` in [0, num_documents)."""

    def find_problem(self) -> str | None:
        """Read the whole index in bounded memory; return what contradicts itself, or None."""

    def close(self) -> None:
        """Close the index file; a second call does nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
    """Where the tokens of one file lie.

    Attributes:
        path: the file that holds the tokens.
        format: `raw`, `npy`, `llm.c` or `megatron`.
        dtype: type of the stored tokens, little-endian.
        data_offset: byte at which token 0 begins.
        num_tokens: tokens from there on.
        documents: document boundaries, where the format brings them.
    """

    path: Path
    format: str
    dtype: TokenDtype
    data_offset: int
    num_tokens: int
    documents: DocumentIndex | None = None

    @property
    def data_bytes(self) -> int:
        """Size of the tokens in bytes."""
        return self.num_tokens * self.dtype.itemsize


def token_dtype(value: object) -> TokenDtype:
    """Return the token dtype named by `value` (a name or a numpy dtype); refuse any other."""
    try:
        dtype = np.dtype(value)  # type: ignore[call-overload]
    except TypeError:
        dtype = None
    if value is None or dtype is None or TOKEN_DTYPES.get(dtype.name) != dtype:
        raise InvalidParameter(
            f"dtype must be one of {ACCEPTED_DTYPES} (little-endian), got {value!r}",
            parameter="dtype",
            received=str(value),
            accepted=ACCEPTED_DTYPES,
        )
    return TOKEN_DTYPES[dtype.name]


def unreadable(path: Path, what: str, remedy: str) -> UnreadableCorpus:
    """Return the error for a file that cannot be served: its path, what is wrong, the way out."""
    return UnreadableCorpus(f"{path}: {what}; {remedy}", received=str(path), remedy=remedy)
