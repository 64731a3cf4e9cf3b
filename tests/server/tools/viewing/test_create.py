"""`view create`: expressions, lists, repetition, duplicates; what is refused, with nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus_server.corpus.views.file import ViewFile
from tests.corpora import write_raw
from tests.serving import run_here
from tests.views import write_corpus

SIZES = [300, 250]
NUM = sum(SIZES)
DRAW = np.random.default_rng(3)
SCORE, LANG, CLUSTER = DRAW.random(NUM), DRAW.choice(["en", "de", None], NUM), DRAW.integers(0, 90, NUM)
COLUMNS = {
    "id": [f"doc-{number}" for number in range(NUM)],
    "score": SCORE,
    "lang": LANG,
    "cluster": [None if number % 11 == 0 else int(CLUSTER[number]) for number in range(NUM)],
    "twice": [f"{number // 2}" for number in range(NUM)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("corpora") / "web", [[5] * size for size in SIZES])
    (folder / "documents").mkdir()
    table = pa.table(COLUMNS)
    pq.write_table(table.slice(0, 400), folder / "documents" / "part-2.parquet", row_group_size=128)
    # Columns may come in another order.
    pq.write_table(
        table.slice(400).select([*table.column_names[::-1]]), folder / "documents" / "part-10.parquet"
    )
    return folder


def create(folder: Path, out: Path, *options: str | Path) -> CompletedProcess[str]:
    return run_here("view", "create", f"{folder},dtype=uint32", *options, "--out", out)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def counts(folder: Path, out: Path, *options: str | Path) -> np.ndarray:
    run = create(folder, out, *options)
    assert run.returncode == 0, run.stderr
    with ViewFile(out) as view:
        return view.decoded(0, NUM)


@pytest.mark.parametrize("said", ["", ",eot=0"])
def test_a_corpus_without_documents_is_refused_with_the_command_that_finds_them(
    tmp_path: Path, said: str
) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 0, 2, 0], dtype="uint32")
    done = run_here(
        "view", "create", f"{path},dtype=uint32{said}", "--where", "true", "--out", tmp_path / "v"
    )
    assert done.returncode == 2
    helps = f"corpus-server index {path},dtype=uint32,eot={'0' if said else 'ID'}"
    assert f"has no document index (make one with `{helps}`)" in done.stderr
    indexed = run_here(*helps.replace("ID", "0").split()[1:])
    assert indexed.returncode == 0, indexed.stderr


def test_a_condition_chooses_and_null_does_not(folder: Path, tmp_path: Path) -> None:
    found = counts(folder, tmp_path / "a.view", "--where", "score >= 0.4 and lang = 'en' -- a comment")
    assert (found == ((SCORE >= 0.4) & (LANG == "en"))).all()
    assert names(tmp_path) == ["a.view"]
    assert (
        counts(folder, tmp_path / "b.view", "--where", "lang IN ('de') OR lang IS NULL") == (LANG != "en")
    ).all()
    shown = json.loads(run_here("view", "show", tmp_path / "a.view", "--json").stdout)
    assert shown["made"] == {"where": "score >= 0.4 and lang = 'en' -- a comment", "seed": 0}
    assert (shown["num_chosen"], shown["num_tokens"]) == (found.sum(), 5 * found.sum())


def test_views_stand_in_for_families_that_double_or_leave_out_by_a_column(
    folder: Path, tmp_path: Path
) -> None:
    """As docs/plans.md says: a keyed tenth comes twice; all documents of a value go together."""
    twice = [counts(folder, tmp_path / f"{n}.view", "--repeat", "1.1", "--seed", str(n)) for n in (3, 4)]
    assert all(set(each.tolist()) == {1, 2} and 0.05 < (each == 2).mean() < 0.2 for each in twice)
    assert (twice[0] != twice[1]).any()
    kept = [
        counts(folder, tmp_path / f"{n}.by", "--where", f"substr(md5('{n}/' || twice), 1, 2) >= '1a'")
        for n in (3, 4)
    ]
    for each in kept:
        assert (each[::2] == each[1::2]).all()
        assert 0.05 < (each == 0).mean() < 0.2
    assert (kept[0] != kept[1]).any()


def test_expressions_see_the_length_of_documents(tmp_path: Path) -> None:
    """Before metadata is attached and after it, and unless a column has this name."""
    lengths = np.random.default_rng(5).integers(1, 9, NUM)
    shards = [lengths[: SIZES[0]].tolist(), lengths[SIZES[0] :].tolist()]
    folder = write_corpus(tmp_path / "web", shards)
    assert (counts(folder, tmp_path / "a.view", "--where", "num_tokens > 3") == (lengths > 3)).all()
    repeated = counts(folder, tmp_path / "b.view", "--repeat", "case when NUM_TOKENS > 5 then 2 else 0 end")
    assert (repeated == np.where(lengths > 5, 2, 0)).all()
    refused = create(folder, tmp_path / "c.view", "--where", "num_tokens > 3 and score > 0.5")
    assert refused.returncode == 2
    assert "score" in refused.stderr
    refused = create(folder, tmp_path / "c.view", "--where", "score > 0.5")
    assert refused.returncode == 2
    assert "has no metadata" in refused.stderr

    (folder / "documents").mkdir()
    pq.write_table(pa.table({"score": SCORE}), folder / "documents" / "0.parquet")
    both = counts(folder, tmp_path / "d.view", "--where", "num_tokens > 3 and score >= 0.5")
    assert (both == ((lengths > 3) & (SCORE >= 0.5))).all()
    pq.write_table(pa.table({"score": SCORE, "num_tokens": CLUSTER}), folder / "documents" / "0.parquet")
    own = counts(folder, tmp_path / "e.view", "--where", "num_tokens > 3")
    assert (own == (CLUSTER > 3)).all()


def test_fractions_are_a_keyed_choice(folder: Path, tmp_path: Path) -> None:
    repeat = "case when score > 0.5 then 2.5 else 1 end"
    found = [
        counts(folder, tmp_path / f"{number}.view", "--repeat", repeat, "--seed", seed)
        for number, seed in enumerate(("1", "1", "2"))
    ]
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).any()
    for each in found:
        assert set(each[SCORE <= 0.5]) == {1}
        assert set(each[SCORE > 0.5]) == {2, 3}
        assert abs(each[SCORE > 0.5].mean() - 2.5) < 0.15


def test_of_duplicates_the_first_chosen_one_stays(folder: Path, tmp_path: Path) -> None:
    """Documents without a value are nobody's duplicates."""
    found = counts(folder, tmp_path / "a.view", "--where", "score > 0.3", "--dedup", "cluster")
    seen, expected = set(), []
    for number, cluster in enumerate(COLUMNS["cluster"]):
        expected.append(bool(SCORE[number] > 0.3 and (cluster is None or cluster not in seen)))
        if expected[-1]:
            seen.add(cluster)
    assert found.astype(bool).tolist() == expected


def test_sums_and_parts_of_dates_are_the_same_in_every_time_zone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB says of `+` and `year` that they depend on the session, because of times with a zone."""
    at = "to_timestamp(86400 * 365 * 50 + score * 86400)"
    for zone in ("UTC", "Pacific/Auckland"):
        monkeypatch.setenv("TZ", zone)
        found = counts(
            folder, tmp_path / f"{len(zone)}.view", "--where", f"hour({at} + interval 0 hour) + 1 >= 13"
        )
        assert found.astype(bool).tolist() == [bool(each >= 0.5) for each in SCORE]


def test_lists_choose_and_take_out_by_number_or_key(folder: Path, tmp_path: Path) -> None:
    listed, gone = tmp_path / "listed.txt", tmp_path / "gone.txt"
    listed.write_text("0\n\n 17 \n549\n")
    gone.write_text("17\n")
    expected = np.isin(np.arange(NUM), [0, 549])
    assert (counts(folder, tmp_path / "a.view", "--documents", listed, "--without", gone) == expected).all()
    gone.write_text("doc-17\ndoc-3\n")
    expected = ~np.isin(np.arange(NUM), [3, 17])
    assert (counts(folder, tmp_path / "b.view", "--without", gone, "--key", "id") == expected).all()


def test_lists_need_no_metadata(tmp_path: Path) -> None:
    bare = write_corpus(tmp_path / "bare", [[5] * NUM])
    (tmp_path / "gone.txt").write_text("5\n")
    found = counts(bare, tmp_path / "a.view", "--without", tmp_path / "gone.txt")
    assert (found == (np.arange(NUM) != 5)).all()


def test_constants_need_no_metadata(tmp_path: Path) -> None:
    bare = write_corpus(tmp_path / "bare", [[5] * NUM])
    assert (counts(bare, tmp_path / "a.view", "--repeat", "2") == 2).all()
    halves = counts(bare, tmp_path / "b.view", "--where", "true", "--repeat", "1.5")
    assert set(halves) == {1, 2}


@pytest.mark.parametrize(
    "options",
    [
        ("--where", "score > 0 or true"),
        ("--repeat", "num_tokens * score"),
        ("--where", "'num_tokens' = id"),
        ("--where", "true", "--dedup", "id"),
        ("--documents", "LIST", "--key", "id"),
    ],
    ids=" ".join,
)
def test_columns_need_metadata(tmp_path: Path, options: tuple[str, ...]) -> None:
    bare = write_corpus(tmp_path / "bare", [[5] * NUM])
    (tmp_path / "list.txt").write_text("5\n")
    words = [str(tmp_path / "list.txt") if word == "LIST" else word for word in options]
    run = create(bare, tmp_path / "a.view", *words)
    assert run.returncode == 2
    assert "has no metadata" in run.stderr
    assert "index CORPUS --metadata" in run.stderr


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("(select 1) = 1", "a query inside"),
        ("score > (select max(score) from documents)", "a query inside"),
        ("exists(with recursive t as (select 1 union all select 1 from t) from t)", "a query inside"),
        ("read_text('/etc/passwd') is null", "not read_text()"),
        ("1 in (from read_csv('/etc/passwd'))", "a query inside"),
        ("true); copy documents to 'x'; select (true", "expected one expression"),
        ("true); select (true", "no statement"),
        ("true) from read_parquet('x') where (true", "no statement"),
        ("true) union select (true", "no statement"),
        ("true), (true", "no statement"),
        ("attach 'x'", "--where"),
        ("pragma version", "--where"),
        ("set memory_limit = '1TB'", "--where"),
        ("install httpfs", "--where"),
        ("random() > 0.5", "not random()"),
        ("now() > '2020-01-01'", "not now()"),
        ("age('2020-01-01'::timestamptz) > interval 1 year", "not age()"),
        ("current_setting('threads') = '1'", "not current_setting()"),
        ("getenv('HOME') = ''", "not getenv()"),
        ("count(*) > 1", "not count_star()"),
        ("row_number() over () < 3", "a window function"),
        ("list_filter([1], x -> x > 0) is null", "a lambda"),
        ("score > $1", "a parameter"),
        ("* is null", "--where"),
        ("nosuch > 1", "nosuch"),
        ("score", "type DOUBLE"),
        ("'yes'", "type VARCHAR"),
        (" ", "--where"),
        ("true\0", "zero bytes"),
        ("(" * 5000, "brackets"),
        ("not " * 2400 + "true", "--where"),
        ("1" * 10**6, "at most 10,000 characters"),
        ("lang::int > 1", "Conversion"),
    ],
)  # fmt: skip
def test_anything_but_a_condition_is_refused_in_one_line(
    folder: Path, tmp_path: Path, expression: str, says: str
) -> None:
    run = create(folder, tmp_path / "a.view", "--where", expression)
    assert run.returncode == 2
    assert says in run.stderr
    assert run.stderr.count("\n") == 1
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("options", "lines", "says"),
    [
        (["--repeat", "-1"], "", "--repeat: -1 for document 0"),
        (["--repeat", "case when lang = 'en' then 1 end"], "", "--repeat: null for document"),
        (["--repeat", "70000"], "", "[0, 65535]"),
        (["--repeat", "lang"], "", "type VARCHAR"),
        (["--where", "false"], "", "no document was chosen"),
        (["--dedup", "nosuch"], "", "must be a column of the metadata"),
        (["--documents", "LIST"], "1\nx\n", "line 2 is 'x'"),
        (["--without", "LIST"], f"{NUM}\n", f"[0, {NUM})"),
        (["--without", "LIST", "--key", "id"], "doc-0\nnobody\n", "'nobody' names no document"),
        (["--without", "LIST", "--key", "twice"], "7\n", "'7' names 2 documents"),
        (["--without", "LIST", "--key", "cluster"], "7\n", "is null for"),
        (["--key", "id"], "", "--key needs"),
        (["--seed", "3"], "", "--seed needs --repeat"),
        (["--without", "/nowhere"], "", "/nowhere"),
    ],
)
def test_what_no_view_follows_from_is_refused(
    folder: Path, tmp_path: Path, options: list[str], lines: str, says: str
) -> None:
    (tmp_path / "list").write_text(lines)
    run = create(
        folder, tmp_path / "a.view", *(str(tmp_path / "list") if o == "LIST" else o for o in options)
    )
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert says in run.stderr
    assert names(tmp_path) == ["list"]


@pytest.mark.parametrize("rows", [NUM - 1, NUM + 1, 0])
def test_metadata_with_other_rows_than_documents_is_refused(tmp_path: Path, rows: int) -> None:
    bare = write_corpus(tmp_path / "bare", [[5] * NUM])
    (bare / "documents").mkdir()
    pq.write_table(pa.table({"a": np.arange(rows)}), bare / "documents" / "0.parquet")
    run = create(bare, tmp_path / "a.view", "--where", "a > 1")
    assert run.returncode == 2
    assert f"has {rows} rows, the corpus {NUM} documents" in run.stderr
    (bare / "documents" / "0.parquet").write_bytes(b"PAR1 is cut")
    run = create(bare, tmp_path / "a.view", "--where", "a > 1")
    assert (run.returncode, "cannot be read" in run.stderr) == (2, True)
    assert names(tmp_path) == ["bare"]


def written(folder: Path, *tables: dict[str, list[object]]) -> Path:
    """A corpus of 20 documents with these files of metadata."""
    (write_corpus(folder, [[5] * 20]) / "documents").mkdir()
    for number, table in enumerate(tables):
        pq.write_table(pa.table(table), folder / "documents" / f"{number}.parquet")
    return folder


def test_no_column_and_no_folder_stands_in_for_another(tmp_path: Path) -> None:
    """DuckDB gives columns of one name new ones, and takes columns from folders called NAME=VALUE."""
    ids: list[object] = [f"k{n}" for n in range(20)]
    (tmp_path / "without").write_text("k3\n")
    table = {"id": ids, "#document": list[object](range(19, -1, -1)), "lang": ids}
    folder = written(tmp_path / "lang=en", table)
    for options in (("--without", tmp_path / "without", "--key", "id"), ("--where", "lang != 'k3'")):
        out = tmp_path / f"{len(options)}.view"
        assert create(folder, out, *options).returncode == 0
        with ViewFile(out) as view:
            assert np.flatnonzero(view.decoded(0, 20) == 0).tolist() == [3]
    for name, tables in (
        ("one", [{"id": ids, "ID": ids}]),
        ("two", [{"id": ids[:9], "x": ids[:9]}, {"x": ids[9:], "ID": ids[9:]}]),
    ):
        refused = create(written(tmp_path / name, *tables), tmp_path / "b.view", "--where", "id = 'k1'")
        assert (refused.returncode, "differ in capitals alone" in refused.stderr) == (2, True)
