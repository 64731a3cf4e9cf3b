"""The line says how it goes, and the batches pass unchanged."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from corpus_client import CorpusLoader
from corpus_client.observe import progress
from corpus_client.observe.attribution import LoaderStats, WaitSeconds

MakeLoader = Callable[..., CorpusLoader]


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (LoaderStats(), "0.0 M tokens/s, 0% waiting, 0/0 slots ready"),
        (
            LoaderStats(
                num_tokens=30_000_000,
                seconds=2,
                wait_seconds=0.5,
                wait=WaitSeconds(server=0.4, network=0.1),
                ready_slots=3,
                num_slots=4,
            ),
            "15.0 M tokens/s, 25% waiting (server), 3/4 slots ready",
        ),
        (
            LoaderStats(num_tokens=2_000_000, seconds=2, wait_seconds=0.001, wait=WaitSeconds(host=0.001)),
            "1.0 M tokens/s, 0% waiting, 0/0 slots ready",
        ),
    ],
)
def test_line(stats: LoaderStats, line: str) -> None:
    assert progress.line(stats) == line


class Lines:
    """A display that keeps what it is shown."""

    def __init__(self, every_seconds: float) -> None:
        self.every_seconds = every_seconds
        self.steps: list[int] = []
        self.closed = False

    @contextmanager
    def __call__(self, total: int | None) -> Iterator[tuple[float, progress.Show]]:
        try:
            yield self.every_seconds, lambda steps, _: self.steps.append(steps)
        finally:
            self.closed = True


def test_every_batch_is_counted_once_also_after_a_break() -> None:
    often, seldom = Lines(0.0), Lines(1e9)
    for number in progress.shown(iter(range(10)), LoaderStats, 10, often):
        if number == 6:
            break
    del number
    assert often.steps == [1, 2, 3, 4, 5, 6, 7]
    assert list(progress.shown(iter(range(5)), LoaderStats, None, seldom)) == [0, 1, 2, 3, 4]
    assert seldom.steps == [5]
    assert seldom.closed


@pytest.mark.parametrize("installed", [True, False])
def test_loader_shows_its_progress_on_stderr(
    make_loader: MakeLoader,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import_for_real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "tqdm":
            raise ImportError(name)
        return import_for_real(name, *arguments, **options)

    if not installed:
        monkeypatch.delitem(sys.modules, "tqdm", raising=False)
        monkeypatch.setattr(builtins, "__import__", refuse)
    loader = make_loader(num_steps=30)
    assert [batch.step for batch in loader.progress()] == list(range(30))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "M tokens/s" in shown.err
    assert ("30/30" if installed else "30 steps: ") in shown.err
