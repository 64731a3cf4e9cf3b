"""Rows that `group_texts` packed are one running text; rows that look packed or padded are asked about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.index import index
from corpus_server.corpus.verify import verify
from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building import part, sources
from corpus_server.tools.building.manifest import Manifest, read_manifest, spec_of
from corpus_server.tools.building.merge import merge
from tests.corpora import open_corpus
from tests.server.tools.building.sources import WRITERS, build_here, write_jsonl, write_parquet
from tests.server.tools.building.test_masked import write_lines
from tests.server.tools.building.test_masked import write_parquet as write_columns
from tests.serving import run_here

END, LENGTH = 9, 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows make many parts and batches."""
    monkeypatch.setattr(sources, "PART_BYTES", 200)
    monkeypatch.setattr(sources, "_LEAST_PART_BYTES", 100)
    monkeypatch.setattr(part, "_BATCH_SIZE", 30)


def grouped(documents: Sequence[Sequence[int]], length: int = LENGTH) -> list[list[int]]:
    """Pack documents as `group_texts` does, but for the remainder, which is kept."""
    text = [token for document in documents for token in document]
    return [text[start : start + length] for start in range(0, len(text), length)]


def some_documents(count: int, seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [[*draw.integers(10, 5000, size).tolist(), END] for size in draw.integers(0, 20, count)]


def found(out: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a corpus, and the ranges of its documents."""
    assert verify(spec_of(out)).ok
    with open_corpus(out) as corpus:
        tokens = np.concatenate([shard.tokens for shard in corpus.shards]).tolist()
        assert corpus.num_documents is not None
        assert read_manifest(out).num_tokens == len(tokens)
        return tokens, [corpus.document_range(number) for number in range(corpus.num_documents)]


def packed(sources: Sequence[Path], out: Path, **options: Any) -> Manifest:
    return build_here(sources, out, **{"column": "ids", "eot": END, "rows": "packed", **options})[None]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("tail", [[], [5, 6, 7]])
def test_packed_rows_are_one_text_whose_end_of_text_tokens_end_its_documents(
    tmp_path: Path, name: str, tail: list[int]
) -> None:
    documents = [*some_documents(60, 0), *([tail] if tail else [])]
    source = WRITERS[name](tmp_path / name, grouped(documents), field="ids")
    built = packed([source], tmp_path / "out")
    tokens, ranges = found(tmp_path / "out")
    assert [tokens[start:stop] for start, stop in ranges] == documents
    assert built.num_documents == len(documents)
    assert (
        index(replace(spec_of(tmp_path / "out"), eot=END)).shards[0].action == "kept"
    )  # what it would write is there


def test_a_text_may_go_on_in_the_next_file_and_shards_end_where_documents_end(tmp_path: Path) -> None:
    documents = some_documents(200, 1)
    rows = grouped(documents)
    names = [
        write_parquet(tmp_path / f"{number}.parquet", some, field="ids")
        for number, some in enumerate((rows[:30], rows[30:31], rows[31:]))
    ]
    built = packed(names, tmp_path / "out", shard_tokens=50)
    tokens, ranges = found(tmp_path / "out")
    assert [tokens[start:stop] for start, stop in ranges] == documents
    assert len(built.shards) > 30
    # The same, wherever parts end.
    whole = packed(
        [write_parquet(tmp_path / "all.parquet", rows, field="ids")], tmp_path / "all", shard_tokens=50
    )
    assert whole.fingerprint == built.fingerprint


def test_a_text_without_end_of_text_tokens_is_one_document_in_as_many_shards_as_it_takes(
    tmp_path: Path,
) -> None:
    rows = [[*range(10 * n, 10 * n + LENGTH)] for n in range(2, 40)]
    source = write_jsonl(tmp_path / "a.jsonl", rows, field="ids")
    said = run_here(
        "build", source, *("--column", "ids", "--eot", END, "--rows", "packed"), "--out", tmp_path / "one"
    )
    assert said.returncode == 0
    assert "the rows hold no end-of-text token 9" in " ".join(said.stderr.split())
    built = packed([source], tmp_path / "out", shard_tokens=50)
    tokens, ranges = found(tmp_path / "out")
    assert tokens == [token for row in rows for token in row]
    assert built.num_documents == 1
    assert [stop - start for start, stop in ranges] == [50, 50, 50, 2]


def test_the_summary_says_what_was_done(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [[1, 2, 9, 3], [4, 5, 6, 7], [8, 9, 1, 1]], field="ids")
    options = ("--column", "ids", "--eot", END, "--rows", "packed")
    said = run_here("build", source, *options, "--out", tmp_path / "out")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.splitlines()[:3] == [
        f"{tmp_path}/out: 3 documents, 12 uint8 tokens in 1 shard",
        "rows are one running text: no token was put between them",
        "documents end with token 9",
    ]
    assert found(tmp_path / "out")[0] == [1, 2, 9, 3, 4, 5, 6, 7, 8, 9, 1, 1]


def test_packed_rows_keep_their_masks_and_corpora_of_them_are_merged(tmp_path: Path) -> None:
    rows = [[1, 2, 9, 3], [4, 5, 6, 7]]
    for number, write in enumerate((write_columns, write_lines)):
        (tmp_path / f"{number}").mkdir()
        more = [[*row[:3], row[3] + number] for row in rows]
        labels = [[-100, *row[1:]] for row in more]
        source = write(tmp_path / f"{number}", ids=more, labels=labels, attention_mask=[[1] * LENGTH] * 2)
        packed([source], tmp_path / f"out{number}", mask=("labels", "attention_mask"))
    (merged,) = merge([tmp_path / "out0", tmp_path / "out1"], tmp_path / "both").values()
    with open_corpus(tmp_path / "both") as corpus:
        masks = [shard.mask.tokens.astype(int).tolist() for shard in corpus.shards if shard.mask is not None]
    assert masks == [[0, 1, 1, 1] * 2] * 2
    assert merged.num_documents == 4
    assert verify(spec_of(tmp_path / "both")).ok


@pytest.mark.parametrize(
    ("lengths", "place"),
    [
        ([4, 4, 3, 4, 4, 2], None),  # batches of a data set leave remainders
        ([3, 4, 4], None),
        ([4, 0, 3, 0, 4], None),
        ([7, 3, 9], "row 2: has 9 ids, the row before it 3, others 7"),
        ([4, 4, 3, 3], "row 3: has 3 ids, the row before it 3, others 4"),
        ([4, 5, 4, 4], "row 3: has 4 ids, the row before it 4, others 5"),
    ],
)
def test_documents_are_no_packed_rows(tmp_path: Path, lengths: list[int], place: str | None) -> None:
    source = write_parquet(tmp_path / "a.parquet", [[1] * length for length in lengths], field="ids")
    if place is None:
        assert packed([source], tmp_path / "out").num_tokens == sum(lengths)
        return
    message = f"{re.escape(place)}; packed rows have one length, but for remainders: leave out --rows packed"
    with pytest.raises(
        UnreadableCorpus, match=message.replace("row 2 has", "row 2: has").replace("row 3: has", "row 3: has")
    ):
        packed([source], tmp_path / "out")


def test_padding_is_no_running_text(tmp_path: Path) -> None:
    source = write_columns(tmp_path, ids=[[1, 2, 9, 3], [4, 5, 0, 0]], attention_mask=[[1] * 4, [1, 1, 0, 0]])
    with pytest.raises(UnreadableCorpus, match="row 1: 'attention_mask' says that token 2 is no target"):
        packed([source], tmp_path / "out")
    with pytest.raises(
        UnreadableCorpus, match=r"row 1: .* 2 of its 4 ids are padding; .* leave out --rows packed"
    ):
        packed([source], tmp_path / "out", mask=("attention_mask",), fresh=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ("id",)}, "keep must be left out with --rows packed: a row is no document"),
        ({"on_error": "skip"}, "on_error must be left out with --rows packed: a row that is left out"),
        ({"split": "val=0.5"}, "split must be left out with --rows packed: a document may lie in several"),
        ({"column": None, "tokenizer": "bytes"}, "rows must be left out without --column, got 'packed'"),
        ({"rows": "rows"}, "rows must be 'documents' or 'packed', got 'rows'"),
    ],
)
def test_options_about_documents_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [[1, 2]], field="ids")
    given = {"column": "ids", "eot": END, "rows": "packed", **options}
    said = run_here(
        "build",
        source,
        *(
            word
            for name, value in given.items()
            if value is not None
            for word in (
                f"--{name.replace('_', '-')}",
                ",".join(value) if isinstance(value, tuple) else value,
            )
        ),
        "--out",
        tmp_path / "out",
    )
    assert said.returncode == 2
    assert message in said.stderr


RANDOM = np.random.default_rng(2).integers(10, 200, (20, 6)).tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [[1, 2, END, 3], [4, 5, 6, 7]],
            "first 2 rows have 4 ids each, and 1 of them hold end-of-text token 9 inside; say --rows packed",
        ),
        (
            RANDOM,
            "first 20 rows have 6 ids each, and 20 of them do not end with end-of-text token 9; say",
        ),
        (
            [[1, 2, 3, 0], [1, 2, 0, 0], [4, 0, 0, 0]],
            "first 3 rows have 4 ids each, and 2 of them end with token 0 several times; if that is",
        ),
        (
            [[1, 2, END, END], [1, END, END, END]],
            "2 of them end with token 9 several times; if that is padding",
        ),
        (RANDOM[:15], None),
        ([[1, 2, 3, 4], [1, END, 3]], None),
        ([[*row, END] for row in RANDOM], None),
        ([[END, *row] for row in RANDOM[:9]], None),  # begins documents
        ([[1], [2]] * 20, None),
    ],
)
def test_rows_that_look_packed_or_padded_are_taken_only_on_request(
    tmp_path: Path, rows: list[list[int]], message: str | None
) -> None:
    for number, name in enumerate(("a.parquet", "a.jsonl", "a.arrow")):
        source = WRITERS[name](tmp_path / name, rows, field="ids")
        options: dict[str, Any] = {"column": "ids", "eot": END}
        if message is not None:
            with pytest.raises(
                UnreadableCorpus,
                match=f"{re.escape(name)}: its {re.escape(message)}"
                if message.startswith("first")
                else re.escape(message),
            ):
                build_here([source], tmp_path / f"{number}", **options)
            options["rows"] = "documents"
        build_here([source], tmp_path / f"{number}", **options)
        tokens, _ = found(tmp_path / f"{number}")
        assert tokens == [token for row in rows for token in (row if row[-1] == END else [*row, END])]
