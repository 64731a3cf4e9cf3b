"""The whole scripts for frameworks train, evaluate, and go on from their checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.client.integrations.ranks import needs
from tests.corpora import some_tokens, write_raw
from tests.examples.running import VOCABULARY, environment
from tests.serving import ROOT, RunningServer


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    corpora = {
        name: write_raw(tmp_path / f"{name}.bin", some_tokens(20_000, vocabulary=VOCABULARY, seed=seed))
        for seed, name in enumerate(("train", "val"))
    }
    with RunningServer(corpora, tmp_path) as server:
        yield server.url


def trained(script: str, url: str, folder: Path, num_steps: int) -> subprocess.CompletedProcess[str]:
    """Run a script as its user does; checkpoints and evaluations come every two steps."""
    command = [
        sys.executable,
        str(ROOT / "client" / "examples" / script),
        url,
        "--vocab-size",
        str(VOCABULARY),
    ]
    options = (
        "--corpus train --eval-corpus val --seq-len 16 --global-batch-size 4 --eval-batches 2 --save-every 2"
    )
    return subprocess.run(
        [*command, *options.split(), "--steps", str(num_steps), "--out", "trained"],
        cwd=folder,
        env=environment(folder, CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
    )


@needs("transformers", "accelerate")
def test_the_script_for_the_hugging_face_trainer(url: str, tmp_path: Path) -> None:
    for num_steps, num_evaluations in ((4, 2), (6, 1)):  # the second run goes on from step 4
        done = trained("hf_trainer.py", url, tmp_path, num_steps)
        assert done.returncode == 0, done.stderr
        assert (done.stdout + done.stderr).count("eval_loss") == num_evaluations
        state = json.loads((tmp_path / f"trained/checkpoint-{num_steps}/trainer_state.json").read_text())
        place = state["stateful_callbacks"]["CorpusCallback"]["attributes"]["place"]
        assert place["data"]["next_step"] == num_steps


@needs("lightning")
def test_the_script_for_lightning(url: str, tmp_path: Path) -> None:
    for num_steps in (4, 6):
        done = trained("lightning_trainer.py", url, tmp_path, num_steps)
        assert done.returncode == 0, done.stderr
        assert "'val_loss': " in done.stdout
        assert ("Restored all states" in done.stdout + done.stderr) == (num_steps == 6)
        saved = torch.load(tmp_path / "trained/last.ckpt", weights_only=True)
        assert saved["Data"]["next_step"] == num_steps
