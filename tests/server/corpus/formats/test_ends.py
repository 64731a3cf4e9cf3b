"""Ends of documents in one array: any entry of the file, offset and unit, and every contradiction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats import ends as module
from corpus_server.corpus.formats.ends import CumulativeEnds
from corpus_server.errors import CorpusChanged, ReadFailed

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "behind-a-header": {"at": 5},
    "bytes-of-the-file": {"at": 8, "entry": "<u4", "origin": 100, "unit": 4},
}


def opened(path: Path, ends: list[int], num_tokens: int, **layout: Any) -> CumulativeEnds:
    """Return the index of a file that holds these ends, in tokens."""
    stored = np.array(ends, "<i8") * layout.get("unit", 1) + layout.get("origin", 0)
    path.write_bytes(bytes(layout.get("at", 0)) + stored.astype(layout.get("entry", "<u8")).tobytes())
    options: dict[str, Any] = {"at": 0, **layout}
    return CumulativeEnds(OpenFile(path), num_documents=len(ends), num_tokens=num_tokens, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ends", [[], [0], [3], [3, 5, 5, 6], [0, 0, 7]])
def test_documents_lie_one_after_another(tmp_path: Path, layout: str, ends: list[int]) -> None:
    with opened(tmp_path / "a", ends, max([0, *ends]), **LAYOUTS[layout]) as index:
        starts = [0, *ends[:-1]] if ends else []
        ranges = list(zip(starts, ends, strict=True))
        assert [index.document_range(n) for n in range(index.num_documents)] == ranges
        assert index.sequence_lengths().tolist() == [stop - start for start, stop in ranges]
        assert index.sequence_lengths().dtype == np.int64
        assert index.find_problem() is None
        assert [index.ends(n, 1).tolist() for n in range(len(ends))] == [[end] for end in ends]


@pytest.mark.parametrize(
    ("ends", "number"),
    [
        pytest.param([7], 0, id="the only one ends behind the shard"),
        pytest.param([3, 7], 1, id="the last ends behind the shard"),
        pytest.param([-1, 6], 0, id="the first ends before the shard"),
        pytest.param([3, 2, 6], 1, id="ends before it begins"),
    ],
)
def test_a_document_outside_its_shard_or_its_neighbours_is_an_error(
    tmp_path: Path, ends: list[int], number: int
) -> None:
    with opened(tmp_path / "a", ends, 6, **LAYOUTS["bytes-of-the-file"]) as index:
        with pytest.raises(ReadFailed) as caught:
            index.document_range(number)
        assert caught.value.detail == f"a: the end of document {number} contradicts its neighbours"
        assert caught.value.remedy == "run corpus-server verify, then copy the index again"
        assert index.find_problem() == f"a: document {number} ends before it begins, or behind the shard"


@pytest.mark.parametrize("count", [4, 8, 9, 10])
@pytest.mark.parametrize("wrong", [None, 0, 1, 3, 4, 5, 7, 8])
def test_reading_all_goes_on_from_one_chunk_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, wrong: int | None
) -> None:
    """In chunks of 4 ends; a document that ends too late is found itself, or by the one behind it."""
    monkeypatch.setattr(module, "CHUNK_ENDS", 4)
    ends = list(range(3, 3 * count + 1, 3))
    if wrong is not None and wrong < count:
        ends[wrong] = 3 * wrong - 1
        found = f"a: document {wrong} ends before it begins, or behind the shard"
    else:
        found = None
    with opened(tmp_path / "a", ends, 3 * count) as index:
        assert index.find_problem() == found


def test_the_first_of_several_contradictions_is_named(tmp_path: Path) -> None:
    with opened(tmp_path / "a", [3, 2, 9, 1], 8) as index:
        assert index.find_problem() == "a: document 1 ends before it begins, or behind the shard"


def test_a_file_cut_while_open_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path / "a", [3, 5], 5) as index:
        (tmp_path / "a").write_bytes(b"")
        for read in (lambda: index.document_range(0), index.sequence_lengths):
            with pytest.raises(CorpusChanged, match="a: 16 bytes at opening, 0 now"):
                read()
