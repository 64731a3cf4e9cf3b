"""litgpt's own `pretrain` trains on exactly the plan's steps, resumed from any of its checkpoints."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from corpus_client import CorpusLoader
from tests.client.integrations.ranks import PLAN, ROWS, SEQ_LEN, VOCABULARY, on_ranks, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

pretrain = pytest.importorskip("litgpt.pretrain", reason="litgpt is not installed here")

from examples.for_litgpt import CorpusData  # noqa: E402


def fit(
    url: str, folder: str, num_steps: int, micro_batch_size: int, world_size: int = 1, resume: str = ""
) -> list[Any]:
    """Run `litgpt pretrain`; return the windows of every micro batch that the model was trained on."""
    from lightning import Fabric
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config

    if world_size > 1:
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # Fabric must not start its processes
    warnings.simplefilter("ignore")
    seen: list[Any] = []
    whole_loss = pretrain.chunked_cross_entropy

    def loss(logits: torch.Tensor, targets: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if logits.requires_grad and targets.device.type != "meta":
            seen.append(targets.tolist())
        return whole_loss(logits, targets, *args, **options)

    def unsharded(**options: Any) -> Fabric:  # FSDP needs GPUs
        return Fabric(**{**options, "strategy": "ddp" if world_size > 1 else "auto"})

    tiny = Config(
        block_size=SEQ_LEN, n_layer=1, n_embd=8, n_head=2, padded_vocab_size=VOCABULARY, intermediate_size=8
    )
    shape = {"global_batch_size": ROWS, "micro_batch_size": micro_batch_size}
    # Compiling takes longer than training, and hyperparameters come from the command line.
    with (
        mock.patch.object(pretrain, "chunked_cross_entropy", loss),
        mock.patch.object(pretrain.L, "Fabric", unsharded),
        mock.patch.object(pretrain, "save_hyperparameters"),
        mock.patch.object(torch, "compile", lambda model: model),
    ):
        pretrain.setup(
            "tiny",
            model_config=tiny,
            out_dir=Path(folder),
            devices=world_size,
            precision="32-true",
            resume=Path(folder, resume, "lit_model.pth") if resume else False,
            data=CorpusData(
                url=url, corpus="web", val_corpus="web", global_batch_size=ROWS, seed=PLAN["seed"]
            ),
            train=TrainArgs(save_interval=2, max_tokens=num_steps * ROWS * SEQ_LEN, max_norm=1.0, **shape),
            eval=EvalArgs(interval=3, max_iters=2),
            logger_name="csv",
        )
    return seen


@pytest.fixture(scope="module")
def plan(server: ReferenceServer) -> dict[str, Any]:
    with CorpusLoader(server.url, device="cpu", **PLAN) as loader:
        return loader.plan


def targets_of(
    corpus: ReferenceCorpus,
    plan: dict[str, Any],
    steps: range,
    micro: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[Any]:
    """Return what a rank must be trained on: its micro batches, in order."""
    found = []
    for step in steps:
        rows = [window[1:] for window in rows_of(corpus, plan, step, rank, world_size)]
        found += [rows[at : at + micro] for at in range(0, len(rows), micro)]
    return found


@pytest.mark.parametrize("micro", [ROWS, 4], ids=["whole", "accumulated"])
def test_a_run_goes_on_from_each_checkpoint_behind_what_it_was_trained_on(
    corpus: ReferenceCorpus, server: ReferenceServer, plan: dict[str, Any], tmp_path: Path, micro: int
) -> None:
    """litgpt fetches a batch more than it trains on before it saves its last checkpoint."""
    assert fit(server.url, str(tmp_path), 5, micro) == targets_of(corpus, plan, range(5), micro)
    for checkpoint, step in (("final", 5), ("step-00000002", 2)):
        resumed = fit(server.url, str(tmp_path), 7, micro, resume=checkpoint)
        assert resumed == targets_of(corpus, plan, range(step, 7), micro)


def test_two_ranks_go_on_with_their_halves(
    corpus: ReferenceCorpus, server: ReferenceServer, plan: dict[str, Any], tmp_path: Path
) -> None:
    """Four micro batches of one rank were a step; now two micro batches of each rank are."""
    assert fit(server.url, str(tmp_path), 4, 3) == targets_of(corpus, plan, range(4), 3)
    # litgpt counts its own iterations per rank: 4 steps were 16 of them, and are 8 of each of two ranks.
    seen = on_ranks(2, tmp_path, fit, server.url, str(tmp_path), 11, 3, 2, "final")
    assert seen == [targets_of(corpus, plan, range(4, 7), 3, rank, 2) for rank in range(2)]
