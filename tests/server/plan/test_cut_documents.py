"""Rows of documents token by token: shards cut anywhere, end-of-text first or last, rows that begin with one.

What a batch of the client says of its tokens alone is said here once more: which predictions count, and which
tokens belong to one document. Every token but end-of-text is in the corpus once, so a prediction is known by
its two tokens.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import NO_SHARD
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.packing import build
from corpus_server.plan.rows import DocumentRows
from tests.packed import PackedCase

EOT = 0


class Corpus:
    """Documents in one line of tokens, cut into shards; `first`: whether they begin with end-of-text."""

    def __init__(self, random: Random, *, first: bool) -> None:
        self.first, stream = first, list[int]()
        longest = random.choice([3, 10, 40])
        while len(stream) < random.randint(2, 300):
            start = len(stream) + 1
            own = list(range(start, start + random.randint(1, longest)))
            stream += [EOT, *own] if first else [*own, EOT]
        is_cut = random.random() < 0.7
        start, kept = (random.randint(0, 2) * is_cut for _ in range(2))
        stop = len(stream) - kept
        cuts = [random.randint(start, max(start, stop)) for _ in range(random.randint(0, 2) * is_cut)]
        self.shards = [stream[one:other] for one, other in pairwise(sorted([start, *cuts, max(start, stop)]))]
        self.lengths = tuple(tuple(map(len, self._documents(shard))) for shard in self.shards)
        self.opened, number = list[int](), 0
        for shard, lengths in zip(self.shards, self.lengths, strict=True):
            if shard and first and shard[0] != EOT:
                self.opened.append(number)
            if shard and not first and shard[-1] != EOT and lengths[-1] > 1:
                self.opened.append(number + len(lengths) - 1)
            number += len(lengths)

    def _documents(self, shard: list[int]) -> list[list[int]]:
        borders = [at if self.first else at + 1 for at, token in enumerate(shard) if token == EOT]
        inner = [at for at in borders if 0 < at < len(shard)]
        return [shard[one:other] for one, other in pairwise([0, *inner, len(shard)])] if shard else []

    @property
    def begins(self) -> set[int]:
        """The first token of each document, or of what a shard has of it; of end-of-text first, that."""
        return {EOT} if self.first else {its[0] for shard in self.shards for its in self._documents(shard)}

    @property
    def predictions(self) -> Counter[tuple[int, int]]:
        """What an epoch predicts, and from what."""
        found = Counter[tuple[int, int]]()
        for shard in self.shards:
            found.update(pair for pair in pairwise(shard) if self.first or pair[0] != EOT)
            is_open = len(shard) > 0 and shard[-1] != EOT
            if is_open and (self.first or len(self._documents(shard)[-1]) > 1):
                found[shard[-1], EOT] += 1
        return found

    def case(self, random: Random, *, begin: bool) -> PackedCase:
        rows = {"documents": {"block_documents": random.choice([1, 3, 10, 99]), "begin": begin}}
        document: dict[str, Any] = {
            "seq_len": random.choice([2, 3, 8, 16, 33]),
            "seed": random.randint(0, 9),
            "order": random.choice(["shuffle", "sequential"]),
            "rows": rows,
            "stages": [{"global_batch_size": 1, "mixture": {"a": 1}}],
        }
        return PackedCase(document, {"a": self.lengths}, self.first, {"a": tuple(self.opened)})


def rule(tokens: list[int], *, first: bool) -> tuple[list[bool], list[bool]]:
    """Whether each input begins a document in the row, and whether its target counts."""
    is_eot = [token == EOT for token in tokens]
    starts, counts = [True], []
    for at in range(len(tokens) - 1):
        before, twice = at > 0 and is_eot[at - 1], at > 1 and is_eot[at - 1] and is_eot[at - 2]
        if at:
            starts.append((is_eot[at] and not before) or (not is_eot[at] and twice) if first else before)
        is_filler = is_eot[at] and (before or is_eot[at + 1])
        counts.append(not is_filler if first else not is_eot[at])
    return starts, counts


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_an_epoch_predicts_every_token_once_and_within_its_document(*, first: bool, begin: bool) -> None:
    for seed in range(25):
        random = Random(seed)
        corpus = Corpus(random, first=first)
        case = corpus.case(random, begin=begin)
        expected = corpus.predictions
        if not expected:
            continue
        follows = {pair for shard in corpus.shards for pair in pairwise(shard)}
        sampler, seq_len = case.sampler, case.document["seq_len"]
        num_rows = int(sampler.num_windows[0])
        for epoch in (0, 3):
            seen = Counter[tuple[int, int]]()
            for row in range(num_rows):
                places, _ = sampler.pieces(epoch * num_rows + row, range(1))
                tokens = list[int]()
                for shard, start, count in places.tolist():
                    its = [EOT] * count if shard == NO_SHARD else corpus.shards[shard][start : start + count]
                    tokens += its
                assert len(tokens) <= seq_len + 1
                tokens += [EOT] * (seq_len + 1 - len(tokens))
                if begin:
                    assert tokens[0] in corpus.begins, seed
                starts, counts = rule(tokens, first=first)
                pairs = zip(pairwise(tokens), counts, strict=True)
                seen.update(pair for pair, is_counted in pairs if is_counted)
                for at in range(1, seq_len):
                    pair = tokens[at - 1], tokens[at]
                    assert starts[at] or pair == (EOT, EOT) or pair[1] == EOT or pair in follows, seed
            assert not seen - expected, seed
            left_out = (expected - seen).total()
            assert begin or not left_out, seed
            rows = sampler.rows
            assert isinstance(rows, DocumentRows)
            described = rows.describe(0).get("left_out", 0)
            assert left_out == round(described * expected.total()), seed


def test_corpora_of_both_kinds_do_not_share_a_plan() -> None:
    starts, lengths = np.array([0, 3]), np.array([3, 3])
    tables = [
        build(starts, lengths, np.array([6]), seq_len=4, block_documents=9, eot_first=eot_first)
        for eot_first in (False, True)
    ]
    document = {
        "seq_len": 4,
        "rows": "documents",
        "stages": [{"global_batch_size": 1, "mixture": {"a": 1, "b": 1}}],
    }
    with pytest.raises(InvalidPlan, match="the documents of b begin with end-of-text"):
        Sampler(Plan.from_json(document), {"a": [6], "b": [6]}, tables=tables)
