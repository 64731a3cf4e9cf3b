"""Formats of token files: one file each, listed in `registry`."""

from corpus_server.corpus.formats.layout import (
    TOKEN_DTYPES,
    DocumentIndex,
    Run,
    ShardLayout,
    TokenDtype,
    token_dtype,
)
from corpus_server.corpus.formats.registry import (
    FORMATS,
    check_folder,
    data_path,
    is_side_file,
    read_layout,
    side_file,
)

__all__ = [
    "FORMATS",
    "TOKEN_DTYPES",
    "DocumentIndex",
    "Run",
    "ShardLayout",
    "TokenDtype",
    "check_folder",
    "data_path",
    "is_side_file",
    "read_layout",
    "side_file",
    "token_dtype",
]
