"""What people look at: rows as text, what a corpus is made of, where a text is. In slices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from corpus_server.admission.request import RequestHead
from corpus_server.answers.documents import Found, find_metadata, named, naming_columns
from corpus_server.answers.question import CorpusName, PlanId, question
from corpus_server.answers.questions import TOKENS
from corpus_server.answers.response import (
    NO_STORE,
    PLAN_HEADER,
    Response,
    Slices,
    json_response,
    not_modified,
)
from corpus_server.answers.service import Service
from corpus_server.answers.tokens import (
    MAX_WORLD_SIZE,
    FormatQuery,
    Integer,
    QueryParameters,
    Step,
    Token,
    TokensQuery,
    choose_format,
    plan_headers,
    staged_rows,
    token_range,
)
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.tokenizers import Tokenizer
from corpus_server.corpus.views import View
from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.plan.document import MAX_SEED
from corpus_server.plan.questions.diff import FieldChange, RowComparison, changed_fields, compare_slices
from corpus_server.plan.questions.totals import RowTotals, total_slices
from corpus_server.plan.stage import MAX_GLOBAL_BATCH_SIZE, MAX_STEP
from corpus_server.read.changes import ViewChange, max_rows, view_changes
from corpus_server.read.reading import RangeReading, WindowReading, read_arrays
from corpus_server.read.text import Span, check_available, decode_known
from corpus_server.read.text import spans as cut

DocumentNumber = Annotated[str, Field(pattern="^[0-9]{1,19}$")]

DEFAULT_COUNT = 256
"""Tokens of a range whose length is not given."""

BLOCK_TOKENS = 4096
"""Tokens of a block of a sample, read at once. Blocks are spread evenly over the corpus."""

STATISTICS_BLOCKS = 64
"""Blocks whose tokens are counted: 262,144 tokens."""

SEARCH_BLOCKS = 256
"""Blocks that are searched: 1,048,576 tokens, about a second of decoding."""

SAMPLE_DOCUMENTS = 2048
"""Documents whose length is read: two entries of the index for each."""

TOP_TOKENS = 50

NAMED_DOCUMENTS = 1024
"""A response names the documents of rows until there are so many: each costs up to a few milliseconds."""

DIFF_ROWS = 1 << 21
"""Rows of each plan that are compared at most: about a second."""

_CONTEXT = 80  # characters on each side of a text that was found


class RowsQuery(QueryParameters):
    """Parameters of the rows of a step."""

    step: Step
    """Training step."""
    first: Annotated[int, Integer(0, MAX_GLOBAL_BATCH_SIZE)] = 0
    """First row of the global batch."""
    world_size: Annotated[int, Integer(1, MAX_WORLD_SIZE)] = 1
    """Where a plan balances ranks: `first` counts the rows of so many ranks, one rank after another."""
    count: Annotated[int, Integer(1, 4096)] = 8
    """Rows."""
    metadata: Literal["names", "all"] = "names"
    """Columns of each document's metadata: those that name it, or all."""


class DocumentQuery(FormatQuery):
    """Parameters of a document."""

    base: Literal["true", "false"] = "false"
    """`true`: of a view, the number is that of its corpus, and the first copy is meant."""


class SpansQuery(QueryParameters):
    """Parameters of a range of tokens as text."""

    start: Token = 0
    """First token, corpus-wide."""
    count: Annotated[int, Integer(1, 2**20)] = 1024
    """Tokens; fewer where the corpus ends."""


class StatisticsQuery(QueryParameters):
    """Parameters of a corpus's statistics."""

    seed: Annotated[int, Integer(0, MAX_SEED)] = 0
    """Decides which blocks and documents are sampled."""


class SearchQuery(StatisticsQuery):
    """Parameters of a search."""

    text: Annotated[str, Field(min_length=1, max_length=1000)]
    """What to find, case and white space included."""
    limit: Annotated[int, Integer(1, 100)] = 20
    """Places to return at most."""


class DiffQuery(QueryParameters):
    """Parameters of a comparison of two plans."""

    other: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Id of the plan to compare with."""
    steps: Annotated[int, Integer(1, 100)] = 10
    """Steps that differ to return at most."""
    until: Annotated[int, Integer(1, MAX_STEP)] | None = None
    """Count rows that differ before this step; by default until each source that differs was shown once."""


@described
class NamedDocument:
    """A document that a row holds tokens of."""

    document: int
    """Its number in the corpus of the row."""
    id: Any
    """Column `id` of its metadata."""
    source: Any
    """Column `source` of its metadata; without one `url`, else `file_path`."""
    metadata: dict[str, Any] | None
    """All columns, if the request asks for them."""


@described
class Row:
    """One row of a global batch; of a view, tokens and documents have the numbers of its corpus."""

    row: int
    corpus: str
    shard: str
    start: int
    """First token, corpus-wide."""
    spans: list[Span]
    unused: int
    """Tokens at the end of the row that belong to no document."""
    documents: list[NamedDocument] | None
    """Where its documents came from; none without metadata. Null if the rows before name 1,024."""


@described
class Rows:
    """Rows of a step as text."""

    plan: str
    step: int
    plan_step: int
    global_batch_size: int
    first: int
    rows: list[Row]
    problems: list[str]
    """Why the metadata of a corpus is not shown."""


@described
class Spans:
    """A range of tokens as text."""

    corpus: str
    start: int
    stop: int
    num_tokens: int
    """Tokens of the corpus."""
    spans: list[Span]


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
    document: int | None
    before: str
    text: str
    after: str


@described
class Search:
    """Where a text is in a sample of a corpus, or in all of a small one."""

    corpus: str
    text: str
    num_tokens: int
    num_searched_tokens: int
    found: list[Place]


@described
class Diff:
    """What differs between two plans."""

    a: str
    b: str
    fields: list[FieldChange]
    rows: RowComparison
    totals: RowTotals | None
    """How many rows differ in all; null unless rows of both plans come from sources in the same order."""
    views: list[ViewChange]
    """Of sources that are views of one corpus, the documents that come more or less often."""


@question("/v1/corpora/{name}/tokens", array=TOKENS, is_tagged=True)
def tokens(service: Service, name: CorpusName, query: TokensQuery, request: RequestHead) -> Slices[Response]:
    """Return a raw range of tokens, corpus-wide, across the borders of shards."""
    corpus, start = service.corpus(name, request.caller), query.start
    count = min(DEFAULT_COUNT, max(0, corpus.num_tokens - start)) if query.count is None else query.count
    return token_range(service, corpus, start, start + count, query, request, default="raw", fields={})


@question("/v1/corpora/{name}/documents/{number}", array=TOKENS, is_tagged=True)
def document(
    service: Service, name: CorpusName, number: DocumentNumber, query: DocumentQuery, request: RequestHead
) -> Slices[Response]:
    """Return one document: its token range, its tokens and, if the corpus has any, its metadata.

    Of a view, `base_document` is its corpus's own number. Long values of the metadata are cut. If the
    metadata cannot be read, `metadata_problem` says why.
    """
    corpus, own = service.corpus(name, request.caller), int(number)
    if isinstance(corpus, View) and query.base == "true":
        own = corpus.own_document(own)
    fields: dict[str, Any] = {"document": own}
    if isinstance(corpus, View):
        fields["base_document"] = corpus.base_document(own)
    start, stop = corpus.document_range(own)
    tag = ""
    if corpus.metadata_paths and choose_format(request, query, "json") == "json":
        own = fields.get("base_document", own)
        found = yield from find_metadata(corpus, [own])
        fields |= {"metadata": found.rows.get(own), "metadata_problem": found.problem}
        tag = found.tag
    more = token_range(service, corpus, start, stop, query, request, default="json", fields=fields, tag=tag)
    response = yield from more
    response.num_documents = 1
    return response


@question("/v1/plans/{plan_id}/rows", Rows)
def rows(service: Service, plan_id: PlanId, query: RowsQuery, request: RequestHead) -> Slices[Response]:
    """Show rows of a step's global batch as text, cut at the borders of documents."""
    bound, step, world_size = service.plan(plan_id, request.caller), query.step, query.world_size
    size = bound.sampler.check_part(step, world_size=world_size) * world_size
    if query.first >= size:
        raise InvalidParameter.expected("first", f"a row of the global batch, in [0, {size})", query.first)
    count = min(query.count, size - query.first)
    service.admission.check_text_size(count * (bound.sampler.seq_len(step) + 1), "count")
    whole = WindowReading(bound, step=step, count=1, rank=0, rows=size, world_size=world_size)
    yield from staged_rows(service, bound, whole)
    first_shard = {name: n for n, (name, _) in reversed(list(enumerate(bound.shards)))}
    shown: list[Row] = []
    places = range(query.first, query.first + count)
    found, borders = bound.sampler.pieces(step, places, world_size=world_size)
    (numbers,) = bound.sampler.row_numbers(step, places, world_size=world_size).tolist()
    for place, number, (first, stop) in zip(places, numbers, pairwise(borders.tolist()), strict=True):
        pieces = found[first:stop].tolist()
        name, shard = bound.shards[pieces[0][0]]
        corpus = bound.corpora[name].base
        (tokens,) = whole.read(place, 1)
        left, texts, begins = tokens.tolist(), list[Span](), []
        for shard_number, start, length in pieces:
            begins.append(corpus.starts[shard_number - first_shard[name]] + start)
            texts += cut(corpus, begins[-1], left[:length])
            left = left[length:]
        its = Row(
            row=number,
            corpus=name,
            shard=shard.name,
            start=begins[0],
            spans=texts,
            unused=len(left),
            documents=None,
        )
        shown.append(its)
        yield None
    corpora = {name: corpus.base for name, corpus in bound.corpora.items()}
    shown, problems = yield from _name_documents(corpora, shown, all_columns=query.metadata == "all")
    fields = Rows(
        plan=bound.plan.id,
        step=step,
        plan_step=bound.sampler.timeline.plan_step(step),
        global_batch_size=size,
        first=query.first,
        rows=shown,
        problems=problems,
    )
    return json_response(fields, {**NO_STORE, PLAN_HEADER: bound.plan.id})


def _name_documents(
    corpora: Mapping[str, Corpus], rows: Sequence[Row], *, all_columns: bool
) -> Slices[tuple[list[Row], list[str]]]:
    """Return rows with where their documents came from, and why that cannot be said of a corpus."""
    wanted: dict[str, set[int]] = {}
    num_named = 0
    for row in rows:
        if sum(map(len, wanted.values())) >= NAMED_DOCUMENTS:
            break
        if corpora[row.corpus].metadata_paths:
            wanted.setdefault(row.corpus, set()).update(_documents_of(row))
        num_named += 1
    found: dict[str, Found] = {}
    for name, numbers in wanted.items():
        columns = None if all_columns else naming_columns()
        found[name] = yield from find_metadata(corpora[name], numbers, columns)

    def named_in(row: Row) -> list[NamedDocument]:
        its = found[row.corpus].rows if row.corpus in found else {}
        return [
            NamedDocument(
                document=number,
                id=named(its[number], "id"),
                source=named(its[number], "source"),
                metadata=its[number] if all_columns else None,
            )
            for number in _documents_of(row)
            if number in its
        ]

    shown = [replace(row, documents=named_in(row)) for row in rows[:num_named]]
    problems = [its.problem for its in found.values() if its.problem is not None]
    return [*shown, *rows[num_named:]], problems


def _documents_of(row: Row) -> list[int]:
    return list(dict.fromkeys(span.document for span in row.spans if span.document is not None))


@question("/v1/corpora/{name}/spans", Spans)
def spans(service: Service, name: CorpusName, query: SpansQuery, request: RequestHead) -> Slices[Response]:
    """Show a range of tokens as text, cut at the borders of documents."""
    corpus = service.corpus(name, request.caller)
    if query.start > corpus.num_tokens:
        raise InvalidParameter.expected("start", f"in [0, {corpus.num_tokens}]", query.start)
    stop = min(query.start + query.count, corpus.num_tokens)
    service.admission.check_text_size(stop - query.start, "count")
    pieces = corpus.locate_range(query.start, stop - query.start)
    yield from service.staged(corpus.shards[number].file for number, _, _ in pieces)
    tokens = _read(service, corpus, query.start, stop)
    yield None
    shown = list(cut(corpus, query.start, tokens.tolist()))
    found = Spans(corpus=corpus.name, start=query.start, stop=stop, num_tokens=corpus.num_tokens, spans=shown)
    return json_response(found, NO_STORE)


@question("/v1/corpora/{name}/statistics", Statistics)
def statistics(
    service: Service, name: CorpusName, query: StatisticsQuery, request: RequestHead
) -> Slices[Response]:
    """Return frequencies of tokens and lengths of documents in a sample."""
    corpus = service.corpus(name, request.caller)
    ids: list[NDArray[np.integer]] = []
    for _, tokens in _blocks(service, corpus, query.seed, STATISTICS_BLOCKS):
        ids.append(tokens)
        yield None
    found, counts = np.unique(np.concatenate(ids) if ids else np.empty(0, np.int64), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    top = [
        TopToken(token=token, count=number, text=decode_known(corpus.tokenizer, [token]))
        for token, number in zip(found[order[:TOP_TOKENS]].tolist(), counts[order].tolist(), strict=False)
    ]
    lengths = yield from _document_lengths(corpus, query.seed)
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
    return json_response(fields, NO_STORE)


@question("/v1/corpora/{name}/search", Search)
def search(service: Service, name: CorpusName, query: SearchQuery, request: RequestHead) -> Slices[Response]:
    """Find a text in a sample of about a million tokens, or in all of a small corpus."""
    corpus = service.corpus(name, request.caller)
    tokenizer = check_available(corpus)
    found: list[Place] = []
    num_searched = 0
    # A text that begins in a block may end behind it; a token is at least one byte of it.
    more = len(query.text.encode())
    for start, tokens in _blocks(service, corpus, query.seed, SEARCH_BLOCKS, more=more):
        ids = tokens.tolist()
        yield None
        text = decode_known(tokenizer, ids) or ""
        num_searched += min(len(ids), BLOCK_TOKENS)
        at = text.find(query.text)
        while at >= 0 and len(found) < query.limit:
            first = _token_at(tokenizer, ids, at)
            if first >= BLOCK_TOKENS:
                break
            end = at + len(query.text)
            found.append(
                Place(
                    token=start + first,
                    document=corpus.document_at(start + first),
                    before=text[max(0, at - _CONTEXT) : at],
                    text=text[at:end],
                    after=text[end : end + _CONTEXT],
                )
            )
            at = text.find(query.text, end)
            yield None
        if len(found) == query.limit:
            break
    fields = Search(
        corpus=corpus.name,
        text=query.text,
        num_tokens=corpus.num_tokens,
        num_searched_tokens=num_searched,
        found=found,
    )
    return json_response(fields, NO_STORE)


@question("/v1/plans/{plan_id}/diff", Diff, is_tagged=True)
def diff(service: Service, plan_id: PlanId, query: DiffQuery, request: RequestHead) -> Slices[Response]:
    """Say in which fields another plan differs from this one, and from which step on which rows."""
    one, other = (service.plan(each, request.caller) for each in (plan_id, query.other))
    headers = plan_headers(one, request, f"diff.{other.plan.id}.{query.steps}.{query.until}")
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    compared = yield from compare_slices(
        one.sampler, other.sampler, num_steps=query.steps, max_rows=max_rows(one, other, DIFF_ROWS)
    )
    totals = yield from total_slices(one.sampler, other.sampler, until=query.until)
    changes = yield from view_changes(one, other)
    changed = changed_fields(one.plan, other.plan)
    fields = Diff(a=one.plan.id, b=other.plan.id, fields=changed, rows=compared, totals=totals, views=changes)
    return json_response(fields, headers)


def _token_at(tokenizer: Tokenizer, tokens: Sequence[int], at: int) -> int:
    """Return which token holds character `at` of their text: the first that decodes to more than `at`.

    The text of the first tokens is the beginning of the text of all, so this may be bisected.
    """
    return bisect_right(range(len(tokens)), at, key=lambda n: len(tokenizer.decode(tokens[: n + 1])))


def _read(service: Service, corpus: Corpus, start: int, stop: int) -> NDArray[np.integer]:
    """Return tokens [start, stop) of a corpus whose shards are on this machine."""
    reading = RangeReading(corpus, service.catalog.gatherer(corpus.name), start=start, stop=stop)
    return np.concatenate([np.empty(0, corpus.dtype), *(part.copy() for part in read_arrays(reading))])


def _blocks(
    service: Service, corpus: Corpus, seed: int, num_blocks: int, more: int = 0
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield blocks of a corpus, each with its first token: all of a small one, else a sample of it.

    One block lies somewhere in each of `num_blocks` equal parts. Shards that are not on this machine are
    left out: a look at a corpus should not fetch it. Each block comes with the `more` tokens behind it.
    """
    if corpus.num_tokens <= num_blocks * BLOCK_TOKENS:
        starts = list(range(0, corpus.num_tokens, BLOCK_TOKENS))
    else:
        part = corpus.num_tokens // num_blocks
        within = np.random.default_rng(seed).integers(0, part - BLOCK_TOKENS + 1, num_blocks)
        starts = (np.arange(num_blocks) * part + within).tolist()
    for start in starts:
        stop = min(start + BLOCK_TOKENS + more, corpus.num_tokens)
        pieces = corpus.locate_range(start, stop - start)
        files = [corpus.shards[number].file for number, _, _ in pieces]
        if all(file.is_cached for file in files):
            yield start, _read(service, corpus, start, stop)


def _document_lengths(corpus: Corpus, seed: int) -> Slices[Lengths | None]:
    """Return quantiles and a histogram of the lengths of sampled documents; None without an index."""
    total = corpus.num_documents
    if total is None:
        return None
    numbers: Sequence[int] = range(total)
    if total > SAMPLE_DOCUMENTS:
        numbers = np.random.default_rng(seed).integers(0, total, SAMPLE_DOCUMENTS).tolist()
    found = []
    for n, number in enumerate(numbers):
        start, stop = corpus.document_range(number)
        found.append(stop - start)
        if n % 256 == 255:
            yield None
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
