"""Tokens for people: cut at the borders of documents, each stretch decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.tokenizers import Tokenizer
from corpus_server.described import described


@described
class Span:
    """Consecutive tokens of one document."""

    start: int
    """First token, corpus-wide."""
    document: int | None
    """Its number; null without a document index."""
    is_eot: bool
    """Whether the span is one end-of-text token."""
    tokens: Sequence[int]
    text: str | None
    """Null without a tokenizer, or if it does not know one of the ids."""


def spans(corpus: Corpus, start: int, tokens: Sequence[int]) -> Iterator[Span]:
    """Yield tokens [start, start + len(tokens)) of a corpus as spans.

    A new span begins with each document, and at each end-of-text token, if its id is known. Without a
    document index the end-of-text tokens alone show where documents end.

    Raises:
        CorpusChanged, ReadFailed: of the document index.
    """
    stop = start + len(tokens)
    for number, first, end in _documents(corpus, start, stop):
        ids = tokens[first - start : end - start]
        eots = [n for n, token in enumerate(ids) if token == corpus.eot]
        borders = sorted({0, len(ids), *eots, *(n + 1 for n in eots)})
        for begin, until in pairwise(borders):
            part = ids[begin:until]
            is_eot = part[0] == corpus.eot
            text = decode_known(corpus.tokenizer, part)
            yield Span(start=first + begin, document=number, is_eot=is_eot, tokens=part, text=text)


def decode_known(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str | None:
    """Return the text of tokens; None without a tokenizer, or if it does not know one of them."""
    if tokenizer is None or not all(map(tokenizer.knows, set(tokens))):
        return None
    return tokenizer.decode(tokens)


def _documents(corpus: Corpus, start: int, stop: int) -> Iterator[tuple[int | None, int, int]]:
    """Yield the documents of tokens [start, stop): number, and the tokens of it that lie inside."""
    while start < stop:
        number = corpus.document_at(start)
        end = stop if number is None else min(corpus.document_range(number)[1], stop)
        yield number, start, end
        start = end
