"""A look at a corpus through a sample: frequencies of tokens, lengths of documents, places of a text."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from corpus_server.admission.request import RequestHead
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.tokenizers import Tokenizer
from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.plan.document import MAX_SEED
from corpus_server.read.text import check_available, decode_known
from corpus_server.responses.forms import share_of
from corpus_server.responses.question import CorpusName, QueryParameters, Token, integer, question
from corpus_server.responses.questions.ranges import are_here, read
from corpus_server.responses.response import NO_STORE, Response, json_response
from corpus_server.responses.service import Service
from corpus_server.work import Budget

BLOCK_TOKENS = 4096
"""Tokens of a block of a sample, read at once. Blocks are spread evenly over the corpus."""

STATISTICS_BLOCKS = 64
"""Blocks whose tokens are counted: 262,144 tokens."""

SEARCH_BLOCKS = 256
"""Blocks that are searched: 1,048,576 tokens, about a second of decoding."""

SAMPLE_DOCUMENTS = 2048
"""Documents whose length is read: two entries of the index for each."""

TOP_TOKENS = 50

_WHOLE_SECONDS: Final = 2.0
"""Of processor time, for one response of a search of all: a few million tokens. Whoever waits sees how far
it has come, and a response is never lost because there is too much to search."""

_CONTEXT = 80  # characters on each side of a text that was found


class StatisticsQuery(QueryParameters):
    """Parameters of a corpus's statistics."""

    seed: Annotated[int, integer(0, MAX_SEED)] = 0
    """Decides which blocks and documents are sampled."""


class SearchQuery(StatisticsQuery):
    """Parameters of a search."""

    text: Annotated[str, Field(min_length=1, max_length=1000)]
    """What to find, case and white space included."""
    limit: Annotated[int, integer(1, 100)] = 20
    """Places to return at most."""
    whole: Literal["true", "false"] = "false"
    """`true`: search all tokens from `start` on, seconds of it in each response; `next_start` goes on."""
    start: Token = 0
    """With `whole`: first token to search."""


@described
class TopToken:
    """One of the most frequent tokens of a sample."""

    token: int
    count: int
    text: str | None


@described
class Lengths:
    """Lengths of sampled documents, in tokens."""

    num_sampled: int
    mean: float | None
    quantiles: dict[str, int]
    """Share of the documents -> length."""
    histogram: list[tuple[int, int]]
    """`[least, number]`: documents of [least, 2 least) tokens."""


@described
class Statistics:
    """What a sample of a corpus is made of."""

    corpus: str
    num_tokens: int
    num_sampled_tokens: int
    num_distinct_tokens: int
    top_tokens: list[TopToken]
    counts_by_rank: list[tuple[int, int]]
    """`[k, count]`: how often the k-th most frequent token occurs."""
    num_documents: int | None
    document_lengths: Lengths | None


@described
class Place:
    """One place of a text."""

    token: int
    """The token that it begins in, corpus-wide."""
    base_token: int
    """The same token as `/v1/lookup` counts it: of a view, in its corpus."""
    document: int | None
    before: str
    text: str
    after: str


@described
class Search:
    """Where a text is in a sample of a corpus, in all of a small one, or from a token on."""

    searched: str
    """How much was searched, for people: `1,048,576 of 6,538,948 tokens (16 %)`."""
    complete: bool
    """Whether `found` has every place from `start` on: all tokens were searched, and `limit` ended nothing
    early."""
    next_start: int | None
    """With `whole`: what to ask for next, as `start`; null at the end of the corpus."""
    corpus: str
    text: str
    num_tokens: int
    num_searched_tokens: int
    found: list[Place]


@question("/v1/corpora/{name}/statistics", Statistics)
def statistics(
    service: Service, name: CorpusName, query: StatisticsQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return frequencies of tokens and lengths of documents in a sample."""
    corpus = service.corpus(name, request.caller)
    ids: list[NDArray[np.integer]] = []
    for _, tokens in _blocks(service, corpus, _sampled_starts(corpus, query.seed, STATISTICS_BLOCKS)):
        ids.append(tokens)
        budget.spend(num_bytes=tokens.nbytes)
    found, counts = np.unique(np.concatenate(ids) if ids else np.empty(0, np.int64), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    top = [
        TopToken(token=token, count=number, text=decode_known(corpus.tokenizer, [token]))
        for token, number in zip(found[order[:TOP_TOKENS]].tolist(), counts[order].tolist(), strict=False)
    ]
    lengths = _document_lengths(corpus, query.seed, budget)
    fields = Statistics(
        corpus=corpus.name,
        num_tokens=corpus.num_tokens,
        num_sampled_tokens=int(counts.sum()),
        num_distinct_tokens=int(found.size),
        top_tokens=top,
        # How often the k-th most frequent token occurs, for k = 1, 2, 4, 8, ...
        counts_by_rank=[(1 << k, int(counts[order[(1 << k) - 1]])) for k in range(found.size.bit_length())],
        num_documents=corpus.num_documents,
        document_lengths=lengths,
    )
    return json_response(fields, NO_STORE, budget)


@question("/v1/corpora/{name}/search", Search)
def search(
    service: Service, name: CorpusName, query: SearchQuery, request: RequestHead, budget: Budget
) -> Response:
    """Find a text in a sample of about a million tokens, in all of a small corpus, or from a token on."""
    corpus = service.corpus(name, request.caller)
    tokenizer = check_available(corpus)
    found: list[Place] = []
    num_searched, is_cut, next_start = 0, False, None
    is_whole, began = query.whole == "true", time.thread_time()
    if query.start and not is_whole:
        raise InvalidParameter.expected("start", "left out without whole=true", query.start)
    if query.start > corpus.num_tokens:
        raise InvalidParameter.expected("start", f"in [0, {corpus.num_tokens}]", query.start)
    # A text that begins in a block may end behind it; a token is at least one byte of it.
    more = len(query.text.encode())
    starts: Sequence[int] = range(query.start, corpus.num_tokens, BLOCK_TOKENS)
    if not is_whole:
        starts = _sampled_starts(corpus, query.seed, SEARCH_BLOCKS)
    for start, tokens in _blocks(service, corpus, starts, more=more):
        ids = tokens.tolist()
        budget.spend(num_bytes=tokens.nbytes)
        if is_whole and time.thread_time() - began > _WHOLE_SECONDS:
            next_start = start
            break
        if (text := decode_known(tokenizer, ids)) is None:  # ids that the tokenizer does not know
            continue
        num_searched += min(len(ids), BLOCK_TOKENS)
        at = text.find(query.text)
        while at >= 0:
            first = _token_at(tokenizer, ids, at)
            # A search of all goes on behind the last token that it named, which may hold the text twice.
            is_same = is_whole and found and found[-1].token == start + first
            if first >= BLOCK_TOKENS or (len(found) >= query.limit and not is_same):
                break
            end = at + len(query.text)
            found.append(
                Place(
                    token=start + first,
                    base_token=corpus.base_token(start + first),
                    document=corpus.document_at(start + first),
                    before=text[max(0, at - _CONTEXT) : at],
                    text=text[at:end],
                    after=text[end : end + _CONTEXT],
                )
            )
            at = text.find(query.text, end)
            budget.spend()
        if is_cut := len(found) >= query.limit:
            next_start = found[-1].token + 1 if is_whole else None
            break
    fields = Search(
        searched=share_of(num_searched, corpus.num_tokens, "tokens"),
        complete=num_searched == corpus.num_tokens - query.start and not is_cut,
        next_start=next_start,
        corpus=corpus.name,
        text=query.text,
        num_tokens=corpus.num_tokens,
        num_searched_tokens=num_searched,
        found=found,
    )
    return json_response(fields, NO_STORE, budget)


def _token_at(tokenizer: Tokenizer, tokens: Sequence[int], at: int) -> int:
    """Return which token holds character `at` of their text: the first that decodes to more than `at`.

    The text of the first tokens is the beginning of the text of all, so this may be bisected.
    """
    return bisect_right(range(len(tokens)), at, key=lambda n: len(tokenizer.decode(tokens[: n + 1])))


def _sampled_starts(corpus: Corpus, seed: int, num_blocks: int) -> Sequence[int]:
    """Return where blocks begin: all of a small corpus, else one somewhere in each of `num_blocks` parts."""
    if corpus.num_tokens <= num_blocks * BLOCK_TOKENS:
        return range(0, corpus.num_tokens, BLOCK_TOKENS)
    part = corpus.num_tokens // num_blocks
    within = np.random.default_rng(seed).integers(0, part - BLOCK_TOKENS + 1, num_blocks)
    starts: list[int] = (np.arange(num_blocks) * part + within).tolist()
    return starts


def _blocks(
    service: Service, corpus: Corpus, starts: Sequence[int], more: int = 0
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield blocks of a corpus, each with its first token.

    Shards that are not on this machine are left out: a look at a corpus should not fetch it. Each block comes
    with the `more` tokens behind it.
    """
    for start in starts:
        stop = min(start + BLOCK_TOKENS + more, corpus.num_tokens)
        if are_here(service, corpus, start, stop):
            yield start, read(service, corpus, start, stop)


def _document_lengths(corpus: Corpus, seed: int, budget: Budget) -> Lengths | None:
    """Return quantiles and a histogram of the lengths of sampled documents; None without an index."""
    total = corpus.num_documents
    if total is None:
        return None
    numbers: Sequence[int] = range(total)
    if total > SAMPLE_DOCUMENTS:
        numbers = np.random.default_rng(seed).integers(0, total, SAMPLE_DOCUMENTS).tolist()
    found = []
    for number in numbers:
        start, stop = corpus.document_range(number)
        found.append(stop - start)
        budget.spend()
    if not found:
        return Lengths(num_sampled=0, mean=None, quantiles={}, histogram=[])
    lengths = np.array(found, dtype=np.int64)
    bins = np.bincount(np.frexp(np.maximum(lengths, 0.5))[1])  # 0: empty; k: [2^(k-1), 2^k)
    shares = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
    quantiles = np.quantile(lengths, shares, method="inverted_cdf").tolist()
    return Lengths(
        num_sampled=lengths.size,
        mean=float(lengths.mean()),
        quantiles={str(share): value for share, value in zip(shares, quantiles, strict=True)},
        histogram=[((1 << k) >> 1, int(number)) for k, number in enumerate(bins.tolist())],
    )
