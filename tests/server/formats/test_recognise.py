"""Files that are known but not served, and paths that are no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corpus_server.errors import UnreadableCorpus
from corpus_server.formats import recognise
from tests.corpora import open_descriptors, write_llmc, write_megatron, write_npy, write_raw


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("shard.00000.mds", "an MDS shard"),
        ("train.parquet", "a Parquet file"),
        ("train.arrow", "an Arrow file"),
        ("train.jsonl", "JSON lines"),
        ("train.jsonl.gz", "a gzip file"),
        ("train.BIN.ZST", "a Zstandard file"),
        ("train.npz", "a NumPy archive"),
        ("train.pt", "a torch file"),
        ("part.ds.index", "a datatrove index"),
        ("part.ds.metadata", "datatrove metadata"),
    ],
)
def test_foreign_formats_are_refused_by_name(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(UnreadableCorpus, match=f"{what}.*not served; .+") as caught:
        recognise(write_raw(tmp_path / name, [1, 2]), dtype="uint16")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("magic", "what"),
    [
        (b"PAR1", "a Parquet file"),
        (b"ARROW1\0\0", "an Arrow file"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x28\xb5\x2f\xfd", "a Zstandard file"),
        (b"\x1f\x8b\x08\x00", "a gzip file"),
        (b"MMIDIDX\0\0", "a Megatron index under another name"),
    ],
)
def test_foreign_formats_are_refused_by_content(tmp_path: Path, magic: bytes, what: str) -> None:
    (tmp_path / "train.bin").write_bytes(magic + bytes(100))
    with pytest.raises(UnreadableCorpus, match=what):
        recognise(tmp_path / "train.bin")


def test_a_litdata_chunk_is_no_raw_file(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "chunk-0-0.bin", [1, 2])
    assert recognise(path).format == "raw"
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(UnreadableCorpus, match="a litData chunk"):
        recognise(path)


def test_each_format_is_told_by_its_content_alone(tmp_path: Path) -> None:
    """The same name, four formats."""
    for writer, expected in [(write_raw, "raw"), (write_npy, "npy"), (write_llmc, "llm.c")]:
        assert recognise(writer(tmp_path / "train.bin", [1, 2, 3])).format == expected
    assert recognise(write_megatron(tmp_path / "train", [[1, 2, 3]])).format == "megatron"


def test_what_is_no_file_is_refused_without_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(UnreadableCorpus, match="expected a regular file"):
        recognise(tmp_path / "pipe.bin")
    with pytest.raises(UnreadableCorpus, match="expected a regular file"):
        recognise(tmp_path)
    with pytest.raises(UnreadableCorpus, match="No such file"):
        recognise(tmp_path / "missing.bin")
    with pytest.raises(UnreadableCorpus, match="null byte"):
        recognise("a\0b.bin")


def test_nothing_stays_open_after_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(3))
    path = write_megatron(tmp_path / "y", [[1, 2]])
    before = open_descriptors()
    for dtype, target in [(None, tmp_path / "x.bin"), ("int32", path), (None, tmp_path)]:
        with pytest.raises(UnreadableCorpus):
            recognise(target, dtype=dtype)
    assert open_descriptors() == before
