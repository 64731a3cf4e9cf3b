"""What all formats share: files whose header counts their tokens, and the remedies for other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats import Run, ShardLayout
from corpus_server.corpus.formats.layout import build_ids, build_text, counted_layout
from corpus_server.errors import UnreadableCorpus


def counted(path: Path, data_offset: int, num_tokens: int) -> ShardLayout:
    with OpenFile(path) as file:
        return counted_layout(
            file,
            name="test",
            reason="it is one",
            dtype=np.dtype("<u4"),
            data_offset=data_offset,
            num_tokens=num_tokens,
        )


@pytest.mark.parametrize(("num_bytes", "num_tokens"), [(8, 0), (12, 1), (40, 8)])
def test_a_file_of_the_size_that_its_header_says(tmp_path: Path, num_bytes: int, num_tokens: int) -> None:
    (tmp_path / "a").write_bytes(bytes(num_bytes))
    assert counted(tmp_path / "a", 8, num_tokens) == ShardLayout(
        format="test", reason="it is one", dtype=np.dtype("<u4"), runs=(Run(8, num_tokens),)
    )


@pytest.mark.parametrize(
    ("num_bytes", "num_tokens", "said"),
    [
        (16, 3, "holds 2 tokens, its header says 3 (16 bytes, expected 20)"),
        (17, 2, "holds 2.25 tokens, its header says 2 (17 bytes, expected 16)"),
        (4, -1, "holds -1 tokens, its header says -1 (4 bytes, expected 4)"),
    ],
    ids=["shorter", "longer", "negative"],
)
def test_a_file_of_another_size_is_refused(
    tmp_path: Path, num_bytes: int, num_tokens: int, said: str
) -> None:
    (tmp_path / "a").write_bytes(bytes(num_bytes))
    with pytest.raises(UnreadableCorpus) as caught:
        counted(tmp_path / "a", 8, num_tokens)
    assert caught.value.detail == f"{tmp_path / 'a'}: {said}; was the copy interrupted? Copy it again"


def test_remedies_are_commands_for_a_shell() -> None:
    path = Path("/my data/a.jsonl")
    assert build_ids(path) == (
        "copy its token ids into shards: corpus-server build '/my data/a.jsonl' --column input_ids "
        "--eot ID --out DIR"
    )
    assert build_text(path) == (
        "tokenize its text: corpus-server build '/my data/a.jsonl' --tokenizer tokenizer.json --out DIR"
    )
    assert build_text(path, "story") == (
        "tokenize its text: corpus-server build '/my data/a.jsonl' --text-field story --tokenizer "
        "tokenizer.json --out DIR"
    )
