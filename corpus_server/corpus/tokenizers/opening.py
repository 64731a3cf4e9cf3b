"""Tokenizers: bytes, Hugging Face's `tokenizer.json`, tiktoken's rank files, SentencePiece's models.

The kind is recognised by content. The packages that do the work are imported when a file needs them, so that
an installation without them serves tokens all the same.

    bytes             a token is a byte of UTF-8                    (no package)
    tokenizer.json    begins with `{`                               tokenizers
    *.tiktoken        lines of `BASE64 RANK`; Llama 3's too         tiktoken
    *.model           a protocol buffer                             sentencepiece

All of them encode without special tokens and without a prefix: the text alone. A text must be encoded in one
call: many vocabularies begin each call with a space, or join what a cut would divide.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal
from weakref import WeakValueDictionary

import numpy as np
import xxhash

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.layout import LFS_POINTER, TokenDtype
from corpus_server.corpus.tokenizers.huggingface import HuggingFace
from corpus_server.corpus.tokenizers.ranks import Tiktoken, is_rank
from corpus_server.corpus.tokenizers.sentencepiece import SentencePiece
from corpus_server.corpus.tokenizers.tokenizer import (
    FILE_NAMES,
    TokenArray,
    Tokenizer,
    instead,
    tokenizers_in,
)
from corpus_server.corpus_spec import MANIFEST, CorpusSpec
from corpus_server.user_files import is_lfs_pointer, parse_json, read_regular, reason_of


def find_tokenizer(spec: CorpusSpec, dtypes: Iterable[TokenDtype]) -> Path | Literal["bytes"] | None:
    """Return the tokenizer that the user names, else the one beside the shards, else "bytes" for uint8."""
    if spec.tokenizer is not None:
        return {"bytes": "bytes", "none": None}.get(spec.tokenizer, Path(spec.tokenizer))
    folder = spec.path if spec.path.is_dir() else spec.path.parent
    for pattern in FILE_NAMES:
        match sorted(folder.glob(pattern)):
            case [path]:
                return path
            case [one, other, *_]:
                choice = f"say which one: tokenizer={one}, or tokenizer=none"
                raise unreadable(folder, f"holds several tokenizers, {one.name} and {other.name}", choice)
    return "bytes" if all(dtype.name == "uint8" for dtype in dtypes) else None


def identity_of(spec: CorpusSpec, tokenizer: Path | str | None) -> str | None:
    """Return what tells whether two tokenizers are the same: `bytes`, or `xxh3-128=<32 hex>` of the file.

    None where nobody named one: tokens of uint8 are decoded as bytes, but may be ids of anything.
    """
    if isinstance(tokenizer, Path):
        return f"xxh3-128={xxhash.xxh3_128_hexdigest(read_regular(tokenizer))}"
    return spec.tokenizer if spec.tokenizer == "bytes" else None


def built_with(spec: CorpusSpec) -> str | None:
    """Return the identity of the tokenizer that a corpus was built with, as its manifest says."""
    folder = spec.path if spec.path.is_dir() else spec.path.parent
    try:
        tokenizer = parse_json(read_regular(folder / MANIFEST))["tokenizer"]
        found = tokenizer if tokenizer == "bytes" else tokenizer["digest"]
    except (OSError, ValueError, KeyError, TypeError):  # tokens are served without a manifest, too
        return None
    return found if isinstance(found, str) else None


def open_tokenizer(source: Path | str) -> Tokenizer:
    """Return the tokenizer `bytes`, or the one in a file, whose kind its content tells."""
    if source == "bytes":
        return _Bytes()
    path = Path(source)
    if (tokenizer := _OPEN.get(path)) is None:
        tokenizer = _OPEN[path] = _open(path)
    return tokenizer


# Corpora that use the same file share one tokenizer; it goes with the last of them.
_OPEN: Final = WeakValueDictionary[Path, Tokenizer]()


def _open(path: Path) -> Tokenizer:
    try:
        content = read_regular(path)
    except OSError as error:
        what = f"the tokenizer cannot be read: {reason_of(error)}"
        remedy = "check its path, or name a repository of the Hugging Face Hub: gpt2, ORG/NAME"
        raise unreadable(path, what, tokenizers_in(path) or remedy) from error
    content = content.removeprefix(codecs.BOM_UTF8)
    head = content[:64]
    if is_lfs_pointer(head):
        raise unreadable(path, *LFS_POINTER)
    if head.lstrip()[:1] == b"{":
        return HuggingFace(path, content)
    if is_rank(head.partition(b"\n")[0]):
        return Tiktoken(path, content)
    if head[:1] == b"\n":  # field 1 of ModelProto, the pieces
        return SentencePiece(path, content)
    what = "expected a tokenizer, found something else"
    if head.startswith(b"#version"):
        what = "is a list of merges (merges.txt) without their vocabulary"
    raise unreadable(path, what, instead(path))


class _Bytes(Tokenizer):
    vocab_size = 256
    eot_id = None

    def knows(self, token: int) -> bool:
        return 0 <= token < 256

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
