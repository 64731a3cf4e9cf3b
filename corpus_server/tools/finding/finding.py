"""Look for items in corpora, one pass over each, and describe what was found."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.progress import Progress
from corpus_server.corpus.views import View, open_corpus
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.read.text import decode_known
from corpus_server.tools.finding.decoded import DecodedText, compared, where_compared
from corpus_server.tools.finding.held import held_runs
from corpus_server.tools.finding.items import EncodeBatch, Encoded, Items, Text, encode
from corpus_server.tools.finding.ngrams import NGrams
from corpus_server.tools.finding.scan import STRETCH_TOKENS, Scan
from corpus_server.tools.finding.spans import Spans, document_ranges, documents_in, find_spans

DEFAULT_N: Final = 13
"""As GPT-3's report (Brown et al. 2020, appendix C). PaLM's and Tulu 3's have 8, Llama 2's more than 10."""
BYTES_N: Final = 50
"""Of a corpus whose tokens are bytes: 13 tokens of English are 50 to 60 bytes, 13 bytes are two words."""
SHARES: Final = (0.2, 0.5, 0.7, 0.8)
"""Shares at which items are counted: Llama 2 calls an item dirty from 0.8 on and not clean from 0.2 on; PaLM
counts from 0.7, Tulu 3 from 0.5."""

_SHOWN_TOKENS: Final = 1 << 12  # of an item, in a report


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is looked for, and what is told of it.

    Attributes:
        items: see there.
        n: tokens of an n-gram.
        min_share: least share of an item that must be covered to be told.
        num_places: of one n-gram that are listed.
        by_text: whether bytes of text are compared, not tokens; n counts them then.
    """

    items: Items
    n: int = DEFAULT_N
    min_share: float = 0.0
    num_places: int = 100
    by_text: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min_share <= 1:
            raise InvalidParameter.expected("share", "in [0, 1]", self.min_share)
        if self.by_text and not all(isinstance(each, str) for its in self.items.texts for each in its):
            raise InvalidParameter(
                "--by text looks for texts, and some items are token ids",
                parameter="by",
                remedy="leave --tokens and --column out, or --by text",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was found in one corpus, which stays open.

    Attributes:
        corpus: of a view its corpus.
        encoded: the items, by its tokenizer.
        text: in which spans are found, if not in the tokens.
        spans: see there.
        documents: that hold them, all of them, ascending.
        is_looked_for: `(items,)`: whether the item has a text of n tokens.
        scan_seconds: that the pass over the tokens took, as far as it was not done before.
    """

    corpus: Corpus
    encoded: Encoded
    text: DecodedText | None
    spans: Spans
    documents: NDArray[np.int64]
    is_looked_for: NDArray[np.bool_]
    scan_seconds: float

    @property
    def listed(self) -> Iterator[tuple[int, range]]:
        """The items that were found, the most covered ones first: their numbers, and those of their spans."""
        numbers, begins = np.unique(self.spans.item, return_index=True)
        ends = np.append(begins[1:], self.spans.item.size)
        for at in np.argsort(-self.shares[numbers], kind="stable").tolist():
            yield int(numbers[at]), range(int(begins[at]), int(ends[at]))

    @property
    def shares(self) -> NDArray[np.float64]:
        """Which share of each item is covered."""
        lengths = np.diff(self.encoded.item_borders)
        shares: NDArray[np.float64] = self.spans.covered / np.maximum(lengths, 1)
        return shares

    def before(self, span: int) -> NDArray[np.int64]:
        """Return how many of a span's tokens, or bytes, come before each of its tokens; then all of them."""
        spans = self.spans
        start, place = int(spans.start[span]), int(spans.place[span])
        stop, size = start + int(spans.length[span]), int(spans.item_length[span])
        borders = np.arange(start, stop + 1) if self.text is None else self.text.borders(start, stop)
        return (borders - place).clip(0, size)


def default_n(corpora: Sequence[Corpus], *, by_text: bool) -> tuple[int, list[str]]:
    """Return how many tokens must stand together, and the names of corpora for which that is too few."""
    if by_text:
        return BYTES_N, []
    of_bytes = [each.name for each in corpora if each.tokenizer_name == "bytes"]
    return (BYTES_N, []) if len(of_bytes) == len(corpora) else (DEFAULT_N, of_bytes)


@contextmanager
def opened(specs: Sequence[CorpusSpec]) -> Iterator[list[Corpus]]:
    """Open corpora; of a view the corpus that it is of, in whose numbers all is told."""
    with ExitStack() as stack:
        yield [stack.enter_context(Corpus.open(_of_files(spec))) for spec in specs]


def find(
    spec: CorpusSpec,
    corpus: Corpus,
    wanted: Wanted,
    *,
    num_processes: int,
    work: Path | None = None,
    progress: Progress | None = None,
) -> Found:
    """Look for all items in a corpus.

    Args:
        spec, corpus: see `opened`. Of a view what counts is what stands in documents that it holds.
        work: a folder that keeps what is done, if the pass is interrupted; it must be there.

    Raises:
        TextUnavailable: there are texts, and the corpus has no tokenizer.
        InvalidParameter: there is too much to look for, or to list.
    """
    is_held = _is_held(spec)
    text = DecodedText.of(corpus, progress) if wanted.by_text else None
    encoder, eot = _encoder(corpus, by_text=wanted.by_text), None if wanted.by_text else corpus.eot
    encoded = encode(wanted.items, encoder, corpus.name, eot)
    key = xxhash.xxh3_128(f"{wanted.n} {STRETCH_TOKENS} {corpus.fingerprint} {wanted.by_text}".encode())
    key.update(np.ascontiguousarray(encoded.tokens).data)
    key.update(np.ascontiguousarray(encoded.text_ends).data)
    with tempfile.TemporaryDirectory(prefix="corpus-server-find-", dir=work) as folder:
        ngrams = NGrams.make(Path(folder), encoded.tokens, encoded.text_ends, wanted.n)
        if text is not None:
            text.save(Path(folder))
        scan = Scan(
            spec=_of_files(spec),
            n=wanted.n,
            table=Path(folder),
            key=key.digest(),
            journal=None if work is None else work / f"{corpus.name}.runs",
            by_text=wanted.by_text,
        )
        num_tokens = corpus.num_tokens if text is None else text.num_tokens
        itemsize = corpus.dtype.itemsize if text is None else 1
        began = time.monotonic()
        runs = scan.runs(num_tokens, itemsize, num_processes=num_processes, progress=progress)
        seconds = time.monotonic() - began
        if is_held is not None:
            runs = held_runs(runs, wanted.n, corpus, is_held, text)
        spans = find_spans(
            runs, ngrams, encoded, corpus, min_share=wanted.min_share, num_places=wanted.num_places, text=text
        )
    return Found(
        corpus=corpus,
        encoded=encoded,
        text=text,
        spans=spans,
        documents=documents_in(corpus, spans.ranges),
        is_looked_for=encoded.is_long_enough(wanted.n),
        scan_seconds=seconds,
    )


def _encoder(corpus: Corpus, *, by_text: bool) -> EncodeBatch | None:
    if by_text:
        return lambda texts: list(map(compared, texts))
    return None if corpus.tokenizer is None else corpus.tokenizer.encode_batch


def describe(wanted: Wanted, found: Sequence[Found]) -> dict[str, Any]:
    """Return what was found, as it is written as JSON."""
    items = wanted.items
    listed = [item for each in found for item in _items(wanted, each)]
    return {
        "n": wanted.n,
        "by": "text" if wanted.by_text else "tokens",
        "min_share": wanted.min_share,
        "num_places": wanted.num_places,
        "num_items": len(items.texts),
        "num_items_listed": len(listed),
        "sources": items.sources,
        "corpora": [_corpus(wanted, each) for each in found],
        "exclude": {each.corpus.name: _excluded(each).tolist() for each in found},
        "items": listed,
    }


def _excluded(found: Found) -> NDArray[np.int64]:
    """Return the tokens of the documents that hold spans, or the spans without an index, to be excluded."""
    if found.corpus.num_documents is None:
        return found.spans.ranges
    return document_ranges(found.corpus, found.documents)


def _corpus(wanted: Wanted, found: Found) -> dict[str, Any]:
    corpus, spans = found.corpus, found.spans
    shares = found.shares
    return {
        "corpus": corpus.name,
        "fingerprint": corpus.fingerprint,
        "tokenizer_identity": corpus.tokenizer_identity,
        "num_tokens": corpus.num_tokens,
        "scan_seconds": round(found.scan_seconds, 2),
        "num_documents": corpus.num_documents,
        "num_items_too_short": int(np.count_nonzero(~found.is_looked_for)),
        "num_items_found": int(np.unique(spans.item).size),
        "num_items_by_share": {str(each): int(np.count_nonzero(shares >= each)) for each in SHARES},
        "num_spans": int(spans.item.size),
        "num_tokens_found": int(np.diff(spans.ranges, axis=1).sum()),
        "num_documents_found": int(found.documents.size) if corpus.num_documents is not None else None,
    }


def _items(wanted: Wanted, found: Found) -> Iterator[dict[str, Any]]:
    """Yield the items that were found in a corpus, with their spans; the most covered ones first."""
    spans, items, shares = found.spans, wanted.items, found.shares
    borders = found.encoded.item_borders
    for number, its in found.listed:
        source, place = items.places[number]
        tokens = found.encoded.tokens[borders[number] : borders[number + 1]]
        own = [_span(found, each) for each in its]
        yield {
            "corpus": found.corpus.name,
            "item": number,
            "source": items.sources[source],
            "number": place,
            "num_tokens": tokens.size,
            "num_covered": int(spans.covered[number]),
            "share": round(float(shares[number]), 4),
            "longest": max(each["item_stop"] - each["item_start"] for each in own),
            "is_complete": not bool(spans.is_cut[number]),
            "parts": list(_parts(found, items.texts[number], tokens, own)),
            "spans": own,
        }


def _span(found: Found, at: int) -> dict[str, Any]:
    spans = found.spans
    start, length = int(spans.start[at]), int(spans.length[at])
    item_start = int(spans.item_start[at])
    first, last = int(spans.first_document[at]), int(spans.last_document[at])
    return {
        "start": start,
        "stop": start + length,
        "num_tokens": length,
        "item_start": item_start,
        "item_stop": item_start + int(spans.item_length[at]),
        "documents": [each for each in dict.fromkeys((first, last)) if each >= 0],
    }


def _parts(
    found: Found,
    texts: Sequence[Text],
    tokens: NDArray[np.unsignedinteger[Any]],
    spans: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield an item's text, cut where its listed spans begin and end."""
    shown = min(tokens.size, _SHOWN_TOKENS)
    change = np.zeros(tokens.size + 1, dtype=np.int64)
    for span in spans:
        change[span["item_start"]] += 1
        change[span["item_stop"]] -= 1
    is_found = change.cumsum()[:shown] > 0
    borders = [0, *(np.flatnonzero(np.diff(is_found)) + 1).tolist(), shown]
    if found.text is None:
        its = tokens[:shown].tolist()
        parts = [_text(found.corpus, its[start:stop]) for start, stop in pairwise(borders)]
    else:
        parts = _cut("".join(map(str, texts)).encode(), borders, is_found)
    for start, part in zip(borders, parts, strict=False):
        yield {"text": part, "is_found": bool(is_found[start])}


def _cut(text: bytes, borders: Sequence[int], is_found: NDArray[np.bool_]) -> list[str]:
    """Return parts of a text, cut at some of the bytes that are compared.

    White space between parts is of the one that was not found.
    """
    places = where_compared(text)
    cuts = [places[each] if is_found[each] else places[each - 1] + 1 for each in borders[1:-1]]
    end = len(text) if borders[-1] == places.size else places[borders[-1]]
    return [text[start:stop].decode(errors="replace") for start, stop in pairwise([0, *cuts, end])]


def _text(corpus: Corpus, tokens: Sequence[int]) -> str:
    """Return the text of tokens; their numbers, if the corpus has no tokenizer or it does not know one."""
    text = decode_known(corpus.tokenizer, tokens)
    return " ".join(map(str, tokens)) if text is None else text


def _is_held(spec: CorpusSpec) -> NDArray[np.bool_] | None:
    """Return which documents of its corpus a view holds; None of what is no view."""
    if spec.view is None:
        return None
    with open_corpus(spec) as view:
        assert isinstance(view, View)
        return view.is_chosen()


def _of_files(spec: CorpusSpec) -> CorpusSpec:
    return dataclasses.replace(spec, view=None) if spec.view is not None else spec
