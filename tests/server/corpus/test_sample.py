"""Samples of ids: bounded, and compared with the tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.corpora import open_corpus, write_npy, write_raw


def test_a_small_corpus_is_sampled_whole(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [7, 9])
    write_npy(tmp_path / "b.npy", [-5, 100_000], dtype="int32")
    write_raw(tmp_path / "c.bin", [])
    with open_corpus(tmp_path) as corpus:
        assert corpus.sampled_ids == (4, -5, 100_000)


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
