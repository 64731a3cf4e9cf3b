"""`corpus-server build` as a person meets it: text in, a served corpus out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.corpus.test_tokenizers import write_tokenizer_json
from tests.server.tools.building.sources import WRITERS, texts, write_jsonl
from tests.server.tools.building.test_samples import shard
from tests.serving import RunningServer, run_here


def test_text_becomes_a_corpus_that_is_served_as_text(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "1.txt").write_text("the first text, Grüße")
    more = write_jsonl(tmp_path / "more.jsonl", texts(50))
    tokenizer = write_tokenizer_json(tmp_path)
    options = ("--tokenizer", tokenizer, "--split", "val=0.2", "--processes", "2", "--out", tmp_path / "web")
    said = run_here("build", tmp_path / "texts", more, *options)
    assert (said.returncode, said.stderr) == (0, "")
    lines = said.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}/web/train: ")
    assert lines[0].endswith(" uint16 tokens in 1 shard")
    assert not (tmp_path / "web.building").exists()

    # What is built already is only described.
    built = json.loads(run_here("build", tmp_path / "texts", more, *options, "--json").stdout)
    assert sum(each["num_documents"] for each in built.values()) == 51

    named = {"web": tmp_path / "web"}
    with RunningServer(named, tmp_path, arguments=["--splits"]) as server:
        documents = [
            server.get(f"/v1/corpora/web-{split}/documents/{number}?format=text").body.decode()
            for split in ("train", "val")
            for number in range(built[str(tmp_path / "web" / split)]["num_documents"])
        ]
    assert any("the first text, Grüße<|endoftext|>" in each for each in documents)


def test_a_build_ends_with_what_was_read_and_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "train-0-of-2.jsonl", ["a", "", None, "b"])
    for name in ("val.jsonl", "info.json", "x.png", "y.png", "z.png"):
        (tmp_path / "in" / name).write_text("{}")
    said = run_here("build", f"{tmp_path}/in#train", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert said.returncode == 0
    assert "1 of the 2 files train-*-of-2.jsonl is missing: number 1; were all" in " ".join(
        said.stderr.split()
    )
    _, eot, head, *rows = (" ".join(line.split()) for line in said.stdout.splitlines())
    assert eot == "documents end with token 0 '\\x00'"
    assert head == "documents files why"
    assert rows == [
        "read 2 1",
        "left out 2 empty or null",
        "left out 1 plain .json may describe other files; name it to read it info.json",
        "left out 1 of another split val.jsonl",
        "left out 3 of no kind that is read; --include reads it as text x.png, y.png, ...",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "tokenizer must be 'gpt2' or another model of the Hugging Face Hub, a tokenizer.json, "),
        (("--tokenizer", "bytes", "--split", "val"), "split must be NAME=SHARE, for example val=0.001"),
        (
            ("--tokenizer", "bytes", "--split", "web=0.1"),
            "split must be one of dev, eval, holdout, test, val",
        ),
        (("--tokenizer", "bytes"), "a.jsonl: line 2: is not JSON"),
        (("--column", "ids"), "no end-of-text token is known, because there is no tokenizer"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    said = run_here("build", tmp_path / "a.jsonl", "--out", tmp_path / "out", *arguments)
    assert (said.returncode, said.stdout) == (2, "")
    (line,) = said.stderr.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [*WRITERS, "c.txt", "c.mds"])
def test_every_source_is_checked_before_any_work(tmp_path: Path, name: str) -> None:
    """A build of hours must not end at its last file, because that has another field."""
    good = write_jsonl(tmp_path / "good.jsonl", texts(3))
    bad = tmp_path / name
    if name == "c.txt":
        bad.write_bytes(b"abc\xff")
    elif name == "c.mds":
        bad.write_bytes(shard([("body", "str", b"To be")]))
    else:
        WRITERS[name](bad, texts(3), field="body")
    said = run_here("build", good, bad, "--tokenizer", "bytes", "--out", tmp_path / "out")
    (line,) = said.stderr.splitlines()
    assert said.returncode == 2
    assert f"{name}: " in line
    assert ("'body'" in line) == (name != "c.txt")
    assert not (tmp_path / "out.building").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["s3://bucket/web"], "source must be a path of this machine, or hf://..., got 's3://bucket/web'"),
        (["a.jsonl", "--fresh", "--task", "0/2"], "fresh must be left out with --task"),
        (
            ["a.jsonl", "--tokenizer", "tok.json"],
            "No such file or directory; check its path, or name",
        ),
    ],
)
def test_what_build_cannot_read_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    named = [str(tmp_path / each) if each == "a.jsonl" else each for each in arguments]
    tokenizer = [] if "--tokenizer" in named else ["--tokenizer", "bytes"]
    said = run_here("build", *tokenizer, *named, "--out", tmp_path / "out")
    (line,) = said.stderr.splitlines()
    assert said.returncode == 2
    assert message in line
