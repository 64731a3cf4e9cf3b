"""What every kind of tokenizer does, and what the kinds share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from corpus_server.corpus.files import unreadable
from corpus_server.extras import optional_package
from corpus_server.user_files import parse_json, read_regular

TokenArray = np.ndarray[tuple[int], np.dtype[np.uint32]]

FILE_NAMES: Final = ("tokenizer.json", "*.tiktoken", "tokenizer.model")
"""Patterns of the names under which a tokenizer is found beside shards."""

# Texts that mark the end of a document in the vocabularies of GPT-2 and its successors, Llama 3, Llama and
# Mistral, Gemma, DeepSeek, BERT's successors.
EOT_TEXTS: Final = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<|eos|>", "[EOS]"),
)

_NAMES_TOKENS: Final = ("tokenizer_config.json", "special_tokens_map.json")
CHAT_TEMPLATE: Final = "chat_template.jinja"
BESIDE: Final = (*_NAMES_TOKENS, CHAT_TEMPLATE)
"""Files that `save_pretrained` of transformers writes beside a tokenizer, and that `build` reads."""


_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")


class Marked(NamedTuple):
    """Tokens and where they come from."""

    ids: TokenArray
    offsets: np.ndarray[tuple[int, int], np.dtype[np.int64]]  # first character of each, and behind its last


class Tokenizer(ABC):
    """What every kind of tokenizer does.

    Attributes:
        vocab_size: one more than its highest id; the vocabulary may have holes, see `knows`.
        eot_id: id of the end-of-text token; None if the file has none under a usual name.
    """

    vocab_size: int
    eot_id: int | None

    @abstractmethod
    def knows(self, token: int) -> bool:
        """Tell whether an id is in the vocabulary."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids that the tokenizer `knows`; bytes that are no UTF-8 become U+FFFD.

        Special tokens appear as their names.
        """

    def bytes_of(self, token: int) -> bytes | None:
        """Return the UTF-8 that an id that the tokenizer `knows` adds to a running text.

        None where it cannot say: the neighbours decide. The first token of a text may add less than that.
        """
        return None

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the ids of each text: `(num_tokens,) uint32`. Names of special tokens count as plain text.

        Some vocabularies reach a special token from its name all the same, see `encode_without`. The texts
        must be valid Unicode: without lone surrogates. Uses one thread, except that a tokenizer.json uses as
        many as `TOKENIZERS_PARALLELISM` and `RAYON_NUM_THREADS` allow.
        """

    def encode_without(self, text: str, token: int) -> TokenArray | None:
        """Return the ids of a text as if `token` had another name, which no text holds; None if it cannot."""
        return None  # no text reaches a special token

    def dropped(self, text: str) -> str:
        """Return the characters of a text, but for white space, that are in none of its tokens."""
        return ""

    def encode_marked_up(self, text: str) -> Marked | None:
        """Return the tokens of a text in which the names of special tokens are those tokens, as in a chat.

        None for kinds that do not say which characters a token is made of.
        """
        return None

    def find_special(self, text: str) -> str | None:
        """Return the name of a special token that is in a text; None if there is none."""
        return None


def piece_bytes(piece: str) -> bytes:
    """Return the UTF-8 of a piece in which U+2581 is a space, and `<0x0A>` a byte."""
    if _BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


def eot_beside(path: Path) -> tuple[str, str] | None:
    """Return what a file beside a tokenizer calls the end of text, and the file's name; None if none does."""
    for name in _NAMES_TOKENS:
        try:
            token = parse_json(read_regular(path.with_name(name)))["eos_token"]
        except (OSError, ValueError, KeyError, TypeError):  # a side file: the tokenizer works without it
            continue
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token, name
    return None


def instead(path: Path) -> str:
    """Return what to give instead of a file that is no tokenizer."""
    return tokenizers_in(path.parent, path) or (
        "give `bytes`, a tokenizer.json, a tiktoken rank file or a SentencePiece model; transformers writes "
        "the tokenizer.json of a model: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
    )


def tokenizers_in(folder: Path, but: Path | None = None) -> str | None:
    """Return which tokenizers of a folder to give; None if it has none."""
    found = sorted({str(path) for pattern in FILE_NAMES for path in folder.glob(pattern)} - {str(but)})
    return f"give {' or '.join(found)}" if found else None


def package(name: str, path: Path) -> Any:
    """Return the package that reads a tokenizer."""
    return optional_package(name, extra="text", purpose=f"the tokenizer {path}")


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Report whatever a package, or Python, says of a damaged file."""
    try:
        yield
    except Exception as error:  # packages raise no narrower one
        what = f"is not a {kind} that can be read: {error}"
        raise unreadable(path, what, "was the copy interrupted?") from error
