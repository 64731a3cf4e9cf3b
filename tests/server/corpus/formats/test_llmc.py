"""llm.c's files against their worked bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from corpus_server.errors import UnreadableCorpus
from tests.corpora import recognise, write_llmc

GPT2 = bytes.fromhex("88d834010100000005000000") + bytes(1012) + bytes.fromhex("50c401000200030050c4")
LLAMA3 = bytes.fromhex("a1d934010700000003000000") + bytes(1012) + bytes.fromhex("00f401000100000001f40100")


@pytest.mark.parametrize(
    ("content", "dtype", "tokens"),
    [(GPT2, "uint16", [50256, 1, 2, 3, 50256]), (LLAMA3, "uint32", [128000, 1, 128001])],
    ids=["version 1", "version 7"],
)
def test_worked_bytes(tmp_path: Path, content: bytes, dtype: str, tokens: list[int]) -> None:
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(content)
    layout = recognise(path)
    assert (layout.format, layout.dtype.name, layout.runs[0].data_offset) == ("llm.c", dtype, 1024)
    assert layout.num_tokens == len(tokens)
    assert np.fromfile(path, layout.dtype, offset=1024).tolist() == tokens
    assert write_llmc(tmp_path / "written.bin", tokens, dtype=dtype).read_bytes() == content


def test_refuses_a_file_cut_or_grown_at_any_byte_after_its_magic(tmp_path: Path) -> None:
    for length in [*range(4, len(GPT2)), len(GPT2) + 1, len(GPT2) + 2]:
        (tmp_path / "a.bin").write_bytes((GPT2 + bytes(2))[:length])
        with pytest.raises(UnreadableCorpus, match="was the copy interrupted"):
            recognise(tmp_path / "a.bin")


def test_a_truncated_copy_is_named_with_both_counts(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(GPT2[:-2])
    message = r"holds 4 tokens, its header says 5 \(1032 bytes, expected 1034\); was the copy"
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((20240520, 2, 0), "magic 20240520 with version 2 is unknown"),
        ((20240520, 7, 0), "known: 20240520 with version 1, 20240801 with version 7"),
        ((20240801, 7, -1), "header says -1"),
        ((20240326, 3, 0), "is a model checkpoint of llm.c"),
        ((20240327, 1, 0), "is a debug state of llm.c"),
        ((20240522, 1, 0), "is an evaluation set of llm.c"),
    ],
)
def test_refuses_other_headers(tmp_path: Path, header: tuple[int, int, int], message: str) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<iii", *header) + bytes(1012))
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(tmp_path / "a.bin")
