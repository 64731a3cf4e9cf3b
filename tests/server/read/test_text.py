"""Tokens as text: exact where they are text, replaced where not, refused where no one can know."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus_server.errors import TextUnavailable
from corpus_server.read.text import decode
from tests.conftest import TEXT, ServedCorpus
from tests.corpora import open_corpus, write_npy


def test_bytes_and_a_tokenizer_give_the_text_back(corpora: dict[str, ServedCorpus]) -> None:
    for name in ("text", "words"):
        with open_corpus(corpora[name].path, name=name) as corpus:
            assert decode(corpus, corpora[name].tokens.tolist()) == TEXT


def test_cut_characters_are_replaced(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "a.npy", list("größe".encode()), dtype="uint8")
    with open_corpus(path, name="a") as corpus:
        assert decode(corpus, corpus.shards[0].tokens[:3].tolist()) == "gr\N{REPLACEMENT CHARACTER}"
        assert decode(corpus, []) == ""


def test_a_corpus_without_a_tokenizer_says_what_to_do(corpora: dict[str, ServedCorpus]) -> None:
    with (
        open_corpus(corpora["web"].path, name="web") as corpus,
        pytest.raises(TextUnavailable) as caught,
    ):
        decode(corpus, [1])
    error = caught.value
    assert (error.detail, error.parameter, error.received, error.accepted, error.remedy) == (
        "corpus 'web' has no tokenizer",
        "format",
        "text",
        "raw, npy, json",
        "put a tokenizer.json beside its shards, or serve it as NAME=PATH,tokenizer=FILE",
    )


@pytest.mark.parametrize(("tokens", "bad"), [([65, 256], 256), ([-1, 65], -1)])
def test_what_is_no_byte_is_named(tmp_path: Path, tokens: list[int], bad: int) -> None:
    path = write_npy(tmp_path / "a.npy", tokens, dtype="int32")
    with (
        open_corpus(path, name="a", tokenizer="bytes") as corpus,
        pytest.raises(TextUnavailable) as caught,
    ):
        decode(corpus, tokens)
    assert caught.value.detail == (
        f"corpus 'a' holds token {bad}, which its tokenizer ({corpus.tokenizer_name}) does not know"
    )
    assert caught.value.remedy == (
        "serve it with the tokenizer that it was made with: NAME=PATH,tokenizer=FILE"
    )


@pytest.mark.parametrize("token", [60_000, -1, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_named(
    corpora: dict[str, ServedCorpus], tmp_path: Path, token: int
) -> None:
    """Leaving it out would show a text that the corpus does not hold."""
    tokenizer = str(corpora["words"].path / "tokenizer.json")
    path = write_npy(tmp_path / "a.npy", [1], dtype="int32")
    with (
        open_corpus(path, name="a", tokenizer=tokenizer) as corpus,
        pytest.raises(
            TextUnavailable, match=f"holds token {token}, which its tokenizer .tokenizer.json. does not know"
        ),
    ):
        decode(corpus, [5, token, 5])
