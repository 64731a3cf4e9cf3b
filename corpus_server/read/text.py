"""Tokens for people: decoded, and cut at the borders of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.tokenizers import Tokenizer
from corpus_server.described import described
from corpus_server.errors import TextUnavailable

_MAX_TOKENS_OF_CHARACTER = 8  # UTF-8 has 4 bytes; more tokens without an end are no text


def check_available(corpus: Corpus) -> Tokenizer:
    """Return the corpus's tokenizer; raise TextUnavailable if it has none."""
    if corpus.tokenizer is None:
        raise TextUnavailable(
            f"corpus {corpus.name!r} has no tokenizer",
            parameter="format",
            received="text",
            accepted="raw, npy, json",
            remedy="put a tokenizer.json beside its shards, or serve it as NAME=PATH,tokenizer=FILE",
        )
    return corpus.tokenizer


def decode(corpus: Corpus, tokens: Sequence[int]) -> str:
    """Return the text of some tokens; invalid bytes become U+FFFD.

    Raises:
        TextUnavailable: the corpus has no tokenizer, or an id is not in its vocabulary.
    """
    tokenizer = check_available(corpus)
    # Tokenizers drop ids that they do not know, or fail: the text would look right and be wrong.
    if (strange := next((token for token in set(tokens) if not tokenizer.knows(token)), None)) is not None:
        raise TextUnavailable(
            f"corpus {corpus.name!r} holds token {strange}, which its tokenizer ({corpus.tokenizer_name}) "
            "does not know",
            remedy="serve it with the tokenizer that it was made with: NAME=PATH,tokenizer=FILE",
        )
    return tokenizer.decode(tokens)


def decode_known(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str | None:
    """Return the text of tokens; None without a tokenizer, or if it does not know one of them."""
    if tokenizer is None or not all(map(tokenizer.knows, set(tokens))):
        return None
    return tokenizer.decode(tokens)


@described
class Span:
    """Consecutive tokens of one document."""

    start: int
    """First token, corpus-wide."""
    document: int | None
    """Its number; null without a document index."""
    is_eot: bool
    """Whether the span is one end-of-text token."""
    loss_mask: float | None
    """What the loss mask says of its tokens: 0 where they are no targets of training, else 1 or the weight of
    each; null if the request does not ask."""
    tokens: Sequence[int]
    text: str | None
    """Null without a tokenizer, or if it does not know one of the ids."""
    text_ends: Sequence[int] | None = None
    """For each token how many characters of `text` it ends; one that ends inside a character adds none. Null
    without text, and if the request does not ask."""


def mask_of(corpus: Corpus, start: int, stop: int) -> list[float]:
    """Return the loss mask of tokens [start, stop): ones for a shard without a mask."""
    mask: list[float] = []
    for number, first, count in corpus.pieces(np.array([start]), np.array([stop])).places.tolist():
        if (shard := corpus.shards[number].mask) is None:
            mask += [1] * count
        else:
            size = shard.dtype.itemsize
            mask += np.frombuffer(shard.read_data(first * size, count * size), shard.dtype).tolist()
    return mask


def find_text_ends(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Return how many characters of the text each token ends.

    Tokens are decoded together with those before them, since some tokenizers drop the space of a first one.
    """
    ends: list[int] = []
    context = first = end = 0  # tokens [context, first) are decoded again; those before `first` end the text
    for stop in range(1, len(tokens) + 1):
        before = tokenizer.decode(tokens[context:first]) if first else ""
        decoded = tokenizer.decode(tokens[context:stop])
        # A character of several tokens is whole with the last of them; bytes that are no text never are.
        if not decoded.endswith("\ufffd") or stop - first >= _MAX_TOKENS_OF_CHARACTER:
            end = min(len(text), end + max(0, len(decoded) - len(before)))
            context, first = first, stop
        ends.append(end)
    if ends:
        ends[-1] = len(text)
    return ends


def spans(
    corpus: Corpus,
    start: int,
    tokens: Sequence[int],
    mask: Sequence[float] | None = None,
    *,
    with_text_ends: bool = False,
) -> Iterator[Span]:
    """Yield tokens [start, start + len(tokens)) of a corpus as spans.

    A new span begins with each document, at each end-of-text token, if its id is known, and where the loss
    mask changes. Without a document index the end-of-text tokens alone show where documents end.

    Args:
        mask: the loss mask of these tokens; None to leave it out.
    """
    first, stop = start, start + len(tokens)
    while first < stop:
        number = corpus.document_at(first)
        end = stop if number is None else min(corpus.document_range(number)[1], stop)
        ids = tokens[first - start : end - start]
        eots = [n for n, token in enumerate(ids) if token == corpus.eot]
        its = [] if mask is None else mask[first - start : end - start]
        changes = (n for n, (one, other) in enumerate(pairwise(its), 1) if one != other)
        for begin, until in pairwise(sorted({0, len(ids), *eots, *(n + 1 for n in eots), *changes})):
            part = ids[begin:until]
            text, is_eot = decode_known(corpus.tokenizer, part), part[0] == corpus.eot
            ends = None
            if with_text_ends and text is not None and corpus.tokenizer is not None:
                ends = find_text_ends(corpus.tokenizer, part, text)
            yield Span(
                start=first + begin,
                document=number,
                is_eot=is_eot,
                loss_mask=None if mask is None else float(its[begin]),
                tokens=part,
                text=text,
                text_ends=ends,
            )
        first = end
