"""Samples of ids: bounded, and compared with the tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.sample import sample_ids
from tests.corpora import open_corpus, write_npy, write_raw, write_sparse


def test_a_small_corpus_is_sampled_whole(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [7, 9])
    write_npy(tmp_path / "b.npy", [-5, 100_000], dtype="int32")
    write_raw(tmp_path / "c.bin", [])
    with open_corpus(tmp_path) as corpus:
        assert sample_ids(corpus.shards) == (4, -5, 100_000)


def test_an_empty_corpus_has_no_sample(tmp_path: Path) -> None:
    with open_corpus(write_raw(tmp_path / "a.bin", [])) as corpus:
        assert sample_ids(corpus.shards) is None
        assert corpus.vocabulary_warning() is None


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_a_large_corpus_is_read_in_a_few_blocks_of_whole_tokens(tmp_path: Path, dtype: str) -> None:
    num_tokens = 10**9 + 1
    path = write_sparse(tmp_path / "a.bin", num_tokens, dtype=dtype, at={num_tokens - 1: 77})
    with open_corpus(path, dtype=dtype) as corpus:
        ids = sample_ids(corpus.shards)
    assert ids is not None
    assert ids.num_tokens == 64 * 4096 // np.dtype(dtype).itemsize
    assert (ids.smallest, ids.largest) == (0, 77)


@pytest.mark.parametrize(("num_shards", "num_samples"), [(3, 21), (32, 2), (40, 2)])
def test_every_shard_is_sampled_at_its_start_and_its_end(
    tmp_path: Path, num_shards: int, num_samples: int
) -> None:
    for number in range(num_shards):
        write_raw(tmp_path / f"{number}.bin", np.arange(50_000) + 1000 + 10 * number)
    with open_corpus(tmp_path) as corpus:
        ids = sample_ids(corpus.shards)
    assert ids == (num_shards * num_samples * 2048, 1000, 50_999 + 10 * (num_shards - 1))


@pytest.mark.parametrize(
    ("tokens", "strange"),
    [([255], None), ([0], None), ([3, 256, 2], 256), ([0, 256], 256), ([-1, 3], -1)],
    ids=["fits", "zero", "above", "zero-and-above", "below"],
)
def test_ids_that_the_tokenizer_does_not_have_are_named(
    tmp_path: Path, tokens: list[int], strange: int | None
) -> None:
    write_npy(tmp_path / "a.npy", np.array(tokens), dtype="int32")
    with open_corpus(tmp_path, tokenizer="bytes") as corpus:
        warning = corpus.vocabulary_warning()
    if strange is None:
        assert warning is None
    else:
        assert warning is not None
        assert (
            f"corpus 'c' holds token {strange}, but the ids of its tokenizer (bytes) are below 256" in warning
        )


def test_without_tokenizer_there_is_no_warning(tmp_path: Path) -> None:
    with open_corpus(write_raw(tmp_path / "a.bin", [65_535])) as corpus:
        assert corpus.vocabulary_warning() is None
