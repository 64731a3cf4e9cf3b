"""The quick start's corpus, a run that was stopped, and all that `find` says of both, against brute force."""

from __future__ import annotations

from pathlib import Path

from scripts.contamination_case import run_case


def test_what_find_says_is_what_brute_force_finds(tmp_path: Path) -> None:
    found = run_case(tmp_path, corpus_mb=1, num_items=30, steps=60, stop=20)
    assert found["wrong"] == []
    assert found["items found"] >= 10
    assert 0 < found["items seen before step 20"] < found["items seen before step 60"]
