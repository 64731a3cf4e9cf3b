"""`corpus-server inspect --stats` says of files what a server says of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.index import index
from tests.corpora import spec, write_raw
from tests.serving import RunningServer, run_here

TEXTS = [b"first document\x00", b"the \x1b[31msecond\x00", "dr\u00fcben \u202eturned\x00".encode()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sampled") / "words.bin"
    write_raw(path, np.frombuffer(b"".join(TEXTS) * 20, np.uint8), dtype="uint8")
    index(spec(path, dtype="uint8", eot=0))
    return f"{path},dtype=uint8"


def test_statistics_are_those_of_a_server(corpus: str, tmp_path: Path) -> None:
    said = json.loads(run_here("inspect", f"words={corpus}", "--stats", "--json").stdout)
    with RunningServer({"words": corpus}, tmp_path) as server:
        assert said["inspected"]["statistics"] == server.get("/v1/corpora/words/statistics").json()


def test_statistics_are_drawn_without_control_characters(corpus: str) -> None:
    shown = run_here("inspect", corpus, "--stats").stdout
    assert "60 of 60 documents sampled" in shown
    assert "\u2588" in shown
    assert "\x1b" not in shown
    assert "documents sampled" not in run_here("inspect", corpus).stdout
