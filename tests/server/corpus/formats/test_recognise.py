"""Files that are known but not served, and paths that are no files."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus_server.errors import UnreadableCorpus
from tests.corpora import open_descriptors, recognise, write_llmc, write_megatron, write_npy, write_raw


def test_each_format_is_told_by_its_content_alone(tmp_path: Path) -> None:
    """The same name, four formats."""
    for writer, expected in [(write_raw, "raw"), (write_npy, "npy"), (write_llmc, "llm.c")]:
        assert recognise(writer(tmp_path / "train.bin", [1, 2, 3])).format == expected
    assert recognise(write_megatron(tmp_path / "train", [[1, 2, 3]])).format == "megatron"


def test_nothing_stays_open_after_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(3))
    path = write_megatron(tmp_path / "y", [[1, 2]])
    before = open_descriptors()
    for dtype, target in [(None, tmp_path / "x.bin"), ("int32", path), (None, tmp_path)]:
        with pytest.raises(UnreadableCorpus) as caught:
            recognise(target, dtype=dtype)
        assert open_descriptors() == before
        assert caught.tb is not None  # it would keep a file open that nobody has closed
