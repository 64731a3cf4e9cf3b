"""Whatever a user may name may be a pipe, a device, nested deeply or full of digits: one line, at once."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import write_npy, write_raw
from tests.serving import run_here

DEEP = "[" * 10_000 + "]" * 10_000
DIGITS = "9" * 5_000


def refused(*arguments: str | Path) -> str:
    """Run a command that must end with exit code 2 and one line; return the line."""
    ended = run_here(*arguments)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended
    return ended.stderr


def mds(folder: Path, config: str) -> Path:
    """Write an MDS shard of one sample of four uint16 tokens."""
    text = config.encode()
    first = 12 + len(text)
    (folder / "shard.00000.mds").write_bytes(struct.pack("<III", 1, first, first + 8) + text + bytes(8))
    return folder / "shard.00000.mds"


def litdata(folder: Path, index: str) -> Path:
    """Write a chunk of litData with one item of four uint16 tokens."""
    (folder / "index.json").write_text(index)
    (folder / "chunk-0-0.bin").write_bytes(struct.pack("<III", 1, 12, 20) + bytes(8))
    return folder / "chunk-0-0.bin"


def hashes(folder: Path, text: str) -> Path:
    """Write a corpus with recorded hashes."""
    (folder / "corpus.hashes.json").write_text(text)
    write_npy(folder / "0.npy", range(10))
    return folder


BUILD = ("build", "--column", "tokens", "--eot", "0", "--processes", "1", "--out")
DELETED = "deleted"
CONFIG = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16:4"], "column_sizes": [8]}
INDEX = {
    "config": {"data_format": ["no_header_tensor:20"], "compression": None},
    "chunks": [{"filename": "chunk-0-0.bin", "dim": 4}],
}
DAMAGED = {
    "nested": DEEP,
    "digits": DIGITS,
    "nested inside": f'{{"column_names": {DEEP}, "config": {DEEP}, "sampled": {DEEP}}}',
    "list": "[1]",
    "text": '"config"',
    "null": "null",
    "numbers": json.dumps({"column_names": 5, "config": 5, "chunks": 5, "shards": 5}),
}


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("write", [mds, litdata, hashes])
def test_a_damaged_text_is_one_line(
    tmp_path: Path, write: Callable[[Path, str], Path], text: str, command: str
) -> None:
    path = write(tmp_path, text)
    ended = run_here(command, path)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2 or (ended.returncode, command) == (1, "verify"), said
    assert "MDS" in said or "litData" in said or "hashes" in said


@pytest.mark.parametrize(
    "changed",
    [
        {"column_sizes": "no"},
        {"column_sizes": DELETED},
        {"column_sizes": [-8]},
        {"column_encodings": ["ndarray:nothing:4"]},
        {"column_encodings": ["ndarray:float32:2"]},
        {"column_encodings": ["ndarray"]},
        {"column_encodings": [f"ndarray:uint16:{DIGITS}"]},
    ],
)
def test_a_shard_that_build_cannot_read_is_one_line(tmp_path: Path, changed: dict[str, object]) -> None:
    config = {name: each for name, each in {**CONFIG, **changed}.items() if each != DELETED}
    path = mds(tmp_path, json.dumps(config))
    refused("inspect", path)
    if DIGITS not in str(changed):  # a build reads the shape of each sample
        refused(*BUILD, tmp_path / "out", path)


@pytest.mark.parametrize(
    "changed",
    [
        {"config": {"data_format": [f"no_header_tensor:{DIGITS}"]}},
        {"config": {"data_format": 5}},
        {"chunks": [{"filename": "chunk-0-0.bin", "dim": 10**4000}]},
        {"chunks": [{"filename": ["chunk-0-0.bin"], "dim": 4}]},
    ],
)
def test_an_index_of_litdata_with_impossible_values_is_one_line(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    path = litdata(tmp_path, json.dumps({**INDEX, **changed}))
    refused("inspect", path)
    if "dim" not in str(changed):  # only a chunk that is mapped is believed
        refused(*BUILD, tmp_path / "out", path)


def test_a_name_that_is_given_twice_is_refused_wherever_people_write_json(tmp_path: Path) -> None:
    """The last value would be taken without a word, and which one is meant is not known."""
    shard = write_raw(tmp_path / "a.bin", [1, 2, 0, 3, 0])
    table, plan = tmp_path / "t.jsonl", tmp_path / "plan.json"
    table.write_text('{"score": 1, "url": "https://a"}\n{"score": 2, "url": "https://b", "score": 3}\n')
    stage = '{"global_batch_size": 1, "mixture": {"a": 1}}'
    plan.write_text(f'{{"seq_len": 2, "seed": 1, "seed": 2, "stages": [{stage}]}}')
    arguments = tmp_path / "arguments.json"
    arguments.write_text('{"seq_length": 8, "global_batch_size": 2, "seed": 1, "seed": 2}')
    assert "line 2: 'score' is given twice" in refused("index", f"{shard},eot=0", "--metadata", table)
    staged = ("stage", f"a={shard}", "--plan", plan, "--steps", "0:1", "--cache-dir", tmp_path / "cache")
    assert "'seed' is given twice" in run_here(*staged).stderr
    assert "'seed' is given twice" in run_here("what", arguments, "--step", "0").stderr


def test_metadata_with_a_number_of_many_digits_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.ds").write_bytes(bytes(8))
    for text in (f"tokenizer|{DIGITS}\n4\n", f"tokenizer|2\n{DIGITS}\n"):
        (tmp_path / "x.ds.metadata").write_text(text)
        assert "x.ds.metadata" in refused("inspect", tmp_path / "x.ds").replace(" ", "")


def test_options_with_a_number_of_many_digits_are_one_line(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", range(10))
    assert "eot must be" in refused("inspect", f"{path},eot={DIGITS}")
    assert "token_range must be" in refused("inspect", f"{path},token_range=0,{DIGITS}")


@pytest.fixture(params=["pipe", "device", "folder"])
def not_a_file(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Make something under a name that is no regular file."""

    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        return path

    return make


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("in/corpus.hashes.json", ("inspect", "in")),
        ("in/0.npy.documents", ("inspect", "in")),
        ("tokenizer.json", ("inspect", "in,tokenizer=tokenizer.json")),
        ("tokenizer.json", ("serve", "in,tokenizer=tokenizer.json", "--port", "0")),
        ("tokenizer.json", ("build", "a.txt", "--tokenizer", "tokenizer.json", "--out", "out")),
        ("corpus.toml", ("serve", "--config", "corpus.toml")),
        ("in/manifest.json", ("merge", "in", "in", "--out", "out")),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    not_a_file: Callable[[str], Path],
    name: str,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    write_npy(tmp_path / "in" / "0.npy", range(10))
    (tmp_path / "a.txt").write_text("text")
    not_a_file(name)
    said = refused(*arguments)
    assert "expected a regular file" in said or "is a symbolic link that leaves" in said


def test_listed_ends_in_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    np.arange(10, dtype="<u2").tofile(tmp_path / "part-0.npy")
    os.mkfifo(tmp_path / "part-0.csv.gz")
    assert "expected a regular file" in refused("index", tmp_path / "part-0.npy")
