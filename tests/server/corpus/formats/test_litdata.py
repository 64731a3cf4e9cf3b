"""litData's chunks of tokens against their index, which is written here as litData writes it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.formats.litdata import dtype_name
from corpus_server.errors import UnreadableCorpus
from tests.corpora import open_corpus, recognise, write_raw

ITEMS = [[1, 2, 3], [4], [5, 6]]


def write(
    folder: Path,
    *,
    items: list[list[int]] = ITEMS,
    dim: int | None = 6,
    listed: bool = True,
    name: str = "chunk-0-0.bin",
    **config: Any,
) -> Path:
    path = folder / name
    data = [np.array(item, "<u2").tobytes() for item in items]
    offsets = (8 + 4 * len(items) + np.cumsum([0, *map(len, data)])).tolist()
    path.write_bytes(struct.pack(f"<{len(items) + 2}I", len(items), *offsets) + b"".join(data))
    settings = {"compression": None, "encryption": None, "data_format": ["no_header_tensor:20"], **config}
    chunks = (
        [{"filename": path.name, "dim": dim, "chunk_size": len(items), "chunk_bytes": 12}] if listed else []
    )
    (folder / "index.json").write_text(json.dumps({"config": settings, "chunks": chunks}))
    return path


def test_items_are_documents_of_one_sequence(tmp_path: Path) -> None:
    layout = recognise(write(tmp_path))
    assert (layout.format, layout.dtype.name, layout.runs[0].data_offset) == ("litdata", "uint16", 20)
    assert layout.reason == "index.json beside it lists it: no_header_tensor:20"
    with open_corpus(tmp_path) as corpus:
        assert corpus.shards[0].tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert [corpus.document_range(n) for n in range(3)] == [(0, 3), (3, 4), (4, 6)]


@pytest.mark.parametrize("items", [[], [[]], [[], [], []]])
def test_a_chunk_may_hold_no_tokens(tmp_path: Path, items: list[list[int]]) -> None:
    with open_corpus(write(tmp_path, items=items, dim=0)) as corpus:
        assert (corpus.num_tokens, corpus.num_documents) == (0, len(items))
        assert [each.tolist() for each in corpus.sequences()] == [[0] * len(items)] * 2


def test_items_that_begin_or_end_elsewhere_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    for first, last in ((21, 32), (20, 31)):
        path.write_bytes(
            whole[:4] + struct.pack("<I", first) + whole[8:16] + struct.pack("<I", last) + whole[20:]
        )
        with pytest.raises(UnreadableCorpus) as caught:
            recognise(path)
        assert caught.value.detail == (
            f"{path}: its items lie at bytes {first} to {last}, expected 20 to 32; "
            "was the copy interrupted? Copy it again"
        )


@pytest.mark.parametrize("name", ["chunk-0-0.raw", "other-0-0.bin"])
def test_another_name_beside_the_index_is_no_chunk(tmp_path: Path, name: str) -> None:
    assert recognise(write(tmp_path, name=name)).format == "raw"


@pytest.mark.parametrize(
    ("serializer", "dtypes"),
    [
        (
            "no_header_tensor",
            {
                0: "float32",
                1: "float32",
                2: "float64",
                3: "float64",
                8: "float16",
                9: "float16",
                11: "uint8",
                12: "int8",
                13: "int16",
                14: "int16",
                15: "int32",
                16: "int32",
                17: "int64",
                18: "int64",
                19: "bool",
                20: "uint16",
            },
        ),
        (
            "no_header_numpy",
            {
                0: "int8",
                1: "int16",
                2: "int32",
                3: "int64",
                4: "uint8",
                5: "uint16",
                6: "uint32",
                7: "uint64",
                8: "float16",
                9: "float32",
                10: "float64",
                13: "bool",
            },
        ),
        ("jpeg", {}),
    ],
)
def test_the_numbers_of_litdata_name_its_dtypes(serializer: str, dtypes: dict[int, str]) -> None:
    names = {number: dtype_name(f"{serializer}:{number}") for number in range(30)}
    assert {number: name for number, name in names.items() if name is not None} == dtypes
    assert [dtype_name(each) for each in (serializer, f"{serializer}:x", "")] == [None] * 3


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"compression": "zstd"}, "index.json says compression zstd"),
        ({"encryption": {"level": "chunk"}}, "says that it is encrypted; decrypt it first$"),
        ({"data_format": ["no_header_tensor:18"]}, r"its tokens are int64, served are .*build .* --column"),
        (
            {"data_format": ["no_header_numpy:99"]},
            "its items are no_header_numpy:99, expected one array of token ids; write",
        ),
        (
            {"data_format": ["no_header_tensor:20", "int"]},
            "its items are no_header_tensor:20, int, expected one array",
        ),
        ({"data_format": ["jpeg"]}, "its items are jpeg, expected one array"),
        ({"dim": None}, "written without TokensLoader"),
        ({"dim": 5}, "holds 6 tokens, its header says 5"),
        ({"listed": False}, "is not among the chunks that index.json lists"),
        ({"dim": "6"}, "is no index of litData: .*a chunk's dim is '6'"),
        ({"data_format": None}, "is no index of litData"),
    ],
)
def test_what_cannot_be_mapped_is_refused(tmp_path: Path, index: dict[str, Any], message: str) -> None:
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(write(tmp_path, **index))


def test_every_other_length_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    for length in [*range(len(whole)), len(whole) + 2]:
        path.write_bytes((whole + bytes(2))[:length])
        with pytest.raises(UnreadableCorpus, match="copy interrupted"):
            recognise(path)


def test_the_number_of_items_has_four_bytes(tmp_path: Path) -> None:
    """A number that the first three bytes do not hold is no other number."""
    path = write(tmp_path)
    path.write_bytes(struct.pack("<I", 2**24) + path.read_bytes()[4:])
    with pytest.raises(UnreadableCorpus, match="32 bytes end inside litData's header"):
        recognise(path)


def test_without_its_index_a_chunk_is_a_raw_file(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "chunk-0-0.bin", [1, 2])
    assert recognise(path).format == "raw"
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(UnreadableCorpus, match="is no index of litData"):
        recognise(path)
