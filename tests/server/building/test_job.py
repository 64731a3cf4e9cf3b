"""What a build was told is kept whole, and read only by those who understand it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corpus_server.building.job import BuildOptions, Job, Split
from corpus_server.building.sources import find_inputs, plan_parts
from corpus_server.errors import UnreadableCorpus


def test_a_job_is_read_as_it_was_saved_and_not_by_another_release(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text")
    inputs = find_inputs([str(source)])
    splits = (Split(name="val", share=0.1),)
    options = BuildOptions(tokenizer="bytes", eot=0, vocab_size=256, splits=splits)
    job = Job(options=options, inputs=inputs, parts=plan_parts(inputs))
    assert Job.load(tmp_path) is None
    job.save(tmp_path)
    assert Job.load(tmp_path) == job
    document = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps({**document, "version": 2}))
    with pytest.raises(UnreadableCorpus, match=r"begun by another release \(its version is 2, not 1\)"):
        Job.load(tmp_path)
