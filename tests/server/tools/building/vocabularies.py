"""Tokenizers of every kind, small, whose end-of-text token some texts reach by its name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.server.corpus.test_tokenizers import write_ranks

PLAIN = [
    "the quick brown fox jumps over the lazy dog, again and again. " * 3,
    "a b c d e f g h i j k l m n o",
]
SAMPLE = [*PLAIN, "hello world </s> <unk> end of text", "Grüße, 世界 12345\n\n\tdef f(x): return x ** 2"] * 20
EOT = "</s>"


def unigram() -> Tokenizer:
    """T5, XLM-R, ALBERT: the end-of-text token is a piece of the model itself."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", EOT, "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def words(kind: Any) -> Tokenizer:
    vocab = {word: number for number, word in enumerate(["[UNK]", EOT, "fox", "dog", "end", "of", "text"])}
    tokenizer = Tokenizer(kind(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(EOT, special=True)])
    return tokenizer


def whole_words() -> Tokenizer:
    """Tekken's flag: a word that is in the vocabulary needs no merges."""
    vocab = {each: number for number, each in enumerate("abcdefghijklmnopqrstuvwxyz </>|_")}
    vocab[EOT] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(EOT, special=True)])
    return tokenizer


def byte_level(*special: str, added: tuple[AddedToken, ...] = (), prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PLAIN * 20, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def merged() -> Tokenizer:
    """An end-of-text token that merges make of any text: nothing can be encoded in its place."""
    vocab = {each: number for number, each in enumerate(["<", "/", "s", ">", "</", "s>", EOT, "f", "o", "x"])}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="x"))


def sentencepiece_model(folder: Path, **options: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
KINDS: dict[str, Callable[[Path], Tokenizer | Path | str]] = {
    "bytes": lambda folder: "bytes",
    "Unigram": lambda folder: unigram(),
    "WordLevel": lambda folder: words(models.WordLevel),
    "WordPiece": lambda folder: words(models.WordPiece),
    "BPE whole words": lambda folder: whole_words(),
    "BPE merged": lambda folder: merged(),
    "BPE special": lambda folder: byte_level(EOT),
    "BPE added": lambda folder: byte_level(added=(AddedToken(EOT, special=False),)),
    "BPE prefix": lambda folder: byte_level(EOT, prefix=True),
    "tiktoken": write_ranks,
    "SentencePiece llama": lambda folder: sentencepiece_model(
        folder, remove_extra_whitespaces=False, **LLAMA
    ),
    "SentencePiece unigram": lambda folder: sentencepiece_model(folder, model_type="unigram"),
}


def write_vocabulary(folder: Path, kind: str) -> str:
    """Write a tokenizer of a kind; return what `--tokenizer` calls it."""
    made = KINDS[kind](folder)
    if isinstance(made, Tokenizer):
        path = folder / "tokenizer.json"
        made.save(str(path))
        return str(path)
    return str(made)


def in_one_call(source: str, text: str) -> list[int]:
    """Return the ids that the kind's own library gives for a text, in one call."""
    path = Path(source)
    if source == "bytes":
        return list(text.encode())
    if path.suffix == ".json":
        library = Tokenizer.from_file(source)
        library.encode_special_tokens = True
        return library.encode(text, add_special_tokens=False).ids
    if ".model" in path.name:
        return sentencepiece.SentencePieceProcessor(model_file=source).encode(text)
    import tiktoken

    from corpus_server.corpus.tokenizers import open_tokenizer

    # The pattern of the vocabulary is not in its file; the library's ranks and pattern are those of ours.
    inner: Any = open_tokenizer(path)
    encoding: tiktoken.Encoding = inner._inner
    return encoding.encode(text, disallowed_special=())


def write_config(folder: Path, **tokens: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


_UNITS = {
    "English": "The quick brown fox, again and again.\n",
    "code": "def f(x):\n    return x ** 2  # twice\n\n",
    "Chinese": "世界你好。今天天气很好。",
    "German": "Grüße aus Köln: Äpfel und Öl.\r\n",
    "digits": "1234567890",
    "spaces": " ",
    "line ends": "\n",
    "tabs": "\t\t x",
    "one letter": "a",
    "emoji": "😀👍🏽",
    "joiners": "\u200d",
    "combining": "e\u0301",
    "punctuation": "^-_=+[]{}",
    "names": "a </s> b <|endoftext|> [UNK] <unk>",
    "base64": "QmFzZTY0IGlzIG5vdCBhIGxhbmd1YWdl/+",
}
TEXTS = {
    name: lambda size, unit=unit: (unit * (size // len(unit) + 1))[:size] for name, unit in _UNITS.items()
}
