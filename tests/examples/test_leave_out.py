"""The example that scores documents: of trained members, the document that is the text comes first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.index import index
from tests.corpora import spec, write_raw
from tests.serving import ROOT, RunningServer

pytestmark = pytest.mark.usefixtures("one_thread")

EOT, LENGTH, VOCABULARY = 0, 33, 64
PLANTED = 17
SHAPE = ["--vocab-size", str(VOCABULARY), "--seq-len", "32", "--layers", "1", "--heads", "2", "--width", "32"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """Documents of random tokens, of which one is the text of the other corpus."""
    folder = tmp_path_factory.mktemp("leave_out")
    draw = np.random.default_rng(0)
    documents = [[*draw.integers(1, VOCABULARY, LENGTH - 1), EOT] for _ in range(24)]
    for name, its in (("web", documents), ("val", [documents[PLANTED]])):
        path = write_raw(folder / f"{name}.bin", np.concatenate(its))
        index(spec(path, eot=EOT))
    corpora = {name: folder / f"{name}.bin" for name in ("web", "val")}
    with RunningServer(corpora, folder) as running:
        yield running


def run(server: RunningServer, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "client" / "examples" / "leave_out.py"), server.url]
    asked = ["--corpus", "web", "--text", "val:0", *SHAPE, "--steps", "60", "--learning-rate", "1e-2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *asked, "--losses", str(folder / "losses.json"), *flags],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def test_the_document_that_holds_the_text_has_the_highest_score(
    server: RunningServer, tmp_path: Path
) -> None:
    """With all members; then a second call trains none, and one with other settings is refused."""
    first = run(server, tmp_path, "--members", "10")
    assert first.returncode == 0, first.stderr
    scored = re.findall(r"^document (\d+): loss ([+-][\d.]+) without it", first.stdout, re.MULTILINE)
    assert int(scored[0][0]) == PLANTED
    assert float(scored[0][1]) > float(scored[1][1]) > 0
    assert "documents were scored with 10 members. Without any effect the highest" in first.stdout
    losses = json.loads((tmp_path / "losses.json").read_text())
    again = run(server, tmp_path, "--members", "10", "--learning-rate", "5")  # would show in the losses
    assert json.loads((tmp_path / "losses.json").read_text()) == losses
    assert again.stdout.splitlines()[:10] == first.stdout.splitlines()[:10]
    other = run(server, tmp_path, "--steps", "61")
    assert other.returncode != 0
    assert "name another file with --losses" in other.stderr
