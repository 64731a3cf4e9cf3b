"""Long commands say how far they have come: in pieces of less than a second's work, up to the whole."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.index import index
from corpus_server.corpus.verify import record, verify
from corpus_server.tools.building.driver import build, choose_options
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.part import build_part
from corpus_server.tools.building.running import in_processes
from corpus_server.tools.building.sources import plan_parts
from corpus_server.tools.processes import Count, count, counted_in_processes
from corpus_server.tools.viewing import Selection, create
from corpus_server.tools.viewing.attach import attach
from tests.corpora import spec, write_raw
from tests.serving import command, environment, wait_until

MIB = 2**20
PIECE = 2 * MIB
"""A slow disk reads it in a second."""


class Told:
    """What was reported, by what was being done."""

    def __init__(self) -> None:
        self.done: dict[str, list[int]] = defaultdict(list)
        self.totals: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int, num_tokens: int) -> None:
        self.done[what].append(done)
        self.totals[what] = total

    def check(self, what: str, *, most: int) -> None:
        """Check that work was reported from nothing to the end, `most` of it at a time."""
        done = self.done[what]
        assert done[-1] == self.totals[what] > 0
        assert max(np.diff([0, *done])) <= most, (what, done)
        assert min(np.diff([0, *done])) >= 0, (what, done)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a corpus of 40 MB in two shards, of which a document is 1,000 tokens."""
    (folder := tmp_path / "web").mkdir()
    tokens = np.arange(10_000_000, dtype=np.uint16) % 1000
    for number in range(2):
        write_raw(folder / f"{number}.bin", tokens)
    return folder


def test_hashing_and_indexing_are_told_by_the_piece(corpus: Path) -> None:
    of_index, of_record, of_verify = Told(), Told(), Told()
    index(spec(corpus, eot=999), progress=of_index)
    of_index.check("reading", most=PIECE)
    record(spec(corpus), progress=of_record)
    of_record.check("hashing", most=PIECE)
    assert verify(spec(corpus), progress=of_verify).ok
    of_verify.check("hashing", most=PIECE)


def test_a_bad_block_is_told_too(corpus: Path) -> None:
    record(spec(corpus))
    with (corpus / "1.bin").open("r+b") as file:
        file.write(b"\1\2")
    told = Told()
    assert not verify(spec(corpus), progress=told).ok
    told.check("hashing", most=PIECE)


def test_a_view_and_metadata_are_told_by_documents(corpus: Path, tmp_path: Path) -> None:
    num_documents = index(spec(corpus, eot=999)).num_documents
    (tmp_path / "scores.csv").write_text("score\n" + "".join(f"{each}\n" for each in range(num_documents)))
    told = Told()
    attach(spec(corpus), str(tmp_path / "scores.csv"), progress=told)
    selection = Selection(where="score >= 100", repeat="2")
    create(spec(corpus), selection, tmp_path / "some.view", told)
    for what in ("reading", "writing", "choosing", "repeating", "indexing"):
        told.check(what, most=num_documents)
        assert told.totals[what] == num_documents, what


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a file of texts, 8 MB."""
    line = '{"text": "' + "so it goes " * 900 + '"}\n'
    (path := tmp_path / "a.jsonl").write_text(line * 800)
    return path


def test_a_build_is_told_from_its_start_to_its_end(texts: Path, tmp_path: Path) -> None:
    """Processes start; in the end each byte was counted once."""
    options, told = choose_options(tokenizer="bytes", eot=None, shard_tokens=10**6), Told()
    build([str(texts)], tmp_path / "out", options, partial(in_processes, num_processes=1), told)
    assert told.done["starting"] == [0]
    for what in ("tokenizing", "hashing sources", "joining", "hashing"):
        told.check(what, most=told.totals[what])


def test_a_part_is_told_batch_by_batch(texts: Path, tmp_path: Path) -> None:
    options = choose_options(tokenizer="bytes", eot=None)
    part, notes = plan_parts(find_inputs([str(texts)]).inputs)[0], list[int]()
    build_part(options, part, tmp_path, notes.append)
    assert len(notes) > 1
    assert max(notes) < MIB / 2
    assert sum(notes) == pytest.approx(part.num_bytes, rel=0.1)


def count_and_wait(go_on: Path) -> str:
    """Count 3, and end when a file is there."""
    count(3)
    wait_until(go_on.exists)
    return "ended"


def test_what_a_process_counts_is_known_before_it_ends(tmp_path: Path) -> None:
    go_on, found = tmp_path / "go-on", list[object]()
    for each in counted_in_processes(count_and_wait, [(go_on,)], num_processes=1, what="the test"):
        found.append(each)
        if each == Count(3):
            go_on.touch()
    assert found.index(Count(3)) < found.index("ended")


def under_a_terminal(*words: str | Path) -> str:
    """Run a command whose errors go to a terminal; return what it draws there."""
    ours, theirs = pty.openpty()
    env = environment(TERM="xterm")
    del env["NO_COLOR"]
    with subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=theirs, env=env) as process:
        os.close(theirs)
        drawn = b""
        try:
            while piece := os.read(ours, 65536):
                drawn += piece
        except OSError:  # the last process closed the terminal
            pass
        os.close(ours)
    assert process.returncode == 0, drawn
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode())


def test_a_bar_shows_what_is_done_and_how_much(corpus: Path, texts: Path, tmp_path: Path) -> None:
    drawn = under_a_terminal("index", f"{corpus},eot=999")
    assert re.search(r"reading .* 38\.1/38\.1 MiB", drawn), drawn
    drawn = under_a_terminal("view", "create", f"{corpus}", "--out", tmp_path / "all.view")
    assert re.search(r"indexing .* (\d+)/\1 documents", drawn), drawn
    drawn = under_a_terminal("build", texts, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert re.search(r"starting .*/7\.6 MiB", drawn), drawn
    assert re.search(r"tokenizing .*/7\.6 MiB", drawn), drawn
