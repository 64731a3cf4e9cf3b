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

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
import xxhash

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.layout import LFS_POINTER, TokenDtype
from corpus_server.corpus_spec import MANIFEST, CorpusSpec
from corpus_server.errors import UnreadableCorpus
from corpus_server.extras import optional_package
from corpus_server.user_files import is_lfs_pointer, parse_json, read_regular, reason_of

TokenArray = np.ndarray[tuple[int], np.dtype[np.uint32]]

FILE_NAMES: Final = ("tokenizer.json", "*.tiktoken", "tokenizer.model")
"""Patterns of the names under which a tokenizer is found beside shards."""

# Texts that mark the end of a document in the vocabularies of GPT-2 and its successors, Llama 3, Llama and
# Mistral, Gemma, DeepSeek, BERT's successors.
_EOT_TEXTS: Final = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<|eos|>", "[EOS]"),
)
_NAMES_TOKENS: Final = ("tokenizer_config.json", "special_tokens_map.json")
CHAT_TEMPLATE: Final = "chat_template.jinja"
BESIDE: Final = (*_NAMES_TOKENS, CHAT_TEMPLATE)
"""Files that `save_pretrained` of transformers writes beside a tokenizer, and that `build` reads."""

_RENAMED: Final = "\ufdd0"  # Unicode's promise: never a character, so no text has a name that begins with it


class Marked(NamedTuple):
    """Tokens and where they come from."""

    ids: TokenArray
    offsets: np.ndarray[tuple[int, int], np.dtype[np.int64]]  # first character of each, and behind its last


class Tokenizer(Protocol):
    """What every kind of tokenizer does."""

    vocab_size: int  # one more than its highest id; the vocabulary may have holes, see `knows`

    @property
    def eot_id(self) -> int | None:
        """Id of the end-of-text token; None if the file has none under a usual name."""

    def knows(self, token: int) -> bool:
        """Tell whether an id is in the vocabulary."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids that the tokenizer `knows`; bytes that are no UTF-8 become U+FFFD.

        Special tokens appear as their names.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the ids of each text: `(num_tokens,) uint32`. Names of special tokens count as plain text.

        Some vocabularies reach a special token from its name all the same, see `encode_without`. The texts
        must be valid Unicode: without lone surrogates. Uses one thread, except that a tokenizer.json uses as
        many as `TOKENIZERS_PARALLELISM` and `RAYON_NUM_THREADS` allow.
        """

    def encode_without(self, text: str, token: int) -> TokenArray | None:
        """Return the ids of a text as if `token` had another name, which no text holds; None if it cannot."""

    def dropped(self, text: str) -> str:
        """Return the characters of a text, but for white space, that are in none of its tokens."""

    def encode_marked_up(self, text: str) -> Marked | None:
        """Return the tokens of a text in which the names of special tokens are those tokens, as in a chat.

        None for kinds that do not say which characters a token is made of.
        """

    def find_special(self, text: str) -> str | None:
        """Return the name of a special token that is in a text; None if there is none."""


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
        raise unreadable(path, what, _tokenizers_in(path) or remedy) from error
    content = content.removeprefix(codecs.BOM_UTF8)
    head = content[:64]
    if is_lfs_pointer(head):
        raise unreadable(path, *LFS_POINTER)
    if head.lstrip()[:1] == b"{":
        return _HuggingFace(path, content)
    if _is_rank(head.partition(b"\n")[0]):
        return _Tiktoken(path, content)
    if head[:1] == b"\n":  # field 1 of ModelProto, the pieces
        return _SentencePiece(path, content)
    what = "expected a tokenizer, found something else"
    if head.startswith(b"#version"):
        what = "is a list of merges (merges.txt) without their vocabulary"
    raise unreadable(path, what, _instead(path))


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
    return unreadable(path, what, _instead(path))


def _instead(path: Path) -> str:
    """Return what to give instead of a file that is no tokenizer."""
    return _tokenizers_in(path.parent, path) or (
        "give `bytes`, a tokenizer.json, a tiktoken rank file or a SentencePiece model; transformers writes "
        "the tokenizer.json of a model: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
    )


def _tokenizers_in(folder: Path, but: Path | None = None) -> str | None:
    found = sorted({str(path) for pattern in FILE_NAMES for path in folder.glob(pattern)} - {str(but)})
    return f"give {' or '.join(found)}" if found else None


class _Defaults:
    """For kinds whose special tokens no text reaches, and that hold every character in a token."""

    def encode_without(self, text: str, token: int) -> TokenArray | None:
        return None

    def dropped(self, text: str) -> str:
        return ""

    def encode_marked_up(self, text: str) -> Marked | None:
        return None

    def find_special(self, text: str) -> str | None:
        return None


class _Bytes(_Defaults):
    vocab_size = 256
    eot_id: int | None = None

    def knows(self, token: int) -> bool:
        return 0 <= token < 256

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


class _HuggingFace:
    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._package = path, _package("tokenizers", path)
        try:
            self._inner = self._opened(content)
        except Exception as error:  # `tokenizers` raises no narrower one
            raise _no_tokenizer_json(path, content, error) from error
        self.vocab_size: int = 1 + max(self._inner.get_vocab().values(), default=-1)

    def _opened(self, content: bytes) -> Any:
        opened = self._package.Tokenizer.from_buffer(content)
        opened.no_truncation()  # files of fine-tuned models cut at their context length
        opened.no_padding()
        opened.encode_special_tokens = True  # as plain text: a document must not end by its own words
        return opened

    @cached_property
    def eot_id(self) -> int | None:
        """Take a special token before a plain one of the same use, which a vocabulary may have left over."""
        special = {each.content for each in self._inner.get_added_tokens_decoder().values() if each.special}
        names = [text for text in _EOT_TEXTS if text in special]
        beside = (eot_beside(self._path) or ("",))[0]
        if beside in names or not names:
            names.insert(0, beside)
        ids = (self._inner.token_to_id(text) for text in (*names, *_EOT_TEXTS))
        return next((token for token in ids if token is not None), None)

    def knows(self, token: int) -> bool:
        return token >= 0 and self._inner.id_to_token(token) is not None

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode(list(tokens), skip_special_tokens=False)
        return text

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in encoded]

    def encode_without(self, text: str, token: int) -> TokenArray | None:
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
        if (known := self._characters) is None:
            return ""
        # Not by the offsets of tokens: behind a character that was dropped they are wrong.
        if (normalizer := self._inner.normalizer) is not None:
            text = normalizer.normalize_str(text)
        if (pre_tokenizer := self._inner.pre_tokenizer) is not None:
            text = "".join(word for word, _ in pre_tokenizer.pre_tokenize_str(text))
        return "".join(each for each in text if each not in known and not each.isspace())

    def encode_marked_up(self, text: str) -> Marked | None:
        encoded = self._markup.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        return Marked(np.array(encoded.ids, np.uint32), offsets)

    @cached_property
    def _markup(self) -> Any:
        opened = self._opened(self._inner.to_str().encode())
        opened.encode_special_tokens = False
        return opened

    def find_special(self, text: str) -> str | None:
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


class _Tiktoken(_Defaults):
    def __init__(self, path: Path, content: bytes) -> None:
        package = _package("tiktoken", path)
        with _reading(path, "tiktoken rank file"):
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
        self._inner: Any = package.Encoding(
            known.name, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens=known.special
        )
        self.vocab_size: int = self._inner.n_vocab
        self.eot_id: int | None = next(known.special[text] for text in _EOT_TEXTS if text in known.special)

    def knows(self, token: int) -> bool:
        try:
            self._inner.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return False
        return True

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode(list(tokens))
        return text

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        return [self._inner.encode_to_numpy(text, disallowed_special=()) for text in texts]


class _SentencePiece(_Defaults):
    def __init__(self, path: Path, content: bytes) -> None:
        package = _package("sentencepiece", path)
        with _reading(path, "SentencePiece model"):
            self._inner: Any = package.SentencePieceProcessor(model_proto=content)
        self.vocab_size: int = self._inner.vocab_size()
        eot = self._inner.eos_id()
        self.eot_id: int | None = eot if eot >= 0 else None

    def knows(self, token: int) -> bool:
        return 0 <= token < self.vocab_size

    def decode(self, tokens: Sequence[int]) -> str:
        # The package leaves control tokens out; here they separate runs, and their names are shown.
        text, run = "", list[int]()
        for token in tokens:
            if self._inner.is_control(token):
                text += self._inner.decode(run) + self._inner.id_to_piece(token)
                run = []
            else:
                run.append(token)
        return text + str(self._inner.decode(run))

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        encoded = self._inner.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(each, np.uint32) for each in encoded]


def _is_rank(line: bytes) -> bool:
    token, _, rank = line.rstrip().partition(b" ")
    try:
        return bool(base64.b64decode(token, validate=True)) and rank.isdigit()
    except binascii.Error:
        return False


def _package(name: str, path: Path) -> Any:
    return optional_package(name, extra="text", purpose=f"the tokenizer {path}")


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """Report whatever a package, or Python, says of a damaged file."""
    try:
        yield
    except Exception as error:  # packages raise no narrower one
        what = f"is not a {kind} that can be read: {error}"
        raise unreadable(path, what, "was the copy interrupted?") from error
