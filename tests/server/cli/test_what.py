"""`corpus-server what` prints the rows that Megatron-Core itself gave for a step of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import write_megatron
from tests.megatron import CASES, THREE, names, specs
from tests.serving import run_here

ROWS = CASES["three paths, two epochs"]["first"]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of the arguments of a run, which names its data as from the current folder."""
    specs(THREE, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert THREE.weights is not None
    blend = " ".join(f"{weight} {name}" for weight, name in zip(THREE.weights, names(THREE), strict=True))
    file = tmp_path / "arguments.txt"
    file.write_text(
        f"--num-layers 12 --data-path {blend} --split {','.join(map(str, THREE.split))} --seed {THREE.seed} "
        f"--seq-length {THREE.seq_len} --global-batch-size 2 --train-samples {THREE.num_samples}\n"
    )
    return file


def lines(*words: str | Path) -> tuple[list[dict[str, Any]], str]:
    done = run_here("what", *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_step_is_what_megatron_saw(arguments: Path) -> None:
    found, said = lines(arguments, "--step", "0")
    rows: dict[int, list[int]] = {}
    for each in found:
        rows.setdefault(each["row"], []).extend(each["tokens"])
        assert each["document"] is not None
    assert [rows[number] for number in range(2)] == ROWS
    assert "--num-layers" in said, "what is not looked at is said"
    later, _ = lines(arguments, "--step", "3", "--count", "2")
    assert {each["step"] for each in later} == {3, 4}


def test_text_in_place_of_tokens(tmp_path: Path) -> None:
    write_megatron(tmp_path / "web", [list(b"one two "), list(b"three four ")], dtype="uint8")
    file = tmp_path / "arguments.txt"
    file.write_text(f"--data-path {tmp_path / 'web'} --split 1 --seq-length 8 --global-batch-size 2")
    found, _ = lines(file, "--step", "0", "--num-samples", "2", "--tokenizer", "bytes")
    assert all(each["text"].encode() in b"one two three four " for each in found)


def test_what_cannot_be_told_is_one_line(arguments: Path, tmp_path: Path) -> None:
    for text, words, said in (
        ("--seq-length 8 --global-batch-size 2 --train-iters 3", (), "paths of tokens"),
        (f"--data-path {tmp_path}/none --seq-length 8 --global-batch-size 2 --train-iters 3", (), "none"),
        (arguments.read_text(), ("--seq-len", "0"), "seq_len"),
        (arguments.read_text().replace("--train-samples", "--samples"), (), "num_samples"),
        ("trainer:\n  max_steps: 3\n", (), "trainer must be one of megatron, neox, olmo"),
        ('{"data-path": "web"}', ("--trainer", "megatron"), "name another trainer"),
    ):
        arguments.write_text(text)
        done = run_here("what", arguments, "--step", "0", *words)
        assert done.returncode == 2, done.stderr
        (error,) = [each for each in done.stderr.splitlines() if each.startswith("error:")]
        assert said in error.replace("-samples", "_samples")


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        (
            "# A run of Pythia\n---\ndata-path: none/web\nseq-length: 8\ntrain_batch_size: 2\ntrain_iters: 3",
            "neox",
        ),
        (
            '{"train_data_paths": ["none/web"], "seq_length": 8, "train_batch_size": 2, "train_iters": 3}',
            "neox",
        ),
        (
            "dataset:\n  paths: [none/web.npy]\n  sequence_length: 8\ndata_loader: {global_batch_size: 16}",
            "olmo",
        ),
        ("data: {paths: [none/web.npy], drop_last: true}\nmodel: {max_sequence_length: 8}", "olmo"),
        ("--data-path none/web --seq-length 8 --global-batch-size 2 --train-iters 3", "megatron"),
        ("# blend\n1 none/web", "megatron"),
    ],
    ids=lambda text: text[:24],
)
def test_whose_configuration_it_is_follows_from_its_fields(text: str, trainer: str, tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text(text)
    done = run_here("what", file, "--step", "0")
    assert done.stderr.startswith(f"read as a configuration of {trainer}; --trainer names another\n")
    (error,) = [each for each in done.stderr.splitlines() if each.startswith("error:")]
    assert "configuration" not in error or "does not say" in error, "it was read"
