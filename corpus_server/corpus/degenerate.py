"""Signs that tokens are not what their corpus is to hold: nothing but `<unk>`, one document many times.

They are looked for in a sample: a few blocks of each shard, and a few documents.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.fingerprints import sample_tokens
from corpus_server.corpus.tokenizers import Tokenizer
from corpus_server.pieces import NO_SHARD

_LARGEST_SHARE: Final = 0.5  # of one id; end-of-text is below 5 % of documents of 20 tokens
_NUM_BLOCKS: Final = 8  # of 4 KiB, of each shard
_MIN_TOKENS: Final = 1000  # fewer say nothing
_MIN_DOCUMENTS: Final = 100
_NUM_DOCUMENTS: Final = 64
_DOCUMENT_TOKENS: Final = 4096  # of each sampled document


def find_degenerate(corpus: Corpus) -> list[str]:
    """Return a sentence for each sign that a corpus is not what it is to be.

    One id is most of a shard; all documents have one token, or are equal. See `Corpus.warnings` for ids that
    the tokenizer does not have.
    """
    found = []
    for shard in corpus.shards:
        tokens = sample_tokens([shard], _NUM_BLOCKS)
        if tokens.size < _MIN_TOKENS:
            continue
        ids, counts = np.unique(tokens, return_counts=True)
        share, token = counts.max() / tokens.size, int(ids[counts.argmax()])
        if share > _LARGEST_SHARE:
            name = _name(corpus.tokenizer, token)
            found.append(
                f"{shard.path}: {share:.0%} of {tokens.size:,} sampled tokens are {token}{name}: was the "
                "text encoded by the right tokenizer?"
            )
    return [*found, *_find_documents(corpus)]


def _name(tokenizer: Tokenizer | None, token: int) -> str:
    if tokenizer is None or not tokenizer.knows(token):
        return ""
    return f" {tokenizer.decode([token])!a}"


def _find_documents(corpus: Corpus) -> list[str]:
    total = corpus.num_documents
    if total is None or total < _MIN_DOCUMENTS:
        return []
    lengths, contents = set(), set()
    for number in {int(each) for each in np.linspace(0, total - 1, _NUM_DOCUMENTS)}:
        start, stop = corpus.document_range(number)
        tokens = _read(corpus, start, min(stop, start + _DOCUMENT_TOKENS))
        lengths.add(len([each for each in tokens if each != corpus.eot]))
        contents.add((stop - start, tuple(tokens)))
    said = f"{corpus.shards[0].path.parent}: all of {_NUM_DOCUMENTS} sampled documents, of {total:,},"
    if lengths <= {0, 1}:
        return [f"{said} have one token: is it the right end-of-text token?"]
    if len(contents) == 1:
        return [f"{said} are equal"]
    return []


def _read(corpus: Corpus, start: int, stop: int) -> list[int]:
    tokens: list[int] = []
    for number, first, count in corpus.pieces(np.array([start]), np.array([stop])).places.tolist():
        if number != NO_SHARD:
            shard = corpus.shards[number]
            size = shard.dtype.itemsize
            tokens += np.frombuffer(shard.read_data(first * size, count * size), shard.dtype).tolist()
    return tokens
