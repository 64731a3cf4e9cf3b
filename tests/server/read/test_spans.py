"""Tokens for people: a span for each stretch of a document, and for each end of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from corpus_server.corpus.corpus import Corpus
from corpus_server.read.text import Span, decode_known, spans
from tests.corpora import open_corpus, write_megatron, write_npy

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
