"""Token ids as text, for people: byte-level, or by a tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from corpus_server.corpus import Corpus
from corpus_server.errors import TextUnavailable


def check_available(corpus: Corpus) -> None:
    """Raise TextUnavailable if the corpus has no tokenizer here."""
    if corpus.tokenizer_path is None:
        raise TextUnavailable(
            f"corpus {corpus.name!r} has no tokenizer",
            parameter="format",
            received="text",
            accepted="raw, npy, json",
            remedy="put a tokenizer.json beside its shards, or start the server with --tokenizer",
        )


def decode(corpus: Corpus, tokens: Sequence[int]) -> str:
    """Return the text of some tokens; what is no valid text becomes U+FFFD.

    Raises:
        TextUnavailable: the corpus has no tokenizer here, or an id is not in its vocabulary.
    """
    check_available(corpus)
    if corpus.tokenizer_path == "bytes":
        if (strange := next((token for token in tokens if not 0 <= token < 256), None)) is not None:
            raise TextUnavailable(
                f"corpus {corpus.name!r} is read as bytes, but holds token {strange} outside [0, 256)",
                remedy="start the server with --tokenizer PATH",
            )
        return bytes(tokens).decode("utf-8", errors="replace")
    tokenizer = _load(corpus.tokenizer_path)
    # The tokenizer leaves out ids that it does not know: the text would look right and be wrong.
    for token in set(tokens):
        if token < 0 or tokenizer.id_to_token(token) is None:
            raise TextUnavailable(
                f"corpus {corpus.name!r} holds token {token}, which is not in its tokenizer",
                remedy="start the server with the --tokenizer that the corpus was made with",
            )
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
    return text


@lru_cache(maxsize=16)
def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TextUnavailable(
            "text by a tokenizer.json needs the package `tokenizers`",
            remedy="pip install 'corpus-server[text]'",
        ) from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise TextUnavailable(f"{path} is not a tokenizer.json that can be read: {error}") from error
