"""Tokens as text: exact where they are text, replaced or refused where not; cut where documents end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.tokenizers import open_tokenizer
from corpus_server.errors import TextUnavailable
from corpus_server.read.text import Span, decode, decode_known, find_text_ends, spans
from tests.conftest import TEXT, ServedCorpus
from tests.corpora import open_corpus, write_megatron, write_npy
from tests.server.corpus.test_tokenizers import WRITERS


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


TOKENS = [*b"ab", 0, 0, *b"cde", *b"f", 0, *b"gh"]
DOCUMENTS = [TOKENS[:4], TOKENS[4:7], TOKENS[7:9], TOKENS[9:]]


@pytest.fixture
def indexed(tmp_path: Path) -> Iterator[Corpus]:
    """The documents "ab", two ends; "cde"; "f", an end; "gh"."""
    path = write_megatron(tmp_path / "a", DOCUMENTS)
    with open_corpus(path, eot=0, tokenizer="bytes") as corpus:
        yield corpus


def brief(found: Iterator[Span]) -> list[tuple[int, int | None, bool, list[int], str | None]]:
    return [(each.start, each.document, each.is_eot, list(each.tokens), each.text) for each in found]


END = "\0"


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (
            0,
            11,
            [
                *[(0, 0, "ab"), (2, 0, END), (3, 0, END), (4, 1, "cde")],
                *[(7, 2, "f"), (8, 2, END), (9, 3, "gh")],
            ],
        ),
        (1, 6, [(1, 0, "b"), (2, 0, END), (3, 0, END), (4, 1, "cd")]),
        (3, 5, [(3, 0, END), (4, 1, "c")]),
        (5, 8, [(5, 1, "de"), (7, 2, "f")]),
        (8, 9, [(8, 2, END)]),
        (10, 11, [(10, 3, "h")]),
        (4, 4, []),
    ],
)
def test_a_span_begins_with_each_document_and_at_each_end_of_text(
    indexed: Corpus, start: int, stop: int, expected: list[tuple[int, int, str]]
) -> None:
    assert brief(spans(indexed, start, TOKENS[start:stop])) == [
        (first, document, text == END, list(text.encode()), text) for first, document, text in expected
    ]


def test_without_a_document_index_the_ends_of_text_alone_cut(tmp_path: Path) -> None:
    with open_corpus(
        write_npy(tmp_path / "a.npy", TOKENS, dtype="uint8"), eot=0, tokenizer="bytes"
    ) as corpus:
        assert brief(spans(corpus, 1, TOKENS[1:8])) == [
            (1, None, False, [*b"b"], "b"),
            (2, None, True, [0], END),
            (3, None, True, [0], END),
            (4, None, False, [*b"cdef"], "cdef"),
        ]


def test_without_an_end_of_text_token_all_is_one_span(tmp_path: Path) -> None:
    with open_corpus(write_npy(tmp_path / "a.npy", TOKENS, dtype="uint8"), tokenizer="none") as corpus:
        assert brief(spans(corpus, 2, TOKENS[2:9])) == [(2, None, False, TOKENS[2:9], None)]


def test_a_stretch_with_an_unknown_id_has_no_text_and_the_others_have(tmp_path: Path) -> None:
    tokens = [65, 300, 0, 66]
    with open_corpus(write_npy(tmp_path / "a.npy", tokens), eot=0, tokenizer="bytes") as corpus:
        assert [each.text for each in spans(corpus, 0, tokens)] == [None, END, "B"]
        assert decode_known(corpus.tokenizer, [65, 66]) == "AB"
        assert decode_known(corpus.tokenizer, [65, 300]) is None
        assert decode_known(corpus.tokenizer, []) == ""
    assert decode_known(None, [65]) is None


@pytest.mark.parametrize("kind", sorted(WRITERS))
@pytest.mark.parametrize(
    "text", ["the quick brown fox", " the  fox\n\nthe", "caf\u00e9 \u4e16\u754c \U0001f986!", "\U0001f986"]
)
def test_the_text_of_each_token_has_its_end(tmp_path: Path, kind: str, text: str) -> None:
    """What the tokens before a place give, decoded alone, is the text before its end."""
    tokenizer = open_tokenizer(WRITERS[kind](tmp_path))
    (ids,) = tokenizer.encode_batch([text])
    tokens = ids.tolist()
    decoded = tokenizer.decode(tokens)
    ends = find_text_ends(tokenizer, tokens, decoded)
    assert len(ends) == len(tokens)
    assert ends == sorted(ends)
    for number, end in enumerate(ends, 1):
        alone = tokenizer.decode(tokens[:number])
        if not alone.endswith("\ufffd"):
            assert decoded[:end] == alone


def test_bytes_that_are_no_text_end_somewhere(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("bytes")
    for tokens in ([0xFF] * 50, [65, 0xE4, 0xB8], [0xE4, 0xB8, 65], [0x80, 65, 0x80], []):
        text = tokenizer.decode(tokens)
        ends = find_text_ends(tokenizer, tokens, text)
        assert ends == sorted(ends)
        assert (ends[-1] if ends else 0) == len(text)
