"""Tokenizers: which one a corpus has, and one file for each kind of them."""

from corpus_server.corpus.tokenizers.opening import built_with, find_tokenizer, identity_of, open_tokenizer
from corpus_server.corpus.tokenizers.tokenizer import (
    BESIDE,
    CHAT_TEMPLATE,
    FILE_NAMES,
    Marked,
    TokenArray,
    Tokenizer,
    eot_beside,
)

__all__ = [
    "BESIDE",
    "CHAT_TEMPLATE",
    "FILE_NAMES",
    "Marked",
    "TokenArray",
    "Tokenizer",
    "built_with",
    "eot_beside",
    "find_tokenizer",
    "identity_of",
    "open_tokenizer",
]
