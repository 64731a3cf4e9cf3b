"""Spans that token ids and corpora share: against brute force, and at every border."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus.index import index
from corpus_server.tools.finding import Items, Wanted, find, opened, scan
from tests.corpora import some_tokens, spec, write_raw

Span = tuple[int, int, int, int]
"""Item, first token there, first token in the corpus, tokens."""


def items_of(texts: Sequence[Sequence[int]]) -> Items:
    items = Items()
    for number, text in enumerate(texts):
        items.add("test", number, (np.array(text, dtype=np.int64),))
    return items


def found_in(
    folder: Path, texts: Sequence[Sequence[int]], n: int, *, num_places: int = 10**6, **options: Any
) -> tuple[set[Span], list[int]]:
    """Return the spans that are found in a corpus, and the covered tokens of each item."""
    named = spec(folder, **options)
    wanted = Wanted(items=items_of(texts), n=n, num_places=num_places)
    with opened([named]) as (corpus,):
        found = find(named, corpus, wanted, num_processes=1).spans
    columns = (found.item, found.item_start, found.start, found.length)
    return set(zip(*(each.tolist() for each in columns), strict=True)), found.covered.tolist()


def brute_force(tokens: Sequence[int], texts: Sequence[Sequence[int]], n: int) -> Iterator[Span]:
    """Yield all maximal spans, by comparing every token with every token."""
    for item, text in enumerate(texts):
        for i in range(len(text)):
            for j in range(len(tokens)):
                if i and j and text[i - 1] == tokens[j - 1]:
                    continue  # it begins before
                length = 0
                while (
                    i + length < len(text)
                    and j + length < len(tokens)
                    and text[i + length] == tokens[j + length]
                ):
                    length += 1
                if length >= n:
                    yield item, i, j, length


def is_shifted(one: Span, other: Span, n: int) -> bool:
    """Tell whether both are of a repetition: spans of one item that overlap in the corpus at close shifts."""
    (item, at, start, length), (its, its_at, its_start, its_length) = one, other
    overlap = min(start + length, its_start + its_length) - max(start, its_start)
    return one != other and item == its and overlap > 0 and abs((start - at) - (its_start - its_at)) < 2 * n


def tokens_of(spans: set[Span], item: int) -> set[int]:
    """Return the tokens of the corpus in spans of an item."""
    return {token for its, _, start, length in spans if its == item for token in range(start, start + length)}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a corpus of some hundred tokens consist of many stretches and blocks."""
    monkeypatch.setattr(scan, "STRETCH_TOKENS", 64)
    monkeypatch.setattr(scan, "BLOCK_TOKENS", 16)


@pytest.mark.usefixtures("small_blocks")
@settings(deadline=None, max_examples=80)
@given(
    shards=st.lists(st.lists(st.integers(0, 3), max_size=90), min_size=1, max_size=3),
    texts=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=5),
    n=st.integers(1, 14),
)
def test_all_spans_are_found_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], texts: list[list[int]], n: int
) -> None:
    """Of few distinct tokens, so that everything overlaps; across the borders of shards, too."""
    shards[0].append(0)  # a corpus is not empty
    folder = tmp_path_factory.mktemp("corpus")
    for number, tokens in enumerate(shards):
        write_raw(folder / f"{number}.bin", tokens)
    found, covered = found_in(folder, texts, n)
    expected = set(brute_force([token for shard in shards for token in shard], texts, n))
    assert found <= expected
    for missing in expected - found:
        assert any(is_shifted(missing, other, n) for other in expected), missing
    for item, text in enumerate(texts):
        assert tokens_of(found, item) == tokens_of(expected, item)
        own = {
            place for number, at, _, length in expected if number == item for place in range(at, at + length)
        }
        assert covered[item] == len(own), text


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_repetition_is_not_listed_at_every_shift(tmp_path: Path, period: int) -> None:
    """A line of 80 `=`, and 50 documents with longer lines: a few places in each, which hold all of it."""
    rule = [7, *(number % period + 1 for number in range(80)), 8]
    draw = np.random.default_rng(0)
    lines = [[number % period + 1 for number in range(int(size))] for size in draw.integers(80, 4000, 50)]
    tokens = [token for line in lines for token in (*draw.integers(100, 60_000, 200).tolist(), 7, *line, 8)]
    write_raw(tmp_path / "c.bin", tokens)
    found, covered = found_in(tmp_path, [rule], 13, num_places=100)
    assert covered == [82]
    ends = np.cumsum([202 + len(line) for line in lines]) - 1
    held = tokens_of(found, 0)
    for line, end in zip(lines, ends.tolist(), strict=True):
        assert {*range(end - len(line), end)} <= held
    assert len(found) <= sum(len(line) // 60 + 3 for line in lines)


def test_ten_thousand_planted_spans_are_found(tmp_path: Path) -> None:
    """With overlaps, at the first and the last tokens of documents, shards and blocks, and across them."""
    draw, n, eot = np.random.default_rng(1), 13, 0
    texts = [draw.integers(1, 50_000, draw.integers(13, 80)).tolist() for _ in range(4000)]
    tokens = some_tokens(3_000_000, seed=2).astype(np.int64) + 1
    lengths = [1_000_000, 700_001, 1_299_999]
    shard_ends = np.cumsum(lengths)
    document_ends = np.unique(np.append(draw.integers(1, tokens.size, 3000), shard_ends))
    tokens[document_ends - 1] = eot
    borders = [*document_ends.tolist(), *shard_ends.tolist(), *range(0, tokens.size, scan.BLOCK_TOKENS)]
    planted: list[Span] = []
    for number in range(17_000):
        item = int(draw.integers(len(texts)))
        at = int(draw.integers(0, len(texts[item]) - n + 1))
        length = int(draw.integers(n, len(texts[item]) - at + 1))
        start = int(draw.integers(0, tokens.size - length))
        if number % 2:  # at a border: behind it, before its end-of-text token, or across it
            border = int(borders[int(draw.integers(len(borders)))])
            start = (border, border - 1 - length, border - length // 2)[number % 3]
        if 0 <= start <= tokens.size - length:
            tokens[start : start + length] = texts[item][at : at + length]
            planted.append((item, at, start, length))
    assert len(planted) > 10_000
    folder = tmp_path / "web"
    folder.mkdir()
    for number, shard in enumerate(np.split(tokens, shard_ends[:-1])):
        write_raw(folder / f"{number}.bin", shard)
    found, _ = found_in(folder, texts, n)
    for item, at, start, length in found:
        assert tokens[start : start + length].tolist() == texts[item][at : at + length]
    reported = {(item, start - at): [] for item, at, start, _ in found}  # type: ignore[var-annotated]
    for item, at, start, length in found:
        reported[item, start - at].append((start, start + length))
    num_whole = 0
    for item, at, start, length in planted:
        if tokens[start : start + length].tolist() != texts[item][at : at + length]:
            continue  # another one was planted over it
        num_whole += 1
        spans = reported.get((item, start - at), [])
        assert any(begin <= start and start + length <= end for begin, end in spans), (
            item,
            at,
            start,
            length,
        )
    assert num_whole > 10_000


def test_tokens_of_32_bits_are_told_from_their_lower_16(tmp_path: Path) -> None:
    write_raw(tmp_path / "c.bin", [70_000 + each for each in range(40)], dtype="uint32")
    wrong = [70_000 + each - 65_536 for each in range(40)]
    found, _ = found_in(tmp_path, [[70_000 + each for each in range(5, 20)], wrong], 13, dtype="uint32")
    assert found == {(0, 0, 5, 15)}


def test_a_pass_goes_on_where_it_was_interrupted(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal holds whole stretches; half a record, and one of another question, do not count."""
    tokens = some_tokens(1000, vocabulary=5).tolist()
    folder, work = tmp_path / "web", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    write_raw(folder / "0.bin", tokens)
    named, wanted = spec(folder), Wanted(items=items_of([tokens[100:300], tokens[500:900]]), n=5)
    scanned: list[int] = []
    whole = scan.scan_stretch

    def scan_some(corpus: Any, table: Path, n: int, by_text: bool, number: int) -> Any:
        if number == 9 and len(scanned) == 9:
            raise KeyboardInterrupt
        scanned.append(number)
        return whole(corpus, table, n, by_text, number)

    def spans(asked: Wanted = wanted) -> list[list[int]]:
        with opened([named]) as (corpus,):
            found = find(named, corpus, asked, num_processes=1, work=work).spans
        return [found.item.tolist(), found.start.tolist(), found.length.tolist()]

    monkeypatch.setattr(scan, "scan_stretch", scan_some)
    with pytest.raises(KeyboardInterrupt):
        spans()
    assert scanned == [*range(9)]
    journal = work / "c.runs"
    journal.write_bytes(journal.read_bytes()[:-5])
    found = spans()
    assert scanned == [*range(9), *range(8, 16)]
    assert [each.name for each in work.iterdir()] == ["c.runs"]
    assert spans() == found
    assert len(scanned) == 17
    other = Wanted(items=items_of([tokens[100:300]]), n=6)
    assert spans(other)[0] == [0] * len(spans(other)[0])
    assert len(scanned) == 33
    journal.unlink()
    assert spans() == found


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    tokens = some_tokens(40_000_000, seed=3)
    write_raw(tmp_path / "0.bin", tokens)
    text = tokens[(1 << 24) - 20 : (1 << 24) + 20].tolist()  # across a border of stretches
    named, wanted = spec(tmp_path), Wanted(items=items_of([text]))
    told: list[tuple[str, int, int, int]] = []
    with opened([named]) as (corpus,):
        found = find(named, corpus, wanted, num_processes=2, progress=lambda *each: told.append(each)).spans
    assert (found.start.tolist(), found.length.tolist()) == ([(1 << 24) - 20], [40])
    assert told[-1] == ("scanning", 80_000_000, 80_000_000, 40_000_000)


def test_a_phrase_that_stands_everywhere_is_not_listed_everywhere(tmp_path: Path) -> None:
    """The share is exact all the same, and a whole copy of an item is one span."""
    phrase = [*range(1, 15)]
    texts = [[*phrase, *range(100 * k, 100 * k + 20)] for k in range(1, 60)]
    tokens = [token for number in range(500) for token in [*phrase, 9000 + number]]
    tokens += texts[30]
    write_raw(tmp_path / "c.bin", tokens)
    found, covered = found_in(tmp_path, texts, 13, num_places=10)
    assert covered == [14] * 30 + [34] + [14] * 28
    assert (30, 0, len(tokens) - 34, 34) in found
    assert len([each for each in found if each[0] == 5]) == 11  # the first ten, and that of the whole copy


def test_the_documents_of_tokens_are_those_of_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    tokens = [0 if number % 7 in (0, 1) else 5 for number in range(500)]
    write_raw(folder / "0.bin", tokens[:211])
    write_raw(folder / "1.bin", tokens[211:])
    index(spec(folder, eot=0))
    from corpus_server.tools.finding.spans import documents_at

    with opened([spec(folder)]) as (corpus,):
        found = documents_at(corpus, np.arange(500)).tolist()
        assert found == [corpus.document_at(token) for token in range(500)]
