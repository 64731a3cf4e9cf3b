"""Lightning trains on exactly the plan's steps, through checkpoints, epochs and another number of ranks."""

from __future__ import annotations

import contextlib
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from corpus_client import CorpusIterableDataset, CorpusLoader, errors
from tests.client.integrations.ranks import PLAN, QUICK, VOCABULARY, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

lightning: Any = pytest.importorskip("lightning.pytorch", reason="lightning is not installed here")

from corpus_client.integrations.lightning import CorpusDataModule  # noqa: E402

NUM_STEPS = 12


class Interrupted(Exception):
    """What ends a run early, as a lost node does."""


class Model(lightning.LightningModule):
    """The smallest that trains, and notes what it is given."""

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, 1)
        self.dies_at = dies_at
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch.step == self.dies_at:
            raise Interrupted
        inputs, targets = batch
        self.seen.append([batch.step, batch.tokens.tolist()])
        return ((self.table(inputs)[..., 0] - targets / VOCABULARY) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    url: str,
    folder: str,
    dies_at: int | None,
    checkpoint: str | None,
    options: dict[str, Any],
    start_step: int,
) -> list[Any]:
    """Train in this process; return the steps that were trained on and their windows."""
    warnings.simplefilter("ignore")  # of Lightning's own: loggers, missing schedulers
    model = Model(dies_at)
    every_step = lightning.callbacks.ModelCheckpoint(
        folder, filename="{step}", save_top_k=-1, every_n_train_steps=1, enable_version_counter=False
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[every_step],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = CorpusDataModule(url, start_step=start_step, **PLAN, **QUICK)
    with contextlib.suppress(Interrupted):
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    return model.seen


@pytest.fixture(scope="module")
def plan(server: ReferenceServer) -> dict[str, Any]:
    with CorpusLoader(server.url, device="cpu", **PLAN) as loader:
        return loader.plan


def last(folder: Path) -> str:
    """Return the newest checkpoint."""
    return str(max(folder.glob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("step="))))


@pytest.mark.parametrize(
    ("options", "start_step"),
    [
        ({"max_steps": NUM_STEPS}, 0),
        ({"max_steps": NUM_STEPS, "limit_train_batches": 5, "max_epochs": 10}, 0),
        ({"max_steps": NUM_STEPS // 2, "accumulate_grad_batches": 2}, 0),
        ({"max_steps": NUM_STEPS}, 1000),
    ],
    ids=["endless", "epochs", "accumulated", "from-1000"],
)
def test_an_interrupted_run_trains_on_each_step_once(
    corpus: ReferenceCorpus,
    server: ReferenceServer,
    plan: dict[str, Any],
    tmp_path: Path,
    options: dict[str, Any],
    start_step: int,
) -> None:
    """The held batch is not counted, nor lost where an epoch of Lightning ends."""
    steps = range(start_step, start_step + NUM_STEPS)
    dies_at = start_step + 2 * random.Random(3).randrange(2, 5)
    expected = [[step, rows_of(corpus, plan, step)] for step in steps]
    begun = fit(server.url, str(tmp_path), dies_at, None, options, start_step)
    assert begun == expected[: dies_at - start_step]
    resumed = fit(server.url, str(tmp_path), None, last(tmp_path), options, start_step)
    assert resumed == expected[dies_at - start_step :]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"next_step": 4}, "the run would skip 1"), ({"plan": {"seed": 6}}, "seed: the state has 6")],
)
def test_a_checkpoint_of_another_place_or_plan_is_refused(
    server: ReferenceServer, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    fit(server.url, str(tmp_path), 3, None, {"max_steps": NUM_STEPS}, 0)
    saved = torch.load(last(tmp_path), weights_only=True)
    state = saved["CorpusDataModule"]
    assert state["next_step"] == 3
    state |= {name: {**state[name], **value} if name == "plan" else value for name, value in change.items()}
    torch.save(saved, tmp_path / "changed.ckpt")
    with pytest.raises(errors.StateMismatch, match=message):
        fit(server.url, str(tmp_path), None, str(tmp_path / "changed.ckpt"), {"max_steps": NUM_STEPS}, 0)


@pytest.mark.parametrize("kind", ["CorpusLoader", "StatefulCorpusLoader", "StatefulDataLoader"])
def test_a_loader_whose_state_would_count_the_held_batch_is_refused(
    server: ReferenceServer, tmp_path: Path, kind: str
) -> None:
    """Lightning saves the state of a loader that it is given, and holds a batch of one without a length."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from corpus_client.integrations.torchdata import StatefulCorpusLoader

    dataset = CorpusIterableDataset(server.url, **PLAN, **QUICK)
    make: dict[str, Any] = {
        "CorpusLoader": lambda: CorpusLoader(server.url, **PLAN, **QUICK, device="cpu"),
        "StatefulCorpusLoader": lambda: StatefulCorpusLoader(dataset),
        "StatefulDataLoader": lambda: StatefulDataLoader(dataset, batch_size=None),
    }
    warnings.simplefilter("ignore")
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        callbacks=[lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(errors.CorpusClientError, match=r"CorpusDataModule|StatefulCorpusLoader in place"):
        trainer.fit(Model(), train_dataloaders=make[kind]())
