"""Ranges of views that begin and end at every kind of border, and views whose corpus has other documents."""

from __future__ import annotations

import json
import struct
import tempfile
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.views import View, open_corpus
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CorpusChanged
from corpus_server.tools.viewing.make import make_view
from tests.corpora import megatron_index
from tests.views import GROUP, laid_out

SECTION = 8
COUNTS = {
    "bits": [0, 1],
    "few": [0] * 40 + [1],
    "bytes": [0, 1, 1, 2, 4],
    "words": [0] * 60 + [1, 2, 300],
    "runs": [3],
}


def write_shards(folder: Path, shards: list[list[int]]) -> Path:
    """Write a folder of Megatron pairs, whose documents may have no token; all tokens are 0."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, lengths in enumerate(shards):
        with (folder / f"{number}.bin").open("wb") as file:
            file.truncate(sum(lengths))
        write_documents(folder, number, lengths)
    return folder


def write_documents(folder: Path, shard: int, lengths: list[int]) -> None:
    (folder / f"{shard}.idx").write_bytes(megatron_index(lengths, dtype="uint8"))


def write_view(folder: Path, counts: list[int], out: Path) -> Path:
    with Corpus.open(CorpusSpec.parse(f"web={folder},eot=0")) as corpus:
        make_view(corpus, np.array(counts, dtype=np.uint16), out, made={})
    return out


def write_version_1(view: Path) -> None:
    """Write a view anew as versions of the server before wrote it: without layers."""
    data = view.read_bytes()
    size = struct.unpack_from("<Q", data, 16)[0]
    header = json.loads(data[32 : 32 + size])
    groups, entries = header["num_groups"], header["num_entries"]
    each = {"bits": 1, "bytes": 1, "words": 2, "runs": 10}[header["encoding"]]
    arrays = data[32 + size :][: 8 * (3 * groups + 2) + each * entries]
    for name in ("num_layers", "section_ends", "layers_digest"):
        del header[name]
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<8sQQQ", b"CORPVIEW", 1, len(text), xxhash.xxh3_64_intdigest(text))
    view.write_bytes(head + text + arrays)


def opened(folder: Path, view: Path) -> View:
    found = open_corpus(CorpusSpec.parse(f"v={folder},eot=0,view={view}"))
    assert isinstance(found, View)
    return found


def places_of(shards: list[list[int]], counts: list[int]) -> tuple[np.ndarray, list[int]]:
    """Return where each token of a view lies in its corpus, and where passes, groups and sections begin."""
    lengths = [length for its in shards for length in its]
    firsts, of_shard = [0, *accumulate(lengths)], [0, *accumulate(map(len, shards))]
    places, borders, size = [np.empty(0, np.int64)], [0], 0
    for (begin, stop), its in zip(pairwise(of_shard), laid_out(shards, counts), strict=True):
        before = stop
        for document in its:
            if document <= before or (document - begin) % SECTION == 0:
                borders.append(size)
            places.append(np.arange(firsts[document], firsts[document + 1]))
            size, before = size + lengths[document], document
        borders.append(size)
    return np.concatenate(places), borders


@settings(max_examples=25)
@given(
    sizes=st.lists(st.sampled_from([1, 7, 8, 9, 17, 255, 256, 257, 264, 300]), min_size=1, max_size=3),
    lengths=st.sampled_from([[0, 1], [0, 0, 0, 30], [1, 2, 3, 50]]),
    profile=st.sampled_from(sorted(COUNTS)),
    is_version_1=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_ranges_begin_and_end_at_borders(
    sizes: list[int], lengths: list[int], profile: str, is_version_1: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    shards = [[*draw.choice(lengths, size - 1).tolist(), 1] for size in sizes]
    counts = draw.choice(COUNTS[profile], sum(sizes)).tolist()
    counts[-1] = max(1, counts[-1])
    places, borders = places_of(shards, counts)
    around = np.unique([max(0, min(each + by, places.size)) for each in borders for by in (-1, 0, 1)])
    starts, stops = np.sort(draw.choice(around, (60, 2))).T
    with tempfile.TemporaryDirectory() as name:
        folder = write_shards(Path(name) / "web", shards)
        file = write_view(folder, counts, Path(name) / "a.view")
        if is_version_1:
            write_version_1(file)
        with opened(folder, file) as view:
            pieces, rows = view.pieces(starts, stops)
            first = np.array(view.base.starts)
    at = [np.arange(start, start + size) + first[shard] for shard, start, size in pieces.tolist()]
    for number, (low, high) in enumerate(pairwise(rows.tolist())):
        found = np.concatenate([np.empty(0, np.int64), *at[low:high]])
        assert found.tolist() == places[starts[number] : stops[number]].tolist()
        assert high - low <= 1 + np.count_nonzero(np.diff(found) != 1) + len(sizes)


def test_a_view_of_version_1_is_the_same_corpus(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "web", [[3, 5, 2, 9] * 100])
    file = write_view(folder, [1, 0, 2, 3] * 100, tmp_path / "a.view")
    found = []
    for change in (lambda file: None, write_version_1):
        change(file)
        with opened(folder, file) as view:
            found.append((view.fingerprints, view.num_tokens, view.num_documents, view.find_problem()))
    assert found[0] == found[1]


def test_a_pass_may_have_more_tokens_than_32_bits_count(tmp_path: Path) -> None:
    lengths = [7, *[2**31 - 1] * 5, 9]
    folder = write_shards(tmp_path / "web", [lengths])
    ends = [0, *accumulate(lengths)]
    with opened(folder, write_view(folder, [1, 1, 0, 1, 1, 1, 2], tmp_path / "a.view")) as view:
        starts = np.array([0, 2**31 + 4, 2**32 + 4, view.num_tokens - 12])
        pieces, rows = view.pieces(starts, starts + 12)
    assert rows.tolist() == [0, 1, 3, 4, 6]
    assert pieces.tolist() == [
        [0, 0, 12],
        [0, ends[2] - 2, 2],
        [0, ends[3], 10],
        [0, ends[4] - 1, 12],
        [0, ends[7] - 3, 3],
        [0, ends[6], 9],
    ]


@pytest.mark.parametrize("seed", range(6))
def test_no_row_is_wrong_if_documents_end_elsewhere(tmp_path: Path, seed: int) -> None:
    """Tokens move from documents to others that come as often in their group: its number of tokens stays."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(5, 9, 2 * GROUP).tolist()
    counts = draw.integers(0, 3, 2 * GROUP).tolist()
    folder = write_shards(tmp_path / "web", [lengths])
    file = write_view(folder, counts, tmp_path / "a.view")
    places, _ = places_of([lengths], counts)
    moved = list(lengths)
    for _ in range(1 if seed % 2 else 2):
        one = int(draw.integers(0, GROUP))
        other = int(draw.choice([n for n in range(GROUP) if counts[n] == counts[one] and n != one]))
        moved[one], moved[other] = moved[one] + 3, moved[other] - 3
    write_documents(folder, 0, moved)
    refused = 0
    with opened(folder, file) as view:
        for start in range(places.size - 1):
            try:
                pieces = view.pieces(np.array([start]), np.array([start + 2])).places
            except CorpusChanged:
                refused += 1
            else:
                at = [first + k for _, first, size in pieces.tolist() for k in range(size)]
                assert at == places[start : start + 2].tolist()
    assert 0 < refused < places.size - 1
