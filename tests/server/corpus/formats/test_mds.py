"""MDS shards: damaged headers, and columns that do not lie contiguous."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from corpus_server.errors import UnreadableCorpus
from tests.corpora import recognise

CONFIG = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16:4"], "column_sizes": [8]}


def shard(config: Any = CONFIG, *, num_samples: int = 3, sizes: int = 8) -> bytes:
    if isinstance(config, dict):
        config = {"column_sizes": [None] * len(config.get("column_names", ())), **config}
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    first = 4 + 4 * (num_samples + 1) + len(text)
    offsets = [first + sizes * i for i in range(num_samples + 1)]
    return (
        struct.pack(f"<{num_samples + 2}I", num_samples, *offsets) + text + bytes(range(sizes * num_samples))
    )


def test_samples_of_one_length_are_one_sequence(tmp_path: Path) -> None:
    (tmp_path / "shard.00000.mds").write_bytes(shard())
    layout = recognise(tmp_path / "shard.00000.mds")
    assert (layout.format, layout.dtype.name, layout.num_tokens) == ("mds", "uint16", 12)
    assert layout.reason == "named .mds, its single column is tokens (ndarray:uint16:4)"
    assert shard()[layout.runs[0].data_offset :] == bytes(range(24))


def test_every_other_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds"
    for length in [*range(len(shard())), len(shard()) + 1, len(shard()) + 2]:
        path.write_bytes((shard() + bytes(2))[:length])
        with pytest.raises(UnreadableCorpus, match="copy interrupted"):
            recognise(path)


def test_a_sample_may_have_several_dimensions(tmp_path: Path) -> None:
    config = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16:2,3"]}
    (tmp_path / "a.mds").write_bytes(shard(config, sizes=12))
    assert recognise(tmp_path / "a.mds").num_tokens == 18


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"", r"its MDS header is damaged: 3 samples beginning at byte 20 do not fit; was the copy"),
        (b"{", "header is damaged"),
        ([], "header is damaged"),
        ({}, "header is damaged"),
        (CONFIG | {"column_names": []}, "header is damaged"),
        (CONFIG | {"column_encodings": []}, "header is damaged"),
        (CONFIG | {"column_encodings": [5]}, "its config does not name its columns"),
        (CONFIG | {"column_names": [5]}, "its config does not name its columns"),
        (
            CONFIG | {"column_encodings": ["ndarray:uint16"]},
            r"samples hold tokens \(ndarray:uint16\): .*build",
        ),
        (CONFIG | {"column_encodings": ["bytes"]}, r"samples hold tokens \(bytes\)"),
        (CONFIG | {"column_encodings": ["ndarray:int64:1"]}, "holds int64, served are"),
    ],
)
def test_other_columns_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    (tmp_path / "shard.00000.mds").write_bytes(shard(config))
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(tmp_path / "shard.00000.mds")


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        ({"id": "str", "input_ids": "bytes"}, "--column input_ids --eot"),
        ({"input_ids": "bytes", "tokens": "ndarray:int64"}, "--column tokens --eot"),
        ({"tokens": "str", "a": "ndarray", "b": "bytes"}, "--column a --eot"),
        ({"a": "int", "b": "int"}, "--column a --eot"),
        ({"story": "str"}, "--text-field story --tokenizer"),
        ({"id": "int", "story": "str", "title": "str"}, "--text-field story --tokenizer"),
        ({"text": "str"}, "--tokenizer"),
    ],
)
def test_the_remedy_names_folder_and_column(tmp_path: Path, columns: dict[str, str], remedy: str) -> None:
    config = {"column_names": list(columns), "column_encodings": list(columns.values())}
    (tmp_path / "shard.00000.mds").write_bytes(shard(config))
    with pytest.raises(UnreadableCorpus, match=rf"corpus-server build {tmp_path} {remedy} "):
        recognise(tmp_path / "shard.00000.mds")
