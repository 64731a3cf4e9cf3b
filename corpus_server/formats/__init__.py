"""On-disk token formats: header bytes turned into facts, one file per format.

raw       headerless tokens
npy       NumPy arrays
llmc      llm.c and modded-nanogpt
megatron  Megatron-LM pairs of .bin and .idx, with documents
documents sidecars of document ends, for shards whose format has none
foreign   known, not served
"""

from __future__ import annotations

from corpus_server.formats.folder import ShardFile, discover, list_shards
from corpus_server.formats.layout import (
    ACCEPTED_DTYPES,
    TOKEN_DTYPES,
    DocumentIndex,
    ShardLayout,
    TokenDtype,
    token_dtype,
)
from corpus_server.formats.recognise import recognise, recognise_open

__all__ = [
    "ACCEPTED_DTYPES",
    "TOKEN_DTYPES",
    "DocumentIndex",
    "ShardFile",
    "ShardLayout",
    "TokenDtype",
    "discover",
    "list_shards",
    "recognise",
    "recognise_open",
    "token_dtype",
]
