"""llm.c's token files, also those of modded-nanogpt.

Layout (llm.c `dev/data/data_common.py`): a header of 256 `<i4`, of which `[magic, version,
num_tokens]` are used, then the tokens.
"""

from __future__ import annotations

import struct
from typing import Final

from corpus_server.formats.layout import TOKEN_DTYPES, ShardLayout, unreadable
from corpus_server.openfile import OpenFile

HEADER_BYTES: Final = 1024

# (magic, version) -> dtype of the tokens
_KINDS: Final = {
    (20240520, 1): TOKEN_DTYPES["uint16"],  # GPT-2's vocabulary
    (20240801, 7): TOKEN_DTYPES["uint32"],  # Llama 3's
}
_MAGICS: Final = {magic for magic, _ in _KINDS}

# Other files of llm.c carry magics of the same kind and are no tokens.
_NOT_TOKENS: Final = {
    20240326: "a model checkpoint of llm.c",
    20240327: "a debug state of llm.c",
    20240522: "an evaluation set of llm.c",
}


def _magic(head: bytes) -> int | None:
    return int.from_bytes(head[:4], "little") if len(head) >= 4 else None


def matches(head: bytes) -> bool:
    """Tell whether a file that begins with `head` carries one of llm.c's magics."""
    magic = _magic(head)
    return magic in _MAGICS or magic in _NOT_TOKENS


def read(file: OpenFile) -> ShardLayout:
    """Return the layout of a file for whose head `matches` is true."""
    head = file.head(12)
    if (magic := _magic(head)) in _NOT_TOKENS:
        raise unreadable(file.path, f"is {_NOT_TOKENS[magic]}, not tokens", "name its token files")
    if file.size_bytes < HEADER_BYTES:
        raise unreadable(
            file.path,
            f"{file.size_bytes} bytes end inside llm.c's header of {HEADER_BYTES}",
            "was the copy interrupted? Copy it again",
        )
    magic, version, num_tokens = struct.unpack("<iii", head)
    dtype = _KINDS.get((magic, version))
    if dtype is None:
        accepted = ", ".join(f"{known[0]} with version {known[1]}" for known in _KINDS)
        raise unreadable(
            file.path,
            f"llm.c magic {magic} with version {version} is unknown (known: {accepted})",
            "write it again with llm.c of today",
        )
    expected_bytes = HEADER_BYTES + num_tokens * dtype.itemsize
    if num_tokens < 0 or file.size_bytes != expected_bytes:
        held = (file.size_bytes - HEADER_BYTES) / dtype.itemsize
        raise unreadable(
            file.path,
            f"holds {held:g} tokens, its header says {num_tokens}"
            f" ({file.size_bytes} bytes, expected {expected_bytes})",
            "was the copy interrupted? Copy it again",
        )
    return ShardLayout(
        path=file.path, format="llm.c", dtype=dtype, data_offset=HEADER_BYTES, num_tokens=num_tokens
    )
