"""What a build was told is kept whole, and read only by those who understand it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.job import BuildOptions, Input, Job, Split
from corpus_server.tools.building.sources import plan_parts


def test_a_job_is_read_as_it_was_saved_and_not_by_another_release(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"\xff") / "a.txt"
    source.parent.mkdir()
    source.write_text("text")
    inputs = (Input.of(source),)
    splits = (Split(name="val", share=0.1),)
    options = BuildOptions(tokenizer="bytes", eot=0, vocab_size=256, splits=splits)
    job = Job(options=options, inputs=inputs, parts=plan_parts(inputs))
    assert Job.load(tmp_path) is None
    job.save(tmp_path)
    assert Job.load(tmp_path) == job
    document = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps({**document, "version": 2}))
    with pytest.raises(UnreadableCorpus, match="is no job of version 1: version: Input should be 1"):
        Job.load(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[]", '{"version": 1, "options": {"x": 1}}', "[" * 10_000, "9" * 5_000]
)
def test_a_damaged_job_is_named_with_the_way_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.json").write_text(content)
    with pytest.raises(
        UnreadableCorpus, match=r"job\.json: is no job of version 1: .*; say --fresh to build anew"
    ):
        Job.load(tmp_path)


def test_an_input_that_was_written_to_is_another_one(tmp_path: Path) -> None:
    """Also if it has as many bytes as before."""
    path = tmp_path / "a.txt"
    path.write_text("text")
    before = Input.of(path)
    assert replace(before, name="another") == before
    os.utime(path, ns=(1, 1))
    assert Input.of(path) != before
