"""What messages say to do: commands are spelled for a shell and do it; names in sentences are as they are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from corpus_server.corpus.verify import record
from corpus_server.errors import UnreadableCorpus
from tests.corpora import open_corpus, some_tokens, spec, write_raw
from tests.serving import run_here

NAME = "it's my web, v2 #1"


def escaped(path: Path) -> str:
    return re.sub(r"[\\,#?]", r"\\\g<0>", str(path))


def test_a_guessed_dtype_is_said_so_that_the_line_can_be_copied(tmp_path: Path) -> None:
    path = write_raw(tmp_path / f"{NAME}.bin", some_tokens(4000, vocabulary=128_256), dtype="uint32")
    said = " ".join(run_here("inspect", escaped(path)).stderr.split())
    (hint,) = re.findall(r"name it (.*) \(or dtype=int32", said)
    (argument,) = shlex.split(hint)
    shown = run_here("inspect", argument)
    assert (shown.returncode, "4,000 (uint32)" in shown.stdout) == (0, True)


def test_statistics_and_verify_say_the_whole_command(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    write_raw(tmp_path / NAME / "0.bin", some_tokens(4000), dtype="uint32")
    argument = f"{escaped(tmp_path / NAME)},dtype=uint32"
    shown = " ".join(run_here("inspect", "--stats", argument).stdout.split())
    (hint,) = re.findall(r"no document index: make one with (corpus-server .*),eot=ID", shown)
    assert run_here(*shlex.split(hint)[1:-1], f"{shlex.split(hint)[-1]},eot=7").returncode == 0
    shown = " ".join(run_here("verify", argument).stdout.split())
    (hint,) = re.findall(r"record them with: (corpus-server verify --record .*)$", shown)
    assert run_here(*shlex.split(hint)[1:]).returncode == 0
    write_raw(tmp_path / NAME / "0.bin", some_tokens(4000, seed=5), dtype="uint32")
    (tmp_path / NAME / "0.bin.documents").unlink()
    said = " ".join(run_here("inspect", argument).stderr.split())
    (hint,) = re.findall(r"run `(corpus-server verify .*)` to find the block", said)
    assert run_here(*shlex.split(hint)[1:]).returncode == 1


def test_names_in_sentences_are_as_they_are(tmp_path: Path) -> None:
    for name in ("train a.bin", "val $b.bin"):
        write_raw(tmp_path / name, [1, 2, 3])
    with pytest.raises(UnreadableCorpus, match=r"train \(train a\.bin\), val \(val \$b\.bin\)"):
        open_corpus(tmp_path)


def test_a_mask_that_came_later_is_told_with_the_command(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [1, 2, 3])
    record(spec(tmp_path))
    (tmp_path / "a.bin.mask.npy").write_bytes(bytes([1, 0, 1]))
    with pytest.raises(UnreadableCorpus, match=f"`corpus-server verify --record {tmp_path}`"):
        open_corpus(tmp_path)
