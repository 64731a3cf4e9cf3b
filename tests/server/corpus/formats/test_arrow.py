"""Arrow: where the ids of each batch lie, and what cannot be mapped."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.formats import registry
from corpus_server.corpus.formats.layout import ShardLayout
from corpus_server.corpus.index import index
from corpus_server.errors import UnreadableCorpus
from corpus_server.plan import Plan
from corpus_server.read.reading import WindowReading
from corpus_server.work import Budget
from tests.corpora import (
    open_corpus,
    open_files,
    recognise,
    some_tokens,
    spec,
    write_arrow,
    write_raw,
)
from tests.serving import command, environment

KINDS = ("stream", "file")
ROWS = some_tokens(23 * 8).reshape(23, 8)


def lists(rows: Any = ROWS, *, ids: str = "uint16", length: int | None = None, **columns: Any) -> pa.Table:
    """Return a table of rows of ids; `length` makes fixed-size lists. Other columns come first."""
    kind = pa.list_(pa.type_for_alias(ids), -1 if length is None else length)
    rows = rows.tolist() if isinstance(rows, np.ndarray) else rows
    return pa.table({**columns, "input_ids": pa.array(rows, kind)})


def tokens(path: Path, layout: ShardLayout) -> list[np.ndarray[Any, Any]]:
    content = path.read_bytes()
    return [np.frombuffer(content, layout.dtype, count, offset) for offset, count in layout.runs]


def flat(runs: Sequence[np.ndarray[Any, Any]]) -> list[int]:
    return np.concatenate(runs).tolist()


# By pyarrow 26.0.1: two rows of a list of uint16.
STREAM = bytes.fromhex(
    """
    ffffffffa80000001000000000000a000c000600050008000a000000000104000c00000008000800000004000800000004000000
    0100000004000000ccffffff0000010c140000002400000004000000010000002c00000009000000696e7075745f696473000000
    0400040004000000100014000800060007000c00000010001000000000000102100000001c000000040000000000000004000000
    6974656d00000600080004000600000010000000ffffffffb800000014000000000000000c0016000600050008000c000c000000
    0003040018000000200000000000000000000a0018000c00040008000a0000005c00000010000000020000000000000000000000
    040000000000000000000000000000000000000000000000000000000c0000000000000010000000000000000000000000000000
    10000000000000000c00000000000000000000000200000002000000000000000000000000000000060000000000000000000000
    000000000000000003000000060000000000000001000200030004000500060000000000ffffffff00000000
    """
)


def test_bytes_by_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(STREAM)
    layout = recognise(path)
    assert [list(each) for each in tokens(path, layout)] == [[1, 2, 3, 4, 5, 6]]
    assert layout.runs == ((STREAM.index(bytes([1, 0, 2, 0, 3, 0, 4, 0])), 6),)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [None, 8])
@pytest.mark.parametrize("ids", ["uint8", "uint16", "uint32", "int32"])
def test_each_batch_is_a_run(tmp_path: Path, kind: str, length: int | None, ids: str) -> None:
    rows = some_tokens(23 * 8, dtype=ids).reshape(23, 8)
    path = write_arrow(tmp_path / "a.arrow", lists(rows, ids=ids, length=length), rows=10, kind=kind)
    layout = recognise(path)
    assert (layout.format, layout.dtype.name) == ("arrow", ids)
    assert layout.reason == "named .arrow, rows of 8 tokens in its column input_ids"
    assert [run.num_tokens for run in layout.runs] == [80, 80, 24]
    assert flat(tokens(path, layout)) == rows.ravel().tolist()


OTHERS = {
    "null": pa.nulls(23),
    "numbers": pa.array([None, *range(22)]),
    "floats": pa.array([0.5] * 23, pa.float16()),
    "truths": pa.array([True] * 23),
    "texts": pa.array(["t"] * 22 + [None]),
    "large texts": pa.array(["t"] * 23, pa.large_string()),
    "bytes": pa.array([b"b"] * 23),
    "fixed bytes": pa.array([b"bb"] * 23, pa.binary(2)),
    "decimals": pa.array([3] * 23).cast(pa.decimal128(20)),
    "times": pa.array([3] * 23, pa.timestamp("s")),
    "durations": pa.array([3] * 23, pa.duration("s")),
    "days": pa.array([3] * 23, pa.date32()),
    "lists": pa.array([["a", "b"]] * 23),
    "large lists": pa.array([[1]] * 23, pa.large_list(pa.int8())),
    "fixed lists": pa.array([[1, 2]] * 23, pa.list_(pa.int8(), 2)),
    "structs": pa.array([{"a": 1, "b": ["t"]}] * 23),
    "maps": pa.array([[("k", 1)]] * 23, pa.map_(pa.string(), pa.int8())),
    "dictionary": pa.array(["a", "b", None] * 7 + ["a", "b"]).dictionary_encode(),
    "lists in a dictionary": pa.DictionaryArray.from_arrays(
        pa.array([0] * 23, pa.int8()), pa.array([["x", "y"]])
    ),
    "run ends": pa.RunEndEncodedArray.from_arrays(pa.array([23], pa.int32()), pa.array(["t"])),
    "list views": pa.ListViewArray.from_arrays([0] * 23, [1] * 23, pa.array([7])),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*OTHERS, None])
def test_other_columns_are_passed_over(tmp_path: Path, kind: str, name: str | None) -> None:
    before = OTHERS if name is None else {name: OTHERS[name]}
    path = write_arrow(tmp_path / "a.arrow", lists(**before), kind=kind)
    assert flat(tokens(path, recognise(path))) == ROWS.ravel().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_large_lists_slices_and_batches_without_rows(tmp_path: Path, kind: str) -> None:
    column = pa.array(ROWS.tolist(), pa.large_list(pa.uint16()))
    parts = [column[3:7], column[:0], column[7:20]]
    path = write_arrow(tmp_path / "a.arrow", pa.table({"input_ids": pa.chunked_array(parts)}), kind=kind)
    layout = recognise(path)
    assert [run.num_tokens for run in layout.runs] == [32, 104]
    assert flat(tokens(path, layout)) == ROWS[3:20].ravel().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_than_are_looked_at_one_by_one(tmp_path: Path, kind: str) -> None:
    rows = np.arange(2 * 70_000, dtype="uint32").reshape(-1, 2)
    path = write_arrow(tmp_path / "a.arrow", lists(rows, ids="uint32"), rows=100_000, kind=kind)
    assert flat(tokens(path, recognise(path))) == list(range(140_000))
    path = write_arrow(
        tmp_path / "a.arrow", lists([*rows.tolist(), [1]], ids="uint32"), rows=100_000, kind=kind
    )
    with pytest.raises(UnreadableCorpus, match="rows have different lengths"):
        recognise(path)


REFUSED: dict[str, tuple[pa.Table, dict[str, Any], str]] = {
    "int64": (lists(ids="int64"), {}, "they are int64, served are uint8, uint16, uint32, int32"),
    "zstd": (lists(), {"compression": "zstd"}, "they are compressed"),
    "null row": (lists([[1, 2], None]), {}, "there are nulls among them"),
    "null fixed row": (lists([[1, 2], None], length=2), {}, "there are nulls among them"),
    "null id": (lists([[1, 2], [3, None]]), {}, "there are nulls among them"),
    "lengths": (lists([[1, 2], [3], [4, 5, 6]]), {}, "rows have different lengths, 1 tokens the shortest"),
    "batches": (lists([[1]] * 4 + [[1, 2]] * 4), {"rows": 4}, "rows have 1 and 2 tokens, expected one"),
    "view": (
        lists(view=pa.array(["t"] * 23, pa.string_view())),
        {},
        "a column before them is a union or a view",
    ),
    "twice": (
        pa.Table.from_arrays([lists()["input_ids"]] * 2, names=["input_ids"] * 2),
        {},
        "several columns of that name",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_names_the_command(tmp_path: Path, kind: str, name: str) -> None:
    table, options, message = REFUSED[name]
    path = write_arrow(tmp_path / "a.arrow", table, kind=kind, **options)
    command = f"copy its token ids into shards: corpus-server build {path} --column input_ids --eot ID"
    with pytest.raises(UnreadableCorpus, match=f"which cannot be mapped: .*{message}.*; {command}"):
        recognise(path)
    write_raw(tmp_path / "z.bin", [1])
    with pytest.raises(UnreadableCorpus, match=f"build {tmp_path} --column input_ids"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("table", "remedy"),
    [
        (pa.table({"tokens": [[1, 2]]}), "--column tokens --eot ID"),
        (pa.table({"input_ids": ["a text"]}), "--text-field input_ids --tokenizer"),
        (pa.table({"input_ids": [1, 2]}), "--column input_ids --eot ID"),
        (lists([[1]]).rename_columns(["x"]), "--column x --eot ID"),
    ],
)
def test_files_without_lists_in_that_column_are_left_to_build(
    tmp_path: Path, kind: str, table: pa.Table, remedy: str
) -> None:
    path = write_arrow(tmp_path / "a.arrow", table, kind=kind)
    with pytest.raises(UnreadableCorpus, match=f"is an Arrow file.* not served; .*build {path} {remedy}"):
        recognise(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [None, 2])
def test_every_other_length_is_refused(tmp_path: Path, kind: str, length: int | None) -> None:
    path = write_arrow(tmp_path / "a.arrow", lists(ROWS[:, :2], length=length), rows=20, kind=kind)
    content = path.read_bytes()
    for size in [*range(len(content)), len(content) + 1, len(content) + 8]:
        path.write_bytes((content + bytes(8))[:size])
        with pytest.raises(UnreadableCorpus) as caught:
            recognise(path)
        if size > 12:
            assert "its Arrow metadata is damaged" in caught.value.detail
            assert "was the copy interrupted" in caught.value.detail


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_byte_is_an_error_or_leaves_the_runs_inside_the_file(tmp_path: Path, kind: str) -> None:
    path = write_arrow(tmp_path / "a.arrow", lists(ROWS, text=["t"] * 23), rows=20, kind=kind)
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            layout = recognise(path)
        except UnreadableCorpus:
            continue
        for offset, count in layout.runs:
            assert 0 <= offset <= offset + count * layout.dtype.itemsize <= len(content)


def test_a_footer_that_lists_other_batches_is_refused(tmp_path: Path) -> None:
    short = write_arrow(tmp_path / "short.arrow", lists(), rows=20, kind="file").read_bytes()
    path = write_arrow(tmp_path / "a.arrow", lists(), rows=10, kind="file")
    footer_bytes = int.from_bytes(short[-10:-6], "little")
    content = path.read_bytes()
    own_bytes = int.from_bytes(content[-10:-6], "little")
    path.write_bytes(content[: -10 - own_bytes] + short[-10 - footer_bytes :])
    with pytest.raises(UnreadableCorpus, match="its footer lists other record batches than it holds"):
        recognise(path)


def test_no_token_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_arrow(tmp_path / "a.arrow", lists(np.zeros((1000, 2000), int), length=2000), rows=100)
    read: list[int] = []
    from_file = registry.OpenFile.read
    monkeypatch.setattr(
        registry.OpenFile, "read", lambda file, at, count: read.append(count) or from_file(file, at, count)
    )
    assert len(recognise(path).runs) == 10
    assert sum(read) < 60_000


def test_a_folder_of_datasets_is_a_corpus(tmp_path: Path) -> None:
    """As `save_to_disk` lays it out, with what `map` leaves beside it later."""
    before = open_files()
    write_arrow(tmp_path / "data-00000-of-00002.arrow", lists(ROWS[:13], text=["t"] * 13), rows=10)
    write_arrow(tmp_path / "data-00001-of-00002.arrow", lists(ROWS[13:], length=8))
    write_arrow(tmp_path / "cache-0123456789abcdef.arrow", lists())
    (tmp_path / "state.json").write_text("{}")
    index(spec(tmp_path, eot=int(ROWS[4, 2])))
    with open_corpus(tmp_path, eot=int(ROWS[4, 2])) as corpus:
        assert [shard.num_tokens for shard in corpus.shards] == [80, 24, 80]
        assert [token for shard in corpus.shards for token in shard.tokens.tolist()] == ROWS.ravel().tolist()
        assert corpus.num_documents
    assert not open_files() - before
    with pytest.raises(UnreadableCorpus, match="is a cache of Hugging Face's datasets, which is not served"):
        recognise(tmp_path / "cache-0123456789abcdef.arrow")
    size = sum(path.stat().st_size for path in tmp_path.glob("data-*.arrow"))
    shown = subprocess.run(command("inspect", tmp_path), env=environment(), capture_output=True, check=True)
    assert f" size         {size / 1000:.1f} kB " in shown.stdout.decode()


def test_documents_of_several_batches_are_packed(tmp_path: Path) -> None:
    """Each batch is a shard; a document that reaches over its end is cut there, as by any shard's end."""
    rows = [[*range(8 * n + 1, 8 * n + 8), 0] for n in range(50)]
    path = write_arrow(tmp_path / "a.arrow", lists(rows), rows=8)
    index(spec(path, eot=0))
    stage = {"from_step": 0, "global_batch_size": 10, "mixture": {"c": 1}}
    document = {"seq_len": 7, "rows": "documents", "stages": [stage]}
    with Catalog.open([spec(path, eot=0)]) as catalog:
        assert len(catalog.corpora["c"].shards) == 7
        plan = catalog.bind(Plan.from_json(document), Budget())
        reading = WindowReading(plan, Budget(), step=0, count=5, rank=0, rows=10)
        assert sorted(reading.read(0, 50).tolist()) == rows
