"""Hugging Face's `tokenizer.json`, by the package `tokenizers`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.tokenizers.tokenizer import (
    EOT_TEXTS,
    Marked,
    TokenArray,
    Tokenizer,
    eot_beside,
    instead,
    package,
    piece_bytes,
)
from corpus_server.errors import UnreadableCorpus
from corpus_server.user_files import parse_json


def _byte_level() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet, which has a visible one for every byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [each for each in range(256) if each not in shown]
    return {chr(each): each for each in shown} | {chr(256 + n): each for n, each in enumerate(others)}


_BYTES_BY_CHARACTER: Final = _byte_level()
_RENAMED: Final = "\ufdd0"  # Unicode's promise: never a character, so no text has a name that begins with it


class HuggingFace(Tokenizer):
    """A `tokenizer.json`."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._package = path, package("tokenizers", path)
        try:
            self._inner = self._opened(content)
        except Exception as error:  # `tokenizers` raises no narrower one
            raise _no_tokenizer_json(path, content, error) from error
        self.vocab_size = 1 + max(self._inner.get_vocab().values(), default=-1)
        self.eot_id = self._find_eot()

    def _opened(self, content: bytes) -> Any:
        opened = self._package.Tokenizer.from_buffer(content)
        opened.no_truncation()  # files of fine-tuned models cut at their context length
        opened.no_padding()
        opened.encode_special_tokens = True  # as plain text: a document must not end by its own words
        return opened

    def _find_eot(self) -> int | None:
        """Take a special token before a plain one of the same use, which a vocabulary may have left over."""
        special = {each.content for each in self._inner.get_added_tokens_decoder().values() if each.special}
        names = [text for text in EOT_TEXTS if text in special]
        beside = (eot_beside(self._path) or ("",))[0]
        if beside in names or not names:
            names.insert(0, beside)
        ids = (self._inner.token_to_id(text) for text in (*names, *EOT_TEXTS))
        return next((token for token in ids if token is not None), None)

    def knows(self, token: int) -> bool:
        """See `Tokenizer.knows`."""
        return token >= 0 and self._inner.id_to_token(token) is not None

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._inner.decode(list(tokens), skip_special_tokens=False)
        return text

    def bytes_of(self, token: int) -> bytes | None:
        """See `Tokenizer.bytes_of`."""
        piece: str = self._inner.id_to_token(token)
        if token in self._added:
            return piece.encode()
        if "ByteLevel" in self._decoders:
            return bytes(_BYTES_BY_CHARACTER[each] for each in piece)
        return piece_bytes(piece) if self._decoders & {"Metaspace", "ByteFallback"} else None

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._inner.get_added_tokens_decoder())

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of the decoder, or of those in a sequence."""
        found = json.loads(self._inner.to_str())["decoder"] or {}
        return frozenset(each["type"] for each in found.get("decoders", [found]) if "type" in each)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """See `Tokenizer.encode_batch`."""
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in encoded]

    def encode_without(self, text: str, token: int) -> TokenArray | None:
        """See `Tokenizer.encode_without`."""
        if self._renamed is None or self._renamed[0] != token:
            self._renamed = token, self._without(token)
        if (inner := self._renamed[1]) is None:
            return None
        return np.array(inner.encode(text, add_special_tokens=False).ids, np.uint32)

    _renamed: tuple[int, Any] | None = None  # the token that `encode_without` was last asked for

    def _without(self, token: int) -> Any:
        """Return this tokenizer with another name for a token; None where merges make the token."""
        found, name = json.loads(self._inner.to_str()), self._inner.id_to_token(token)
        vocab = found["model"]["vocab"]
        if isinstance(vocab, dict):
            found["model"]["vocab"] = {_renamed(name, each): number for each, number in vocab.items()}
        else:  # Unigram: pairs of a piece and its score
            found["model"]["vocab"] = [[_renamed(name, each), score] for each, score in vocab]
        for added in found["added_tokens"]:
            added["content"] = _renamed(name, added["content"])
        try:
            return self._opened(json.dumps(found).encode())
        except Exception:  # noqa: BLE001 - `tokenizers` raises no narrower one
            return None

    def dropped(self, text: str) -> str:
        """See `Tokenizer.dropped`."""
        if (known := self._characters) is None:
            return ""
        # Not by the offsets of tokens: behind a character that was dropped they are wrong.
        if (normalizer := self._inner.normalizer) is not None:
            text = normalizer.normalize_str(text)
        if (pre_tokenizer := self._inner.pre_tokenizer) is not None:
            text = "".join(word for word, _ in pre_tokenizer.pre_tokenize_str(text))
        return "".join(each for each in text if each not in known and not each.isspace())

    def encode_marked_up(self, text: str) -> Marked | None:
        """See `Tokenizer.encode_marked_up`."""
        encoded = self._markup.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        return Marked(np.array(encoded.ids, np.uint32), offsets)

    @cached_property
    def _markup(self) -> Any:
        opened = self._opened(self._inner.to_str().encode())
        opened.encode_special_tokens = False
        return opened

    def find_special(self, text: str) -> str | None:
        """See `Tokenizer.find_special`."""
        found = self._special.search(text)
        return None if found is None else found[0]

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self._inner.get_added_tokens_decoder().values()
        return re.compile("|".join(re.escape(each.content) for each in added if each.special) or r"(?!)")

    @cached_property
    def _characters(self) -> frozenset[str] | None:
        """The characters that have a token, if the others are dropped; other models raise an error then."""
        model = self._inner.model
        if not isinstance(model, self._package.models.BPE) or model.unk_token or model.byte_fallback:
            return None
        ends = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
        pieces = (each.removeprefix(ends[0]).removesuffix(ends[1]) for each in self._inner.get_vocab())
        known = frozenset(each for each in pieces if len(each) == 1)
        return None if known.issuperset(self._package.pre_tokenizers.ByteLevel.alphabet()) else known


def _renamed(name: str, each: str) -> str:
    return f"{_RENAMED}{each}" if each == name else each


# Other JSON files of models: what they are, and fields by which one tells them.
_OTHER_JSON: Final = (
    ("is Mistral's tekken.json", ("config", "vocab")),
    ("describes a tokenizer (tokenizer_config.json), and is none", ("tokenizer_class",)),
    ("describes a tokenizer (tokenizer_config.json), and is none", ("added_tokens_decoder",)),
    ("describes a model (config.json), and is no tokenizer", ("model_type",)),
    ("names special tokens (special_tokens_map.json), and is no tokenizer", ("eos_token",)),
)


def _no_tokenizer_json(path: Path, content: bytes, reason: Exception) -> UnreadableCorpus:
    """Return the error for JSON that is none: another file of a model, a newer one, a damaged one."""
    what = f"is not a tokenizer.json that can be read: {reason}"
    try:
        found = parse_json(content)
    except ValueError:
        return unreadable(path, what, "was the copy interrupted?")
    if not isinstance(found, dict) or "model" in found:
        return unreadable(path, what, "does a newer release of the package tokenizers read it?")
    if found and all(type(value) is int for value in found.values()):
        what = "is a vocabulary (vocab.json) without its merges"
    else:
        kinds = (kind for kind, names in _OTHER_JSON if all(name in found for name in names))
        what = next(kinds, "is JSON, and no tokenizer.json: it has no field 'model'")
    return unreadable(path, what, instead(path))
