"""Which documents have tokens in ranges: of the indices of all formats, of token ranges and of views."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_server.catalog import Catalog
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.index import index
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CorpusChanged
from tests.corpora import open_corpus, rewrite_in_place, spec, write_megatron, write_raw
from tests.server.corpus.formats import test_datatrove, test_litdata
from tests.views import write_corpus, write_view

LENGTHS = [[3, 1, 5, 2, 9], [1], [4, 4, 7]]


def texts(lengths: list[int]) -> list[list[int]]:
    return [[*range(1, length), 0] for length in lengths]


def indexed(folder: Path) -> Corpus:
    for number, lengths in enumerate(LENGTHS):
        write_raw(folder / f"{number}.bin", list(itertools.chain(*texts(lengths))))
    write_raw(folder / "3.bin", [])
    index(spec(folder, eot=0))
    return open_corpus(folder)


def cut(folder: Path) -> Corpus:
    indexed(folder).close()
    return open_corpus(folder, token_range=(2, 33))


def megatron(folder: Path) -> Corpus:
    """With empty documents, and an index whose arrays are not aligned."""
    for number, lengths in enumerate(LENGTHS):
        write_megatron(folder / str(number), [[], *texts(lengths), [], []])
    return open_corpus(folder)


def datatrove(folder: Path) -> Corpus:
    return open_corpus(test_datatrove.write(folder))


def litdata(folder: Path) -> Corpus:
    return open_corpus(test_litdata.write(folder, items=[[1, 2, 3], [], [4], [5, 6]]))


@pytest.fixture(params=[indexed, cut, megatron, datatrove, litdata])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Corpus:
    make: Callable[[Path], Corpus] = request.param
    return make(tmp_path)


def ranges_in_shards(corpus: Corpus) -> st.SearchStrategy[list[tuple[int, int]]]:
    shards = [bounds for bounds in itertools.pairwise(corpus.starts) if bounds[0] < bounds[1]]
    one = st.sampled_from(shards).flatmap(
        lambda bounds: st.tuples(
            st.integers(bounds[0], bounds[1] - 1), st.integers(bounds[0] + 1, bounds[1])
        ).filter(lambda pair: pair[0] < pair[1])
    )
    return st.lists(one, max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_documents_of_ranges_are_those_with_a_token_there(corpus: Corpus, data: st.DataObject) -> None:
    ranges = data.draw(ranges_in_shards(corpus))
    every = [corpus.document_range(number) for number in range(corpus.num_documents or 0)]
    expected = [
        [number for number, (a, b) in enumerate(every) if max(a, start) < min(b, stop)]
        for start, stop in ranges
    ]
    starts, stops = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    numbers, counts = corpus.documents(starts, stops)
    assert numbers.tolist() == list(itertools.chain(*expected))
    assert counts.tolist() == list(map(len, expected))


def test_those_of_a_view_are_documents_of_its_corpus(tmp_path: Path) -> None:
    lengths, times = [[3, 5, 4, 6], [2, 9]], [1, 0, 2, 1, 3, 1]
    web = write_corpus(tmp_path / "web", lengths)
    view = write_view(web, times, tmp_path / "hq.view")
    with Catalog.open([CorpusSpec.parse(f"hq={web}?view={view},dtype=uint32")]) as catalog:
        hq = catalog.corpora["hq"]
        for number in range(hq.num_documents or 0):
            start, stop = hq.document_range(number)
            found = hq.documents(np.array([start, start + 1]), np.array([stop, stop]))
            base = hq.base_document(number)  # type: ignore[attr-defined]
            assert [each.tolist() for each in found] == [[base, base], [1, 1]]
        start, stop = hq.document_range(0)[0], hq.document_range(2)[1]
        numbers, counts = hq.documents(np.array([start]), np.array([stop]))
        assert (numbers.tolist(), counts.tolist()) == ([0, 2, 3], [3])


def test_an_index_that_was_changed_is_an_error(tmp_path: Path) -> None:
    corpus = indexed(tmp_path)
    path = tmp_path / "0.bin.documents"
    rewrite_in_place(path, path.read_bytes())
    with corpus, pytest.raises(CorpusChanged):
        corpus.documents(np.array([0]), np.array([5]))
