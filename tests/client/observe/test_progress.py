"""The line says how it goes, and the batches pass unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from corpus_client import CorpusLoader
from corpus_client.observe import progress
from corpus_client.observe.attribution import LoaderStats

MakeLoader = Callable[..., CorpusLoader]


def test_every_batch_is_counted_once_also_after_a_break(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(progress, "PLAIN_EVERY_SECONDS", 0.0)
    for number in progress.shown(iter(range(10)), LoaderStats, 10):
        if number == 6:
            break
    assert [text.partition(" ")[0] for text in capsys.readouterr().err.splitlines()] == [*"1234567"]
    monkeypatch.setattr(progress, "PLAIN_EVERY_SECONDS", 1e9)
    assert list(progress.shown(iter(range(5)), LoaderStats, None)) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err.startswith("5 steps: ")


@pytest.mark.parametrize("installed", [True, False])
def test_loader_shows_its_progress_on_stderr(
    make_loader: MakeLoader,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    loader = make_loader(num_steps=30)
    assert [batch.step for batch in loader.progress()] == list(range(30))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "M tokens/s" in shown.err
    assert ("30/30" if installed else "30 steps: ") in shown.err
