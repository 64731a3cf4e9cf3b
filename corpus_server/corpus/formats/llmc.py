"""llm.c's token files, which modded-nanogpt writes too.

Layout (llm.c `dev/data/data_common.py`): a header of 256 `<i4`, of which the first three are
`[magic, version, num_tokens]` and the others unused, then the tokens. Both projects put end-of-text before
each document, and cut shards wherever they are full (`dev/data/fineweb.py`).
"""

from __future__ import annotations

from typing import Final

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.layout import (
    TOKEN_DTYPES,
    Format,
    ShardLayout,
    TokenDtype,
    counted_run,
    read_header,
)

HEADER_BYTES: Final = 1024

# (magic, version) -> dtype of the tokens
_DTYPES: Final = {
    (20240520, 1): TOKEN_DTYPES["uint16"],  # GPT-2's vocabulary
    (20240801, 7): TOKEN_DTYPES["uint32"],  # Llama 3's
}

# Other files of llm.c begin with similar magic numbers and hold no tokens.
_NOT_TOKENS: Final = {
    20240326: "a model checkpoint of llm.c",
    20240327: "a debug state of llm.c",
    20240522: "an evaluation set of llm.c",
}


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    magic = int.from_bytes(file.head(4), "little")
    if magic in _NOT_TOKENS:
        raise file.unreadable(f"is {_NOT_TOKENS[magic]}, not tokens", "name its token files")
    if magic not in {known for known, _ in _DTYPES}:
        return None
    _, version, num_tokens = read_header(file, "<iii", "llm.c's header", num_bytes=HEADER_BYTES)
    if (magic, version) not in _DTYPES:
        accepted = ", ".join(f"{known[0]} with version {known[1]}" for known in _DTYPES)
        raise file.unreadable(
            f"llm.c magic {magic} with version {version} is unknown (known: {accepted})",
            "write it again with llm.c of today",
        )
    found = _DTYPES[magic, version]
    return ShardLayout(
        format="llm.c",
        reason=f"begins with llm.c's magic number {magic}, version {version}",
        dtype=found,
        runs=counted_run(file, found, data_offset=HEADER_BYTES, num_tokens=num_tokens),
        eot_first=True,
    )


FORMAT: Final = Format(read=_read)
