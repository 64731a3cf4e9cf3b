"""`index --metadata`: tables of every kind, by order and by key; what is refused changes nothing."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from corpus_server.corpus.publish import scratch_folder
from tests.corpora import write_megatron, write_raw
from tests.metadata import metadata_of
from tests.serving import run_here
from tests.views import write_corpus

NUM = 40
ROWS: list[dict[str, Any]] = [
    {
        "id": f"doc-{n}",
        "url": None if n == 7 else f"http://x/{n},\u00fc",
        "score": n / 8,
        "place": n,
        "zip": f"{n:03}",
    }
    for n in range(NUM)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "web", [[5] * 25, [4] * (NUM - 25)])


def attach(folder: Path, table: Path | str, *options: str) -> CompletedProcess[str]:
    return run_here("index", f"{folder},dtype=uint32", "--metadata", table, *options)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def csv_text(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
    return sink.getvalue()


TEXTS = [{"text": "left out", **row} for row in ROWS]
# As datatrove and Dolma write them.
NESTED = [{"text": "left out", "id": row["id"], "metadata": dict([*row.items()][1:])} for row in ROWS]
TABLES = {
    "a.parquet": parquet(TEXTS),
    "nested.parquet": parquet(NESTED),
    "a.jsonl": lines(TEXTS),
    "nested.jsonl.gz": gzip.compress(lines(NESTED[:9])) + gzip.compress(lines(NESTED[9:])),
    "a.jsonl.zst": zstandard.compress(lines(TEXTS)),
    "a.csv": csv_text(TEXTS),
    "a.csv.gz": gzip.compress(csv_text(TEXTS)),
    "a.tsv": csv_text(TEXTS, "\t"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_every_kind_is_attached_by_order(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(TABLES[name])
    before = content(folder)
    run = attach(folder, tmp_path / name)
    assert run.returncode == 0, run.stderr
    assert f"{NUM} rows of metadata in {folder}/documents: id (string), url (string)" in run.stdout
    assert metadata_of(folder, dtype="uint32") == ROWS
    assert {name: its for name, its in content(folder).items() if name in before} == before


def test_numbers_are_taken_as_python_writes_them(folder: Path, tmp_path: Path) -> None:
    rows = [{"loss": float("nan"), "n": 10**400} for _ in range(NUM)]
    (tmp_path / "t.jsonl").write_bytes(lines(rows))
    done = attach(folder, tmp_path / "t.jsonl")
    assert done.returncode == 0, done.stderr
    found = metadata_of(folder, dtype="uint32")
    assert {each["n"] for each in found} == {str(10**400)}


def test_several_files_are_one_table(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for number, size in enumerate((3, 20, 0, NUM - 23)):
        first = (0, 3, 23, 23)[number]
        (tmp_path / "t" / f"b{8 + number}.jsonl").write_bytes(lines(ROWS[first : first + size]))
    for table in (tmp_path / "t", f"{tmp_path}/t/b*.jsonl"):
        assert attach(folder, table, "--keep", "id,score").returncode == 0
        found = metadata_of(folder, dtype="uint32")
        assert found == [{"id": row["id"], "score": row["score"]} for row in ROWS]


def test_columns_are_added_by_key_in_any_order_and_replaced_by_name(folder: Path, tmp_path: Path) -> None:
    attach_rows = tmp_path / "rows.jsonl"
    attach_rows.write_bytes(lines(ROWS))
    assert attach(folder, attach_rows).returncode == 0
    order = np.random.default_rng(0).permutation(NUM).tolist()
    more = [{"id": f"doc-{n}", "score": n * 10, "lang": f"l{n}"} for n in order]
    for name in ("more.csv", "more.parquet", "more.jsonl"):
        writers = {"csv": csv_text, "parquet": parquet, "jsonl": lines}
        (tmp_path / name).write_bytes(writers[name.partition(".")[2]](more))
        run = attach(folder, tmp_path / name, "--key", "id", "--json")
        assert run.returncode == 0, run.stderr
        expected = [{**row, "score": n * 10, "lang": f"l{n}"} for n, row in enumerate(ROWS)]
        assert metadata_of(folder, dtype="uint32") == expected
    told = json.loads(run.stdout)["metadata"]
    assert (told["num_documents"], told["added"]) == (NUM, ["id", "score", "lang"])
    # A number is a key, too, whatever its type.
    places = [{"place": str(n), "by_place": n % 3} for n in order]
    (tmp_path / "places.jsonl").write_bytes(lines(places))
    assert attach(folder, tmp_path / "places.jsonl", "--key", "place", "--keep", "by_place").returncode == 0
    assert [row["by_place"] for row in metadata_of(folder, dtype="uint32")] == [n % 3 for n in range(NUM)]


def write_olmo(folder: Path, lengths: list[list[int]]) -> Path:
    """Write shards with tables as dolma's `memmap_writer.py` does; one of them is empty."""
    folder.mkdir()
    for number, its in enumerate(lengths):
        write_raw(folder / f"part-{number}.npy", np.ones(sum(its)), dtype="uint16")
        ends = np.cumsum(its).tolist()
        rows = [
            (end - n, end, f"id-{number}.{end}", f"s3://b/{number}.gz", end)
            for n, end in zip(its, ends, strict=True)
        ]
        with gzip.open(folder / f"part-{number}.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows(rows)
    return folder


def test_tables_of_olmo_are_taken_and_their_places_compared(tmp_path: Path) -> None:
    folder = write_olmo(tmp_path / "olmo", [[3, 5], [], [2, 2, 9]])
    corpus = f"{folder},dtype=uint16"
    done = run_here("index", corpus, "--metadata", f"{folder}/*.csv.gz")
    assert done.returncode == 0, done.stderr
    assert [row["id"] for row in metadata_of(folder)] == ["id-0.3", "id-0.8", "id-2.2", "id-2.4", "id-2.13"]
    assert metadata_of(folder)[4] == {"id": "id-2.13", "source": "s3://b/2.gz", "place": 13}
    (folder / "part-2.csv.gz").replace(tmp_path / "part-0.csv.gz")
    (folder / "part-0.csv.gz").replace(tmp_path / "part-2.csv.gz")
    wrong = run_here("index", corpus, "--metadata", f"{tmp_path}/*.csv.gz")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "says 2 tokens of document 0, which has 3" in wrong.stderr


def test_a_selection_has_metadata_of_its_own_beside_that_of_all_shards(folder: Path, tmp_path: Path) -> None:
    for name, rows in (("all", ROWS), ("first", ROWS[:25])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(rows))
    assert attach(folder, tmp_path / "all.jsonl").returncode == 0
    for corpus in (folder / "0.bin", f"{folder},include=0.*"):
        run = run_here("index", f"{corpus},dtype=uint32", "--metadata", tmp_path / "first.jsonl")
        assert run.returncode == 0, run.stderr
    own = sorted(folder.glob("documents.*"))
    assert [pq.read_table(each / "000000.parquet").num_rows for each in own] == [25, 25]
    assert own[0].name == "documents.0.bin"
    assert metadata_of(folder / "0.bin", dtype="uint32") == ROWS[:25]
    assert metadata_of(folder, dtype="uint32") == ROWS


def test_a_corpus_with_its_own_index_or_none_yet(tmp_path: Path) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_bytes(lines(ROWS[:2]))
    path = write_megatron(tmp_path / "x", [[1, 0], [2, 0, 3]])
    assert run_here("index", path, "--metadata", table).returncode == 0
    assert metadata_of(path) == ROWS[:2]
    path = write_raw(tmp_path / "y.bin", [1, 0, 2, 0])
    bare = run_here("index", path, "--metadata", table)
    assert (bare.returncode, "the id of the end-of-text token is missing" in bare.stderr) == (2, True)
    assert run_here("index", f"{path},eot=0", "--metadata", table).returncode == 0
    assert metadata_of(path) == ROWS[:2]


REFUSED: dict[str, tuple[list[dict[str, Any]] | bytes, list[str], str]] = {
    "too few": (ROWS[1:], [], "the table has 39 rows, the corpus 40 documents"),
    "too many": (
        [*ROWS, ROWS[0]],
        [],
        "more than 40 rows, the corpus 40 documents (attach a table with one row for each document; those wi",
    ),
    "no row": (b"", [], "the table has 0 rows, the corpus 40 documents"),
    "too few by key": (ROWS[1:], ["--key", "id"], "has 39 rows"),
    "too many by key": ([*ROWS, ROWS[0]], ["--key", "id"], "has more than 40 rows"),
    "twice": ([*ROWS[1:], ROWS[9]], ["--key", "id"], "column 'id' has 'doc-9' in 2 rows"),
    "null": ([*ROWS[1:], {"x": 1}], ["--key", "id"], "the table's column 'id' is null in 1 row"),
    "null of ours": (
        [{**row, "url": row["id"]} for row in ROWS],
        ["--key", "url"],
        "documents' column 'url'",
    ),
    "twice of ours": (
        [{"twice": n} for n in range(NUM)],
        ["--key", "twice"],
        "documents' column 'twice' has",
    ),
    "another": ([*ROWS[1:], {"id": "z"}], ["--key", "id"], "1 documents are in no row of the table"),
    "no key there": ([{"x": 1}] * NUM, ["--key", "id"], "key must be a column of the table: x, got 'id'"),
    "no key here": ([{"x": 1}] * NUM, ["--key", "x"], "key must be a column of the metadata: id, url"),
    "no column": (ROWS, ["--keep", "nosuch"], "keep must be fields of the records: "),
    "no names": (ROWS, ["--keep", "id,,x"], "keep must be different names"),
    "only text": ([{"text": "x"}] * NUM, [], "has no column but text and tokens"),
    "no JSON": (lines(ROWS[:3]) + b'{"id": \n', [], "t.jsonl: line 4: is not JSON"),
    "deep": (b'{"id":' + b"[" * 3000 + b"]" * 3000 + b"}\n", [], "line 1: is nested deeper than"),
    "digits": (b'{"id":' + b"9" * 5000 + b"}\n", [], "line 1: holds a whole number of more than 4,300"),
    "no object": (b"[1]\n" * NUM, [], "t.jsonl: line 1: expected an object"),
}


@pytest.mark.parametrize(("rows", "options", "says"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_in_one_line_and_changes_nothing(
    folder: Path, tmp_path: Path, rows: list[dict[str, Any]] | bytes, options: list[str], says: str
) -> None:
    whole, table = tmp_path / "whole.jsonl", tmp_path / "t.jsonl"
    whole.write_bytes(lines([{**row, "twice": n // 2} for n, row in enumerate(ROWS)]))
    assert attach(folder, whole).returncode == 0
    before = content(folder)
    table.write_bytes(rows if isinstance(rows, bytes) else lines(rows))
    run = attach(folder, table, *options)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
    assert says in run.stderr
    assert content(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl", "web", "whole.jsonl"]


def twice() -> bytes:
    """A Parquet file with a column twice."""
    pq.write_table(pa.table([[1], [2]], names=["id", "id"]), found := io.BytesIO())
    return found.getvalue()


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_tens_of_thousands_of_columns_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    row = {f"c{number}": number for number in range(20_000)}
    (tmp_path / name).write_bytes(csv_text([row]) if name == "t.csv" else lines([row]))
    run = attach(folder, tmp_path / name)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
    assert f"{name}: has 20,000 columns; name at most 4,096 with --keep" in run.stderr
    assert not (folder / "documents").exists()


def test_a_parquet_file_with_nothing_but_text_is_refused(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"] * NUM}), tmp_path / "t.parquet")
    assert (
        "has no column but text and tokens; name one with --keep"
        in attach(folder, tmp_path / "t.parquet").stderr
    )


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("t.parquet", b"PAR1 is cut", "t.parquet: cannot be read: "),
        ("t.parquet", parquet([{"a": 1}]), "keep must be columns of t.parquet: a, got 'id'"),
        ("t.csv", csv_text([{"a": 1}]), "keep must be columns of t.csv: a, got 'id'"),
        ("t.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)[:-20], "t.jsonl.gz: cannot be read: "),
        ("t.csv.gz", gzip.compress(b"0,5,id,s,1\nx,9,id,s,2\n", mtime=0), "t.csv.gz: cannot be read: "),
        ("t.csv", b"id,b\n1,2\n1,2,3\n", "t.csv: cannot be read: CSV parse error"),
        ("t.csv", b"id,id\n1,2\n", "t.csv: has column 'id' more than once; rename one"),
        ("t.parquet", twice(), "t.parquet: has column 'id' more than once; rename one"),
        ("t.txt", b"x", "is no table that can be read; known are .parquet, .jsonl and .csv"),
        ("", b"", "expected tables (.parquet, .jsonl, .csv), found nothing"),
    ],
)
def test_a_file_that_is_no_table_is_refused(
    folder: Path, tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    if name:
        (tmp_path / name).write_bytes(data)
    run = attach(folder, tmp_path / (name or "none.csv"), "--keep", "id")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
    assert says in run.stderr
    assert not (folder / "documents").exists()


def test_what_a_killed_process_left_is_removed_and_not_what_another_uses(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_bytes(lines(ROWS))
    (folder / ".corpus-server-left").mkdir()
    (folder / ".corpus-server-left" / "pieces").write_bytes(b"x")
    with scratch_folder(folder, ".corpus-server-") as used:
        assert [path.name for path in folder.glob(".corpus-server-*")] == [used.name]
        assert attach(folder, tmp_path / "t.jsonl").returncode == 0
        assert used.is_dir()
    assert not [*folder.glob(".*")]


def test_options_of_a_table_need_one(folder: Path) -> None:
    run = run_here("index", f"{folder},dtype=uint32,eot=0", "--key", "id")
    assert (run.returncode, "metadata must be given with --key and --keep" in run.stderr) == (2, True)
