"""Metadata of documents: any row from any file, and nothing that does not belong to the documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.metadata.files import metadata_digest, metadata_files
from corpus_server.corpus.metadata.write import column, common_schema, conform, write_files
from corpus_server.corpus.selection import list_shards
from corpus_server.corpus.verify import record, verify
from corpus_server.errors import CorpusChanged, CorpusServerError, UnreadableCorpus
from corpus_server.work import Budget
from tests.corpora import spec, write_raw
from tests.metadata import metadata_of, write_metadata
from tests.serving import run_here
from tests.views import write_corpus


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    group=st.integers(1, 50),
    wanted=st.lists(st.integers(0, 119), max_size=8),
    columns=st.sampled_from([None, ["id"], ["only_2"], []]),
)
@settings(max_examples=60, deadline=None)
def test_rows_are_those_of_the_files_one_after_another(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    group: int,
    wanted: list[int],
    columns: list[str] | None,
) -> None:
    total = sum(sizes) or 1
    folder = write_corpus(tmp_path_factory.mktemp("corpora") / "web", [[3] * total])
    (folder / "documents").mkdir()
    expected: list[dict[str, Any]] = []
    for number, size in enumerate(sizes if sum(sizes) else [1]):
        rows = [{"id": f"{number}.{n}", f"only_{number}": n} for n in range(size)]
        schema = pa.schema([("id", pa.string()), (f"only_{number}", pa.int64())])
        table = pa.Table.from_pylist(rows, schema=schema)
        # Natural order: part-9 comes before part-10.
        pq.write_table(table, folder / "documents" / f"part-{9 + number}.parquet", row_group_size=group)
        expected += rows
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        table = corpus.metadata()
        assert table is not None
        numbers = [number % total for number in wanted]
        assert table.rows(numbers, Budget(), columns) == {
            number: {
                name: value for name, value in expected[number].items() if columns is None or name in columns
            }
            for number in numbers
        }


def test_long_values_are_decoded_a_few_at_a_time(tmp_path: Path) -> None:
    """80 MB in a row group, of which a reader of one row would need no more than a page."""
    folder = write_corpus(tmp_path / "web", [[3] * 400])
    write_metadata(folder / "documents", {"html": [f"{n}{'x' * 200_000}" for n in range(400)]})
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        table = corpus.metadata()
        assert table is not None
        budget = Budget()
        table.rows([399], budget)
        assert budget.num_bytes > 3 * 16 * 2**20
        assert table.rows([399], Budget())[399]["html"].startswith("399x")


def test_a_value_of_hundreds_of_megabytes_is_not_read_and_says_so(tmp_path: Path) -> None:
    """It takes 12 kB of a file, and would take a gigabyte of memory; other columns of the row are there."""
    folder = write_corpus(tmp_path / "web", [[3] * 4])
    text = ["short", "x" * (256 << 20), "short", "short"]
    write_metadata(folder / "documents", {"id": ["a", "b", "c", "d"], "text": text}, compression="zstd")
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        table = corpus.metadata()
        assert table is not None
        pool = pa.default_memory_pool()
        before = pool.max_memory()
        found = table.rows([0, 1], Budget())
        assert pool.max_memory() == before
        assert table.rows([2], Budget(), ["id"]) == {2: {"id": "c"}}
        assert table.rows([2], Budget(), explains=False) == {2: {"id": "c"}}
    assert [found[number]["id"] for number in (0, 1)] == ["a", "b"]
    assert all(row["text"].startswith("not read: a page of this column has 268,4") for row in found.values())


def test_a_long_text_of_many_rows_is_decoded_once(tmp_path: Path) -> None:
    """2,000 rows of one text of a megabyte: two gigabytes, if each had its own."""
    folder = write_corpus(tmp_path / "web", [[3] * 2000])
    text = pa.array(["y" * (1 << 20)]).dictionary_encode()
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), text.dictionary)
    (folder / "documents").mkdir()
    pq.write_table(pa.table({"text": column}), folder / "documents" / "0.parquet")
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        table = corpus.metadata()
        assert table is not None
        pool = pa.default_memory_pool()
        before = pool.max_memory()
        assert table.rows([1999], Budget())[1999]["text"] == "y" * (1 << 20)
        assert pool.max_memory() < before + (256 << 20)


def test_row_groups_that_contradict_the_footer_are_refused(tmp_path: Path) -> None:
    """A footer with another number of rows of the first group, as Thrift's zigzag number of 700."""
    folder = write_corpus(tmp_path / "web", [[3] * 1500])
    (folder / "documents").mkdir()
    path = folder / "documents" / "0.parquet"
    pq.write_table(pa.table({"id": list(range(1500))}), path, row_group_size=700)
    content = path.read_bytes()
    at = content.index(b"\xf8\x0a", len(content) - int.from_bytes(content[-8:-4], "little") - 8)
    while pq.read_metadata(path).row_group(0).num_rows == 700:
        path.write_bytes(content[: at + 1] + b"\x0b" + content[at + 2 :])
        at = content.index(b"\xf8\x0a", at + 1)
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        table = corpus.metadata()
        assert table is not None
        with pytest.raises(UnreadableCorpus, match=r"its row groups have 1,564 rows, its footer says 1,500"):
            table.rows([900], Budget())


def test_opening_a_corpus_and_its_tokens_touches_no_metadata(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "web", [[3] * 4])
    (folder / "documents").mkdir()
    (folder / "documents" / "0.parquet").write_bytes(b"no Parquet")
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        assert corpus.shards[0].tokens[:3].tolist() == [1, 2, 0]
        assert corpus.describe()["has_metadata"]
        with pytest.raises(
            UnreadableCorpus, match=r"0.parquet: its metadata cannot be read: .*; write it again"
        ):
            corpus.metadata()


@pytest.mark.parametrize("kind", ["text", "list", "zone"])
def test_a_value_that_cannot_be_shown_is_said_and_hides_no_other(tmp_path: Path, kind: str) -> None:
    """Parquet does not check that text is UTF-8, or that a time zone exists."""
    folder = write_corpus(tmp_path / "web", [[3, 3]])
    offsets = pa.py_buffer(np.array([0, 1, 2], np.int32))
    text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])
    bad = {
        "text": text,
        "list": pa.ListArray.from_arrays([0, 1, 2], text),
        "zone": pa.array([None, 1], pa.timestamp("us", "Mars/Phobos")),
    }
    (folder / "documents").mkdir()
    pq.write_table(pa.table({"id": ["x", "y"], "bad": bad[kind]}), folder / "documents" / "0.parquet")
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        table = corpus.metadata()
        assert table is not None
        assert table.rows([0], Budget())[0]["id"] == "x"
        assert table.rows([1], Budget(), ["id"]) == {1: {"id": "y"}}
        with pytest.raises(UnreadableCorpus, match=r"0.parquet: its metadata cannot be read"):
            table.rows([0, 1], Budget())


@pytest.mark.parametrize("rows", [3, 5])
def test_other_rows_than_documents_are_refused(tmp_path: Path, rows: int) -> None:
    folder = write_corpus(tmp_path / "web", [[3] * 4])
    write_metadata(folder / "documents", {"id": list(range(rows))})
    said = (
        f"its metadata has {rows} rows, the corpus 4 documents; it needs one row for each document, in order"
    )
    with Corpus.open(spec(folder, dtype="uint32")) as corpus, pytest.raises(UnreadableCorpus, match=said):
        corpus.metadata()
    inspected, verified = (run_here(each, f"{folder},dtype=uint32") for each in ("inspect", "verify"))
    assert (inspected.returncode, said in inspected.stderr) == (0, True)
    assert (verified.returncode, said in " ".join(verified.stdout.split())) == (1, True)


def test_thousands_of_columns_are_refused(tmp_path: Path) -> None:
    """Each document shown would cost seconds; tokens are served all the same."""
    folder = write_corpus(tmp_path / "web", [[3] * 4])
    write_metadata(folder / "documents", {f"c{number}": range(4) for number in range(4097)})
    said = r"has 4,097 columns; at most 4,096 are served"
    with Corpus.open(spec(folder, dtype="uint32")) as corpus, pytest.raises(UnreadableCorpus, match=said):
        corpus.metadata()


def test_a_file_that_changes_gives_an_error_and_one_that_is_replaced_the_old_rows(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "web", [[3] * 4])
    path = write_metadata(folder / "documents", {"id": list("abcd")}) / "0.parquet"
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        table = corpus.metadata()
        assert table is not None
        write_metadata(tmp_path / "new", {"id": list("wxyz")})
        (tmp_path / "new" / "0.parquet").replace(path)
        assert table.rows([1], Budget()) == {1: {"id": "b"}}
    with Corpus.open(spec(folder, dtype="uint32")) as corpus:
        table = corpus.metadata()
        assert table is not None
        assert table.rows([1], Budget()) == {1: {"id": "x"}}
        path.write_bytes(path.read_bytes().replace(b"wxyz", b"WXYZ") + b" ")
        with pytest.raises(CorpusChanged):
            table.rows([1], Budget())


def test_metadata_is_no_shard_and_a_selection_may_have_its_own(tmp_path: Path) -> None:
    (folder := tmp_path / "web").mkdir()
    for split, number in (("train", 3), ("val", 2)):
        write_corpus(tmp_path / split, [[4] * number])
        for suffix in (".bin", ".bin.documents"):
            (tmp_path / split / f"0{suffix}").rename(folder / f"{split}{suffix}")
    write_metadata(folder / "documents", {"id": list("abcde")})
    write_metadata(folder / "documents.val", {"id": list("yz")})
    write_metadata(folder / "documents.train.bin", {"id": list("xyz")})
    (folder / "below").mkdir()
    write_metadata(folder / "below" / "documents", {"id": [1]})
    names = [shard.name for shard in list_shards(spec(folder, split="all"))]
    assert names == ["train.bin", "val.bin"]

    def ids(path: Path, **options: Any) -> str:
        return "".join(row["id"] for row in metadata_of(path, dtype="uint32", **options))

    assert ids(folder, split="all") == "abcde"
    assert ids(folder, split="val") == "yz"
    assert ids(folder / "train.bin") == "xyz"
    with pytest.raises(CorpusServerError, match="has 5 rows, the corpus 3 documents"):
        ids(folder, split="train")


def test_the_digest_is_kept_and_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "web", [[3] * 4])
    corpus = spec(folder, dtype="uint32")
    before = record(corpus).fingerprints
    path = write_metadata(folder / "documents", {"id": list("abcd")}) / "0.parquet"
    computed = metadata_digest(metadata_files(corpus))
    assert record(corpus).fingerprints == before
    assert (folder / "documents" / "digest.json").exists()
    assert metadata_digest(metadata_files(corpus)) == computed
    assert verify(corpus).ok

    content = path.read_bytes()
    path.write_bytes(content.replace(b"a", b"A", 1))
    (problem,) = verify(corpus).problems
    assert problem.detail == "documents/0.parquet: its bytes differ from the recorded ones"
    write_metadata(folder / "documents", {"id": list("wxyz")})
    assert metadata_digest(metadata_files(corpus)) != computed
    path.rename(path.with_name("1.parquet"))
    assert "other ones" in verify(corpus).problems[0].detail
    (folder / "documents" / "digest.json").write_text("{}")
    assert "the digest of the metadata cannot be read" in verify(corpus).problems[0].detail


def test_columns_of_several_types_become_numbers_or_text(tmp_path: Path) -> None:
    batches = [
        pa.record_batch({"a": column([1, 2]), "b": column([1, None]), "c": column([{"x": 1}, "y"])}),
        pa.record_batch({"a": column([0.5]), "b": column(["x"]), "d": column([True])}),
        pa.record_batch({"a": column([2**70]), "e": column([None])}),
    ]
    schema = common_schema(batch.schema for batch in batches[:2])
    tables = [conform(batch, schema) for batch in batches[:2]]
    write_files(tmp_path / "documents", tables)
    assert pq.read_table(tmp_path / "documents" / "000000.parquet").to_pylist() == [
        {"a": 1.0, "b": "1", "c": '{"x": 1}', "d": None},
        {"a": 2.0, "b": None, "c": "y", "d": None},
        {"a": 0.5, "b": "x", "c": None, "d": True},
    ]
    assert [str(field.type) for field in common_schema(batch.schema for batch in batches)] == [
        *("string", "string", "string", "bool", "string")
    ]


def test_files_do_not_depend_on_the_pieces_in_which_rows_come(tmp_path: Path) -> None:
    rows = pa.table({"n": list(range(50_000))})
    for name, size in (("whole", 50_000), ("pieces", 777)):
        write_files(tmp_path / name, (rows.slice(first, size) for first in range(0, 50_000, size)))
    whole, pieces = ((tmp_path / name / "000000.parquet").read_bytes() for name in ("whole", "pieces"))
    assert whole == pieces


def test_a_folder_of_parquet_that_is_called_documents_is_no_metadata(tmp_path: Path) -> None:
    write_metadata(tmp_path / "documents", {"text": ["a"]})
    with pytest.raises(UnreadableCorpus, match=r"0.parquet: .*corpus-server build"):
        Corpus.open(spec(tmp_path / "documents"))


def test_a_token_file_without_documents_has_no_rows(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 2, 3])
    write_metadata(tmp_path / "documents", {"id": [1]})
    with Corpus.open(spec(path)) as corpus, pytest.raises(CorpusServerError, match="has no document index"):
        corpus.metadata()
