"""Rank files of tiktoken, Llama 3's too, by the package `tiktoken`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.tokenizers.tokenizer import EOT_TEXTS, TokenArray, Tokenizer, package, reading


class _Ranks(NamedTuple):
    """What a rank file does not say: how text is split before it is merged, and the special tokens."""

    name: str
    pattern: str
    special: dict[str, int]


# The patterns and ids are those of tiktoken's openai_public.py, Llama 3's and Qwen's tokenization code.
_GPT2: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_GPT4: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FIM: Final = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_LLAMA: Final = ("<|begin_of_text|>", "<|end_of_text|>")

# By the number of ranks: it tells the known vocabularies apart, whatever their files are called.
_KNOWN_RANKS: Final = {
    50256: _Ranks("gpt2 (r50k_base)", _GPT2, {"<|endoftext|>": 50256}),
    50280: _Ranks("p50k_base", _GPT2, {"<|endoftext|>": 50256}),
    100256: _Ranks("cl100k_base", _GPT4, {"<|endoftext|>": 100257, **_FIM, "<|endofprompt|>": 100276}),
    128000: _Ranks("llama3", _GPT4, {text: 128000 + i for i, text in enumerate(_LLAMA)}),
    151643: _Ranks("qwen", _GPT4.replace("{1,3}", ""), {"<|endoftext|>": 151643}),
    199998: _Ranks("o200k_base", _GPT4O, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}


class Tiktoken(Tokenizer):
    """A rank file."""

    def __init__(self, path: Path, content: bytes) -> None:
        tiktoken = package("tiktoken", path)
        with reading(path, "tiktoken rank file"):
            lines = (line.split() for line in content.splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        known = _KNOWN_RANKS.get(len(ranks))
        if known is None:
            choices = ", ".join(f"{each.name} {number:,}" for number, each in _KNOWN_RANKS.items())
            raise unreadable(
                path,
                f"holds {len(ranks):,} ranks, which no known vocabulary has (known: {choices})",
                "copy it again, or make a tokenizer.json of it: a rank file does not say how text is split",
            )
        self._inner: Any = tiktoken.Encoding(
            known.name, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens=known.special
        )
        self.vocab_size = self._inner.n_vocab
        self.eot_id = next(known.special[text] for text in EOT_TEXTS if text in known.special)

    def knows(self, token: int) -> bool:
        """See `Tokenizer.knows`."""
        try:
            self._inner.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return False
        return True

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._inner.decode(list(tokens))
        return text

    def bytes_of(self, token: int) -> bytes:
        """See `Tokenizer.bytes_of`."""
        found: bytes = self._inner.decode_single_token_bytes(token)
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """See `Tokenizer.encode_batch`."""
        return [self._inner.encode_to_numpy(text, disallowed_special=()) for text in texts]


def is_rank(line: bytes) -> bool:
    """Tell whether a line is one of a rank file."""
    token, _, rank = line.rstrip().partition(b" ")
    try:
        return bool(base64.b64decode(token, validate=True)) and rank.isdigit()
    except binascii.Error:
        return False
