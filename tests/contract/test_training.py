"""A training run does not notice that its server was killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from corpus_client import CorpusLoader
from tests.contract.conftest import make_loader
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

NUM_STEPS = 400
VOCABULARY = 64


def _train(loader: CorpusLoader, pause_seconds: float = 0.0) -> list[float]:
    """Return the loss of every step of a small model, by bigrams."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in loader:
        logits = model(batch.inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        time.sleep(pause_seconds)
    return losses


def test_the_loss_curve_is_that_of_the_undisturbed_run(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "small.bin", some_tokens(200_000, vocabulary=VOCABULARY) // 3)
    plan = {"corpus": "small", "seq_len": 64, "global_batch_size": 16, "num_steps": NUM_STEPS}
    with RunningServer({"small": path}, tmp_path) as server:
        with make_loader(server.url, **plan) as loader:
            undisturbed = _train(loader)

        def kill_and_restart() -> None:
            time.sleep(0.3)
            server.kill()
            time.sleep(0.5)
            server.start()

        # So little is fetched ahead that the run must meet the dead server.
        with make_loader(server.url, **plan, prefetch_bytes=1 << 15) as loader:
            disturber = threading.Thread(target=kill_and_restart)
            disturber.start()
            disturbed = _train(loader, pause_seconds=0.004)
            disturber.join()
            assert loader.stats().num_retries > 0
    assert len(undisturbed) == NUM_STEPS
    assert disturbed == undisturbed
    assert undisturbed[-1] < undisturbed[0] - 0.5
