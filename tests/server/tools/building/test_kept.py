"""`build --keep`: each document of a built corpus has the fields of the record that it came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus_server.corpus import Corpus
from corpus_server.corpus.verify import verify
from corpus_server.errors import InvalidParameter, UnreadableCorpus
from corpus_server.tools.building import part, sources
from corpus_server.tools.building.job import Split
from corpus_server.tools.building.manifest import spec_of
from corpus_server.tools.building.merge import merge
from tests.metadata import metadata_of, write_metadata
from tests.server.tools.building.sources import (
    WRITERS,
    build_here,
    content,
    texts,
    write_arrow_stream,
    write_jsonl,
    write_parquet,
)
from tests.serving import run_here


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few documents make many parts and batches."""
    monkeypatch.setattr(sources, "PART_BYTES", 1000)
    monkeypatch.setattr("corpus_server.tools.building.kinds.tables._ROWS_AT_ONCE", 3)
    monkeypatch.setattr(part, "_BATCH_SIZE", 300)


def texts_of(folder: Path) -> list[bytes]:
    """Return the documents of a corpus of bytes, without their ends."""
    with Corpus.open(spec_of(folder)) as corpus:
        tokens = np.concatenate([shard.tokens for shard in corpus.shards])
        assert corpus.num_documents is not None
        ranges = map(corpus.document_range, range(corpus.num_documents))
        return [tokens[start:stop].tobytes().rstrip(b"\0") for start, stop in ranges]


def records(rows: Sequence[str], **more: Any) -> bytes:
    """JSON lines in which a record says which one it is; some of its fields where Dolma puts them."""
    return b"".join(
        json.dumps({"text": row, "id": number, "metadata": {"length": len(row)}, **more}).encode() + b"\n"
        for number, row in enumerate(rows)
    )


@pytest.mark.parametrize("name", WRITERS)
def test_fields_of_every_kind_of_file_with_fields_are_kept(tmp_path: Path, name: str) -> None:
    rows = [*texts(60), "", "last"]  # the empty one is no document
    source = WRITERS[name](tmp_path / name, rows)
    build_here([source], tmp_path / "out", tokenizer="bytes", keep=("text", "n"))
    kept = metadata_of(tmp_path / "out")
    assert (
        [row["text"].encode() for row in kept]
        == texts_of(tmp_path / "out")
        == [r.encode() for r in rows if r]
    )
    if "json" not in name:
        assert [row["n"] for row in kept] == [*range(60), 61]
    assert verify(spec_of(tmp_path / "out")).ok


@pytest.mark.parametrize(
    "options",
    [
        {"splits": (Split(name="val", share=0.3), Split(name="test", share=0.1))},
        {"shard_tokens": 50},  # documents are cut
    ],
    ids=["splits", "cut"],
)
def test_a_document_that_is_moved_or_cut_keeps_its_fields(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = texts(200, seed=1)
    (tmp_path / "a.jsonl").write_bytes(records(rows))
    built = build_here(
        [tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", keep=("id", "length"), **options
    )
    seen: set[int] = set()
    for split in built:
        folder = tmp_path / "out" / (split or "")
        kept = metadata_of(folder)
        for row, document in zip(kept, texts_of(folder), strict=True):
            assert document in rows[row["id"]].encode()
            assert row["length"] == len(rows[row["id"]])
        seen |= {row["id"] for row in kept}
    assert seen == set(range(200))


def test_the_bytes_do_not_depend_on_the_division_and_a_corpus_without_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(records(texts(300)))
    build_here([tmp_path / "a.jsonl"], tmp_path / "many", tokenizer="bytes", keep=("id", "length"))
    monkeypatch.setattr(sources, "PART_BYTES", 1 << 20)
    build_here([tmp_path / "a.jsonl"], tmp_path / "one", tokenizer="bytes", keep=("id", "length"))
    assert content(tmp_path / "many") == content(tmp_path / "one")
    bare = build_here([tmp_path / "a.jsonl"], tmp_path / "bare", tokenizer="bytes")[None]
    assert bare.fingerprint == json.loads((tmp_path / "one" / "manifest.json").read_text())["fingerprint"]
    assert not (tmp_path / "bare" / "documents").exists()


def test_types_are_those_of_all_records(tmp_path: Path) -> None:
    values = [1, 2.5, None, 3]
    mixed = [1, "x", None, {"y": [1]}]
    rows = [{"text": f"{n} " * 200, "a": values[n % 4], "b": mixed[n // 20]} for n in range(80)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    build_here([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", keep=("a", "b"))
    kept = metadata_of(tmp_path / "out")
    assert [row["a"] for row in kept] == [row["a"] for row in rows]
    assert [row["b"] for row in kept] == [["1", "x", None, '{"y": [1]}'][n // 20] for n in range(80)]


def test_fields_of_different_files_come_together(tmp_path: Path) -> None:
    nested = pa.table({"text": ["p"], "id": ["x"], "metadata": [{"length": 9, "other": 1}]})
    pq.write_table(nested, tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(records(["q"]))
    build_here([tmp_path], tmp_path / "out", tokenizer="bytes", keep=("length", "id"))
    assert metadata_of(tmp_path / "out") == [{"length": 9, "id": "x"}, {"length": 1, "id": "0"}]


@pytest.mark.parametrize(
    ("name", "keep", "said"),
    [
        (
            "a.parquet",
            "nosuch",
            "has no field 'nosuch', only 'n', 'text'; name fields that all files have",
        ),
        ("a.arrow", "nosuch", "a.arrow: has no field 'nosuch'"),
        ("a.txt", "n", "a.txt: has no field 'n' to keep; keep fields of JSON lines, CSV, Parquet"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, name: str, keep: str, said: str) -> None:
    write = {"a.parquet": write_parquet, "a.arrow": write_arrow_stream}.get(name)
    if write is not None:
        write(tmp_path / name, ["x"])
    else:
        (tmp_path / name).write_text("x")
    with pytest.raises(UnreadableCorpus, match=said):
        build_here([tmp_path / name], tmp_path / "out", tokenizer="bytes", keep=(keep,))


def test_a_field_that_no_record_has_is_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    arguments = (
        "build",
        tmp_path / "a.jsonl",
        "--tokenizer",
        "bytes",
        "--keep",
        "n,urll",
        "--processes",
        "1",
    )
    done = run_here(*arguments, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "no document has a value of 'urll'" in done.stderr
    assert metadata_of(tmp_path / "out") == [{"n": 1, "urll": None}] * 2


def test_merged_corpora_keep_it_all_or_none_has_it(tmp_path: Path) -> None:
    for number, keep in enumerate((("id", "length"), ("id",), ())):
        (tmp_path / f"{number}.jsonl").write_bytes(records(texts(30, seed=number)))
        build_here([tmp_path / f"{number}.jsonl"], tmp_path / f"c{number}", tokenizer="bytes", keep=keep)
    merge([tmp_path / "c0", tmp_path / "c1"], tmp_path / "both")
    assert metadata_of(tmp_path / "both") == [*metadata_of(tmp_path / "c0"), *metadata_of(tmp_path / "c1")]
    moved = tmp_path / "both" / "documents" / "000001.parquet"
    assert moved.samefile(tmp_path / "c1" / "documents" / "000000.parquet")
    assert verify(spec_of(tmp_path / "both")).ok
    with pytest.raises(
        InvalidParameter, match=r"all have metadata .* or none: .*/c1 has some, .*/c2 has none"
    ):
        merge([tmp_path / "c1", tmp_path / "c2"], tmp_path / "other")
    write_metadata(tmp_path / "c2" / "documents", {"id": [1]})
    with pytest.raises(UnreadableCorpus, match="has 1 row, the corpus 30 documents"):
        merge([tmp_path / "c1", tmp_path / "c2"], tmp_path / "other")
    assert not (tmp_path / "other").exists()
