"""MDS shards and litData chunks that cannot be mapped are copied into shards."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.job import BuildOptions
from corpus_server.tools.building.sources import check_first, plan_parts, read_documents

REAL = Path(__file__).parents[2] / "corpus/formats/real"
EXPECTED = json.loads((REAL / "expected.json").read_text())
IDS = BuildOptions(tokenizer=None, eot=2, vocab_size=None, column="tokens")
TEXT = BuildOptions(tokenizer="bytes", eot=0, vocab_size=256)


def read(path: Path, options: BuildOptions = IDS) -> list[Any]:
    parts = plan_parts(find_inputs([str(path)]).inputs)
    contents = [document.content for part in parts for document in read_documents(part, options)]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in contents]


def flat(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith(("mds_", "litdata_"))])
def test_files_by_the_real_writers_give_their_tokens(name: str) -> None:
    """Those that are refused for mapping, too: their tokens are the ones of the same documents mapped."""
    found = read(REAL / name, replace(IDS, mask=("none",)))  # its `attention_mask` holds any numbers
    same = name
    if "tokens" not in EXPECTED[name]:
        same = name.split("_")[0] + "_uint16" if name.startswith("mds") else "litdata_tensor_uint16"
    if "int64" in name or name == "mds_bytes":
        assert max(flat(found)) == np.iinfo("i8").max
        assert {len(row) for row in found} == ({16} if name.startswith("mds") else {10, 2, 13, 31, 5})
    else:
        assert flat(found) == EXPECTED[same]["tokens"]


@pytest.mark.parametrize(
    ("encoding", "value", "content"),
    [
        ("ndarray:uint16", b"\x04\x02\x07\x00\x08\x00", [7, 8]),
        ("ndarray", b"\x21\x04\x02\x07\0\0\0\xff\xff\xff\xff", [7, -1]),
        ("ndarray:uint16", b"\x05\x01\x00\x07\x00", [7]),
        ("bytes", struct.pack("<2q", 7, -1), [7, -1]),
        ("str", "Grüße".encode(), "Grüße"),
    ],
)
def test_every_encoding(tmp_path: Path, encoding: str, value: bytes, content: Any) -> None:
    options = TEXT if encoding == "str" else IDS
    name = options.column or "text"
    columns = [("id", "str", b"x"), (name, encoding, value), ("z", "uint8", b"\1")]
    (tmp_path / "shard.00000.mds").write_bytes(shard(columns))
    assert read(tmp_path, options) == [content]


def shard(columns: list[tuple[str, str, bytes]], keys: int = 3) -> bytes:
    sizes = [len(value) if kind == "uint8" else None for _, kind, value in columns]
    config = {
        "column_names": [name for name, _, _ in columns],
        "column_encodings": [kind for _, kind, _ in columns],
        "column_sizes": sizes,
    }
    text = json.dumps(dict(list(config.items())[:keys])).encode()
    varying = [len(value) for _, kind, value in columns if kind != "uint8"]
    sample = struct.pack(f"<{len(varying)}I", *varying) + b"".join(value for _, _, value in columns)
    return struct.pack("<3I", 1, 12 + len(text), 12 + len(text) + len(sample)) + text + sample


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (shard([("tokens", "str", b"x")]), IDS, "'tokens' is str, expected token ids"),
        (shard([("text", "bytes", bytes(8))]), TEXT, "'text' is bytes, expected text"),
        (shard([("tokens", "pkl", b"x")]), IDS, "its column is pkl, expected"),
        (shard([("other", "bytes", b"x")]), IDS, "has no field 'tokens', only 'other'"),
        (shard([("tokens", "bytes", bytes(8))])[:-1], IDS, "its samples end at byte"),
        (b"\1", IDS, "end inside the header"),
        (shard([("tokens", "bytes", bytes(8))], keys=2), IDS, "its config is damaged: KeyError"),
    ],
)
def test_what_is_no_shard_is_named(
    tmp_path: Path, content: bytes, options: BuildOptions, message: str
) -> None:
    (tmp_path / "shard.00000.mds").write_bytes(content)
    with pytest.raises(UnreadableCorpus, match=rf"shard\.00000\.mds: .*{message}"):
        read(tmp_path, options)


def test_text_of_a_compressed_shard(tmp_path: Path) -> None:
    (tmp_path / "shard.00000.mds.gz").write_bytes(gzip.compress(shard([("text", "str", b"To be")])))
    assert read(tmp_path, TEXT) == ["To be"]


def test_a_raw_token_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(8))
    with pytest.raises(UnreadableCorpus, match=r"no chunk that an index\.json of litData lists; serve it"):
        read(tmp_path / "train.bin")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"compression": "zstd", "compression_level": "batch"}, r"compressed \(compression_level 'batch'\)"),
        ({"compression": "zstd", "compression_level": "sample"}, r"'sample'\), and not the chunk as a whole"),
        ({"encryption": {"algorithm": "rsa"}}, "is encrypted, as index.json says; decrypt it first"),
        (
            {"data_format": ["no_header_numpy:3", "no_header_numpy:3"]},
            "expected an array of token ids or a dict",
        ),
    ],
)
def test_chunks_of_other_items_are_refused_before_any_work(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    shutil.copytree(REAL / "litdata_trees", tmp_path / "c")
    index = json.loads((tmp_path / "c" / "index.json").read_text())
    index["config"] |= config
    (tmp_path / "c" / "index.json").write_text(json.dumps(index))
    with pytest.raises(UnreadableCorpus, match=message):
        check_first(find_inputs([str(tmp_path / "c")]).inputs, IDS)


def test_a_chunk_holds_no_text(tmp_path: Path) -> None:
    shutil.copytree(REAL / "litdata_tensor_int64", tmp_path / "c")
    with pytest.raises(UnreadableCorpus, match="holds token ids; say --column tokens"):
        read(tmp_path / "c", TEXT)
