"""Decode tokens to text for people."""

from __future__ import annotations

from collections.abc import Sequence

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.tokenizers import Tokenizer
from corpus_server.errors import TextUnavailable


def check_available(corpus: Corpus) -> Tokenizer:
    """Return the corpus's tokenizer; raise TextUnavailable if it has none."""
    if corpus.tokenizer is None:
        raise TextUnavailable(
            f"corpus {corpus.name!r} has no tokenizer",
            parameter="format",
            received="text",
            accepted="raw, npy, json",
            remedy="put a tokenizer.json beside its shards, or serve it as NAME=PATH,tokenizer=FILE",
        )
    return corpus.tokenizer


def decode(corpus: Corpus, tokens: Sequence[int]) -> str:
    """Return the text of some tokens; invalid bytes become U+FFFD.

    Raises:
        TextUnavailable: the corpus has no tokenizer, or an id is not in its vocabulary.
    """
    tokenizer = check_available(corpus)
    # Tokenizers drop ids that they do not know, or fail: the text would look right and be wrong.
    if (strange := next((token for token in set(tokens) if not tokenizer.knows(token)), None)) is not None:
        raise TextUnavailable(
            f"corpus {corpus.name!r} holds token {strange}, which its tokenizer ({corpus.tokenizer_name}) "
            "does not know",
            remedy="serve it with the tokenizer that it was made with: NAME=PATH,tokenizer=FILE",
        )
    return tokenizer.decode(tokens)
