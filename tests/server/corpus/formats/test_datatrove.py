"""datatrove's files: the worked bytes, and every contradiction between the three of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.formats.layout import Run, ShardLayout
from corpus_server.errors import UnreadableCorpus
from tests.corpora import open_files, recognise

TOKENS = bytes.fromhex("05000600070002000800020009000a000200")
INDEX = bytes.fromhex("040000000000000006000000000000000900000000000000")


def write(
    folder: Path, tokens: bytes = TOKENS, index: bytes | None = INDEX, metadata: str | None = "gpt2|2\n9\n9 T"
) -> Path:
    (folder / "a.ds").write_bytes(tokens)
    if index is not None:
        (folder / "a.ds.index").write_bytes(index)
    if metadata is not None:
        (folder / "a.ds.metadata").write_text(metadata)
    return folder / "a.ds"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "its .ds.metadata says the token size"),
        ({"metadata": "a|b|2"}, "its .ds.metadata says the token size"),
        ({"metadata": None}, "its .ds.index gives the token size"),
    ],
)
def test_worked_bytes(tmp_path: Path, files: dict[str, str | None], reason: str) -> None:
    layout = recognise(write(tmp_path, **files))
    assert replace(layout, documents=None) == ShardLayout(
        format="datatrove", reason=reason, dtype=np.dtype("<u2"), runs=(Run(0, 9),)
    )
    assert layout.documents is not None
    assert [layout.documents.document_range(n) for n in range(3)] == [(0, 4), (4, 6), (6, 9)]
    assert layout.documents.find_problem() is None


def test_without_index_there_are_no_documents(tmp_path: Path) -> None:
    assert recognise(write(tmp_path, index=None)).documents is None


def test_without_index_and_metadata_the_dtype_must_be_said(tmp_path: Path) -> None:
    path = write(tmp_path, index=None, metadata=None)
    with pytest.raises(UnreadableCorpus, match=r"neither a\.ds\.metadata nor a\.ds\.index says which.*dtype"):
        recognise(path)
    assert recognise(path, dtype="uint16").num_tokens == 9


@pytest.mark.parametrize(
    ("files", "dtype", "message"),
    [
        ({}, "uint32", "holds uint16 tokens, but dtype uint32 was asked for"),
        ({"metadata": "gpt2|4\n9"}, None, "says 9 tokens of 4 bytes, but a.ds holds 18 bytes"),
        ({"metadata": "gpt2|2\n8"}, None, "says 8 tokens of 2 bytes"),
        ({"metadata": "gpt2|8\n9"}, None, r"with size 2 or 4, got \['gpt2\|8'\]; copy it again"),
        ({"metadata": "gpt2|\n9"}, None, r"with size 2 or 4, got \['gpt2\|'\]; copy it again"),
        ({"metadata": ""}, None, r"with size 2 or 4, got \[\]; copy it again"),
        ({"metadata": "gpt2|4"}, None, "18 bytes are not a whole number of uint32 tokens"),
        ({"metadata": "gpt2|2", "tokens": TOKENS[:-2]}, None, "the end of a.ds.index at token 9"),
        ({"metadata": "gpt2|2", "index": INDEX[:-8]}, None, "the end of a.ds.index at token 6"),
        ({"index": INDEX[:-1]}, None, "23 bytes are not a whole number of ends"),
        ({"metadata": None, "index": INDEX[:-8]}, None, "no tokens of 2 or 4 bytes: a.ds.index counts 6"),
        ({"metadata": None, "index": INDEX[:-8]}, "uint16", "the end of a.ds.index at token 6"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, files: dict[str, str | bytes | None], dtype: str | None, message: str
) -> None:
    path = write(tmp_path, **files)  # type: ignore[arg-type]
    before = open_files()
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(path, dtype=dtype)
    assert not open_files() - before


def test_an_empty_file(tmp_path: Path) -> None:
    layout = recognise(write(tmp_path, tokens=b"", index=b"", metadata="gpt2|2\n0"))
    assert layout.documents is not None
    assert (layout.num_tokens, layout.documents.num_documents) == (0, 0)


@pytest.mark.parametrize("name", ["a.ds.index", "a.ds.metadata", "a.ds.loss"])
def test_a_side_file_is_no_corpus(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(INDEX)
    with pytest.raises(UnreadableCorpus, match=r"datatrove.*not served; name the token file beside it"):
        recognise(tmp_path / name)
