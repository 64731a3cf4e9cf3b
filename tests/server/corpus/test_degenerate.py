"""Corpora that hold one token, or one document, again and again are named; others are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from corpus_server.corpus.degenerate import find_degenerate
from tests.corpora import open_corpus, some_tokens, write_npy
from tests.server.corpus.test_tokenizers import write_tokenizer_json
from tests.server.tools.building.sources import build_here, texts, write_jsonl
from tests.serving import run_here


def test_a_shard_of_unknown_words_is_named_by_build_verify_and_inspect(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "the": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", texts(300))
    out = tmp_path / "out"
    told = f"{out}/000000.npy: "
    for arguments in (
        ("build", source, "--tokenizer", tmp_path / "tokenizer.json", "--out", out),
        ("verify", out),
        ("inspect", out, "--stats"),
    ):
        said = run_here(*arguments)
        assert said.returncode == 0
        line = " ".join(said.stderr.split())
        assert told in line
        assert "sampled tokens are 0 '<unk>': was the text encoded by the right tokenizer?" in line
    assert run_here("inspect", out).stderr == ""


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["the same text, again and again"] * 200, "all of 64 sampled documents, of 200, are equal"),
        (list("abcdefgh") * 25, "all of 64 sampled documents, of 200, have one token"),
    ],
)
def test_documents_that_are_all_alike_are_named_by_the_same_commands(
    tmp_path: Path, rows: list[str], message: str
) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out"
    for arguments in (
        ("build", source, "--tokenizer", "bytes", "--out", out),
        ("verify", out),
        ("inspect", out, "--stats"),
    ):
        said = run_here(*arguments)
        assert said.returncode == 0
        assert message in " ".join(said.stderr.split())


def test_ids_beyond_the_vocabulary_are_named_and_refused_by_build(tmp_path: Path) -> None:
    tokenizer = write_tokenizer_json(tmp_path)  # of 300 ids
    ids = some_tokens(5000, dtype="uint16", vocabulary=299)
    ids[::50] = 300
    write_npy(tmp_path / "0.npy", ids, dtype="uint16")
    for command in (("verify",), ("inspect", "--stats"), ("inspect",)):
        said = run_here(*command, tmp_path)
        assert "holds token 300, but the ids of its tokenizer" in " ".join(said.stderr.split())
    source = write_jsonl(tmp_path / "a.jsonl", [ids.tolist()], field="ids")
    said = run_here("build", source, "--column", "ids", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert said.returncode == 2
    assert "line 1: token id 300 is outside [0, 300); is it the column of ids, and their tok" in said.stderr


def test_documents_that_are_all_alike_are_named(tmp_path: Path) -> None:
    for number, (rows, message) in enumerate(
        [
            (["the same text, again and again"] * 200, "all of 64 sampled documents, of 200, are equal"),
            (list("abcdefgh") * 25, "all of 64 sampled documents, of 200, have one token"),
            (texts(200), None),
        ]
    ):
        source = write_jsonl(tmp_path / f"{number}.jsonl", rows)
        build_here([source], tmp_path / f"{number}", tokenizer="bytes")
        with open_corpus(tmp_path / f"{number}") as corpus:
            found = find_degenerate(corpus)
        assert (message is None) == (found == [])
        assert message is None or message in found[0]


@pytest.mark.parametrize(("share", "is_told"), [(0.45, False), (0.55, True)])
def test_one_id_must_be_more_than_half_of_a_shard(tmp_path: Path, share: float, is_told: bool) -> None:
    tokens = some_tokens(100_000, dtype="uint16", vocabulary=40_000)
    tokens[np.random.default_rng(0).random(tokens.size) < share] = 7
    write_npy(tmp_path / "0.npy", some_tokens(100_000, dtype="uint16", vocabulary=40_000), dtype="uint16")
    write_npy(tmp_path / "1.npy", tokens, dtype="uint16")
    with open_corpus(tmp_path) as corpus:
        found = find_degenerate(corpus)
    assert [f"{tmp_path}/1.npy: 55% of" in each or f"{tmp_path}/1.npy: 5" in each for each in found] == [
        True
    ] * is_told
