"""A token range is a corpus of its own: nothing outside it is ever read or counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.corpus.index import index
from corpus_server.corpus.verify import record, verify
from corpus_server.errors import InvalidParameter
from tests.corpora import (
    megatron_index,
    open_corpus,
    open_files,
    some_tokens,
    spec,
    write_llmc,
    write_megatron,
    write_raw,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 5 (2 documents), 0, 7 (3) and 4 tokens: 16 in all, numbered from 1; 0 ends a document."""
    path = tmp_path_factory.mktemp("c")
    write_llmc(path / "0.bin", [1, 2, 0, 4, 5])
    write_raw(path / "1.bin", [])
    write_raw(path / "2.npy", [6, 0, 8, 9, 0, 11, 12])
    write_raw(path / "3.bin", [13, 14, 15, 0])
    index(spec(path, eot=0))
    return path


TOKENS = [1, 2, 0, 4, 5, 6, 0, 8, 9, 0, 11, 12, 13, 14, 15, 0]
DOCUMENTS = [(0, 3), (3, 5), (5, 7), (7, 10), (10, 12), (12, 16)]


@given(bounds=st.tuples(st.integers(0, 15), st.integers(1, 16)).filter(lambda pair: pair[0] < pair[1]))
def test_tokens_and_documents_are_those_of_the_range(folder: Path, bounds: tuple[int, int]) -> None:
    start, stop = bounds
    with open_corpus(folder, token_range=bounds) as corpus:
        assert np.concatenate([shard.tokens for shard in corpus.shards]).tolist() == TOKENS[start:stop]
        assert all(shard.num_tokens for shard in corpus.shards)
        assert corpus.num_tokens == stop - start
        cut = [(max(a, start) - start, min(b, stop) - start) for a, b in DOCUMENTS if a < stop and start < b]
        assert [corpus.document_range(n) for n in range(corpus.num_documents or 0)] == cut
        assert corpus.eot == 0
        for shard in corpus.shards:
            data = (folder / shard.name).read_bytes()[shard.data_offset :]
            assert np.frombuffer(data, "<u2", count=shard.num_tokens).tolist() == shard.tokens.tolist()
            assert shard.read_data(0, 2) == shard.tokens[:1].tobytes()


def test_documents_of_a_megatron_pair_are_cut(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[1, 2, 3], [], [4, 5, 6, 7], [8]])
    with open_corpus(tmp_path / "x", token_range=(1, 6)) as corpus:
        assert corpus.num_documents == 3
        assert [corpus.document_range(n) for n in range(3)] == [(0, 2), (2, 2), (2, 5)]


def test_a_range_has_no_whole_sequences(folder: Path) -> None:
    with open_corpus(folder, token_range=(1, 6)) as corpus, pytest.raises(InvalidParameter) as caught:
        corpus.sequences()
    assert caught.value.detail == (
        "corpus 'c': 0.bin.documents: the token_range of the corpus, [1, 5) of it, may cut a sequence in two"
    )
    assert caught.value.parameter == "token_range"
    assert caught.value.remedy == "serve it without token_range; order megatron has a split of its own"


def test_verify_reads_the_whole_index_of_a_range(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", [[1]] * 1000)
    part = spec(path, token_range=(10, 20))
    assert verify(part).ok
    pointers = list(range(0, 2000, 2))
    pointers[500] += 2
    path.with_suffix(".idx").write_bytes(megatron_index([1] * 1000, pointers=pointers))
    assert [problem.detail for problem in verify(part).problems] == [
        "x.idx: sequence 500 does not begin where the one before it ends, or has a negative length"
    ]


def test_without_all_shards_nobody_knows_where_a_range_is(tmp_path: Path) -> None:
    """Then the shards that can be read are verified whole."""
    for name in ("0.bin", "1.bin"):
        write_llmc(tmp_path / name, [1, 2, 3])
    part = spec(tmp_path, token_range=(2, 5))
    assert (verify(part).num_tokens, verify(part).num_shards) == (3, 2)
    (tmp_path / "0.bin").write_bytes((tmp_path / "0.bin").read_bytes()[:-2])
    found = verify(part)
    assert [problem.shard for problem in found.problems] == ["0.bin"]
    assert found.num_tokens == 3


def test_the_fingerprint_is_that_of_the_content(folder: Path, tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", TOKENS[2:5])
    write_raw(tmp_path / "b.bin", TOKENS[5:8])
    with open_corpus(folder, token_range=(2, 8)) as part, open_corpus(tmp_path) as same:
        assert part.fingerprint == same.fingerprint
    with open_corpus(folder, token_range=(0, 16)) as all_of_it:
        fingerprint = all_of_it.fingerprint
    (tmp_path / "whole").mkdir()
    for name, tokens in (("a", TOKENS[:5]), ("b", TOKENS[5:12]), ("c", TOKENS[12:])):
        write_raw(tmp_path / "whole" / f"{name}.bin", tokens)
    with open_corpus(tmp_path / "whole") as same:
        assert same.fingerprint == fingerprint


def test_hashes_of_a_range_are_its_own(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", some_tokens(5000))
    part = spec(path, token_range=(1000, 3000))
    recorded = record(part)
    assert verify(part).fingerprint == recorded.fingerprints["full"]
    assert verify(spec(path)).sidecar is None
    with path.open("r+b") as file:
        file.seek(2 * 4000)
        file.write(b"\xff\xff")
        assert verify(part).ok
        file.seek(2 * 2000)
        file.write(b"\xff\xff")
    (bad,) = verify(part).bad_blocks
    assert (bad.start, bad.stop) == (0, 2000)


@pytest.mark.parametrize("bounds", [(0, 17), (16, 20)])
def test_a_range_that_is_not_there_is_refused(folder: Path, bounds: tuple[int, int]) -> None:
    before = open_files()
    with pytest.raises(
        InvalidParameter, match=r"token_range must be within the 16 tokens of the files, got \["
    ):
        open_corpus(folder, token_range=bounds)
    assert not open_files() - before
