"""Best-fit packing: every token once, no cut without need, rows of one length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.tools.building import pack as pack_module
from corpus_server.tools.building.pack import Ends, PackedDocuments, Tokens, arrange, best_fit
from tests.server.tools.building.sources import build_here, write_jsonl
from tests.serving import RunningServer

EOT = 0


class SomeDocuments:
    """Documents in memory, handed out in small pieces; tokens occur once each, but for the last of each."""

    def __init__(self, lengths: list[int], piece: int = 7) -> None:
        self.lengths = lengths
        self._ends = np.cumsum(lengths).astype(np.uint64)
        self.num_documents = len(lengths)
        self.num_tokens = int(self._ends[-1]) if lengths else 0
        self.tokens = np.arange(1, self.num_tokens + 1, dtype="uint32")
        self.tokens[self._ends.astype(int) - 1] = EOT
        self._piece = piece
        self.most_read = 0

    def pieces(self, start: int, stop: int) -> Iterator[Tokens]:
        self.most_read = max(self.most_read, stop - start)
        for first in range(start, stop, self._piece):
            yield self.tokens[first : min(first + self._piece, stop)]

    def ends(self, start: int, stop: int) -> Iterator[Ends]:
        inside = self._ends[(self._ends > start) & (self._ends <= stop)]
        for first in range(0, len(inside), self._piece):
            yield inside[first : first + self._piece]

    def numbers(self) -> Iterator[np.ndarray]:
        yield np.arange(self.num_documents)


def all_of(pieces: Iterator[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, "uint32"), *pieces])


def packed(
    lengths: list[int], row_tokens: int, buffer_tokens: int = 1
) -> tuple[SomeDocuments, PackedDocuments]:
    documents = SomeDocuments(lengths)
    return documents, PackedDocuments(
        documents, row_tokens=row_tokens, padding=EOT, buffer_tokens=buffer_tokens
    )


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "_MIN_BUFFER_ROWS", 4)


some_lengths = st.lists(st.integers(1, 40), max_size=60)
row_lengths = st.integers(2, 17)


@given(lengths=some_lengths, row_tokens=row_lengths)
def test_every_token_appears_once_and_nothing_is_cut_that_fits(lengths: list[int], row_tokens: int) -> None:
    documents, rows = packed(lengths, row_tokens)
    tokens = all_of(rows.pieces(0, rows.num_tokens))
    ends = all_of(rows.ends(0, rows.num_tokens)).astype(int)
    expected = [
        document[start : start + row_tokens]
        for document in np.split(documents.tokens, np.cumsum(lengths))[:-1]
        for start in range(0, len(document), row_tokens)
    ]
    found = np.split(tokens, ends)[:-1]
    # The last piece of a row has padding behind it.
    assert sorted(np.trim_zeros(piece, "b").tolist() for piece in found) == sorted(
        np.trim_zeros(piece, "b").tolist() for piece in expected
    )
    assert set(range(0, rows.num_tokens, row_tokens)) <= {0, *ends.tolist()}
    assert rows.num_tokens == tokens.size == sum(lengths) + rows.packing.num_padding
    assert (rows.num_documents, rows.num_tokens % row_tokens) == (len(expected), 0)
    assert rows.packing.num_cut == sum(length > row_tokens for length in lengths)


@given(lengths=some_lengths, row_tokens=row_lengths, data=st.data())
def test_any_stretch_can_be_read_by_itself(lengths: list[int], row_tokens: int, data: st.DataObject) -> None:
    _, rows = packed(lengths, row_tokens)
    start = data.draw(st.integers(0, rows.num_tokens))
    stop = data.draw(st.integers(start, rows.num_tokens))
    tokens, ends = all_of(rows.pieces(0, rows.num_tokens)), all_of(rows.ends(0, rows.num_tokens))
    assert (all_of(rows.pieces(start, stop)) == tokens[start:stop]).all()
    assert (all_of(rows.ends(start, stop)) == ends[(ends > start) & (ends <= stop)]).all()


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=80))
def test_rows_are_ordered_and_no_two_of_them_would_fit_into_one(lengths: list[int]) -> None:
    rows = best_fit(lengths, 12)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    used = sorted(sum(lengths[item] for item in row) for row in rows)
    assert used[-1] <= 12
    assert len(used) == 1 or used[0] + used[1] > 12


def test_the_example_of_the_module() -> None:
    _, rows = packed([14, 7, 5, 2, 3], 8)
    assert next(rows.pieces(0, 32)).reshape(-1, 8).tolist() == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [9, 10, 11, 12, 13, EOT, 27, EOT],
        [15, 16, 17, 18, 19, 20, EOT, EOT],
        [22, 23, 24, 25, EOT, 29, 30, EOT],
    ]
    assert next(rows.ends(0, 32)).tolist() == [8, 14, 16, 24, 29, 32]
    assert (rows.packing.num_padding, rows.packing.num_cut) == (1, 1)


@pytest.mark.parametrize("seq_len", [256, 1024, 2048])
def test_documents_of_usual_lengths_leave_little_padding(seq_len: int) -> None:
    lengths = np.exp(np.random.default_rng(1).normal(np.log(500), 1.2, 4000)).astype(int) + 1
    assert lengths.sum() / arrange(lengths, seq_len + 1).num_tokens > 0.998


def test_a_window_of_a_packed_corpus_is_a_row_of_whole_documents(tmp_path: Path) -> None:
    texts = [f"{number}:" + "x" * (number * 37 % 300) for number in range(400)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    options = {"tokenizer": "bytes", "pack": "best-fit", "seq_len": 255, "shard_tokens": 5000}
    (manifest,) = build_here([source], tmp_path / "out", **options).values()
    assert {shard.num_tokens for shard in manifest.shards[:-1]} == {4864}  # 19 rows of 256
    num_rows = manifest.num_tokens // 256
    with RunningServer({"packed": tmp_path / "out"}, tmp_path) as server:
        asked = f"corpus=packed&seq_len=255&stride=256&order=sequential&batch_size={num_rows}&step=0"
        rows = server.get(f"/v1/batches?{asked}").array()[0]
    found = [piece.decode() for row in rows for piece in row.tobytes().split(b"\0") if piece]
    whole = [text for text in texts if len(text) < 256]
    assert len(whole) < len(texts)
    assert sorted(set(found) & set(whole)) == sorted(whole)
    assert sum(map(len, found)) == sum(map(len, texts))
    assert manifest.packing is not None
    assert manifest.packing.num_cut == len(texts) - len(whole)
