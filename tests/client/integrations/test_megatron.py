"""Megatron-LM's own data iterators and checkpoints over external loaders; its forward pass needs GPUs.

The pip package megatron-core has no megatron.training: with it alone the groups, the number of micro batches
and the iterator that replays are Megatron's. Put a checkout of Megatron-LM on PYTHONPATH for the rest.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from corpus_client import CorpusLoader
from tests.client.integrations.ranks import PLAN, QUICK, ROWS, SEQ_LEN, on_ranks, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.rerun_state_machine", reason="Megatron is not installed here")

EVAL_ITERS = 2


def arguments(**changes: Any) -> SimpleNamespace:
    """Return the arguments of Megatron that its data iterators read."""
    found = {
        "dataloader_type": "external",
        "seq_length": SEQ_LEN,
        "global_batch_size": ROWS,
        "micro_batch_size": ROWS,
        "iteration": 0,
        "train_iters": 20,
        "train_samples": None,
        "eval_iters": EVAL_ITERS,
        "eval_interval": 5,
        "start_eval_at_iter": None,
        "phase_transition_iterations": None,
        "perform_rl_step": False,
        "skip_train": False,
        "full_validation": False,
        "multiple_validation_sets": False,
        "create_attention_mask_in_dataloader": False,
        "reset_attention_mask": False,
        "reset_position_ids": False,
        "eod_mask_loss": False,
        "dataloader_save": None,
    }
    found |= changes
    for name in ("train", "valid"):
        found.setdefault(f"consumed_{name}_samples", 0)
    return SimpleNamespace(**found)


def train(url: str, tensor_parallel: int, changes: dict[str, Any], stop: int, eod: int | None) -> Any:
    """Iterate as Megatron does; return what this rank got of training and of one validation."""
    warnings.simplefilter("ignore")
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import (
        get_num_microbatches,
        init_num_microbatches_calculator,
    )
    from megatron.core.rerun_state_machine import RerunDataIterator

    from corpus_client.integrations.megatron import loaders_provider

    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    args = arguments(**changes)
    degree = mpu.get_data_parallel_world_size()
    init_num_microbatches_calculator(0, None, ROWS, args.micro_batch_size, degree)
    options = {"corpus": "web", "eot_id": eod, **QUICK}
    provider = loaders_provider(url, train={"seed": 5, **options}, valid={"order": "sequential", **options})
    trained: Any
    validated: Any
    if importlib.util.find_spec("megatron.training") is None:
        sys.modules["megatron.training"] = SimpleNamespace(get_args=lambda: args)  # type: ignore[assignment]
        trained, validated = (loader and RerunDataIterator(loader) for loader in provider()[:2])
    else:
        from megatron.training import global_vars
        from megatron.training.training import build_train_valid_test_data_iterators

        global_vars.set_args(args)
        make = torch.tensor
        with mock.patch.object(torch, "tensor", lambda data, **kw: make(data, **{**kw, "device": "cpu"})):
            trained, validated = build_train_valid_test_data_iterators(provider)[:2]
    if mpu.get_tensor_model_parallel_rank() != 0:
        assert (trained, validated) == (None, None)
        return None
    seen: dict[str, list[Any]] = {"train": [], "valid": [], "masks": [], "positions": []}
    for _ in range(args.iteration, stop):
        for _ in range(get_num_microbatches()):
            batch = next(trained)
            seen["train"].append(torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1).tolist())
            seen["masks"].append(batch["loss_mask"].tolist())
            seen["positions"].append(batch["position_ids"].tolist())
    for _ in range(EVAL_ITERS * get_num_microbatches()):
        batch = next(validated)
        seen["valid"].append(torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1).tolist())
    if "megatron.training.training" in sys.modules:
        from megatron.training.checkpointing import maybe_save_dataloader_state

        maybe_save_dataloader_state(trained, stop, args.dataloader_save)
    return seen


@pytest.fixture(scope="module")
def plan(server: ReferenceServer) -> dict[str, Any]:
    with CorpusLoader(server.url, device="cpu", **PLAN) as loader:
        return loader.plan


def test_another_degree_goes_on_at_its_iteration(
    corpus: ReferenceCorpus, server: ReferenceServer, plan: dict[str, Any], tmp_path: Path
) -> None:
    def expected(plan: dict[str, Any], steps: range, rows: int, rank: int, size: int) -> list[Any]:
        whole = [rows_of(corpus, plan, step, rank, size) for step in steps]
        return [step[at : at + rows] for step in whole for at in range(0, len(step), rows)]

    held_out = {**plan, "order": "sequential", "seed": 0}
    stop = random.Random(7).randrange(1, 9)
    save = {"dataloader_save": str(tmp_path)}
    (begun,) = on_ranks(1, tmp_path, train, server.url, 1, {"micro_batch_size": 4, **save}, stop, None)
    assert begun["train"] == expected(plan, range(stop), 4, 0, 1)
    assert begun["valid"] == expected(held_out, range(EVAL_ITERS), 4, 0, 1)
    resumed = {
        "micro_batch_size": 3,
        "iteration": stop,
        "consumed_train_samples": stop * ROWS,
        "consumed_valid_samples": EVAL_ITERS * ROWS,
        **save,
    }
    found = on_ranks(2, tmp_path, train, server.url, 1, resumed, 11, None)
    for rank, seen in enumerate(found):
        assert seen["train"] == expected(plan, range(stop, 11), 3, rank, 2)
        assert seen["valid"] == expected(held_out, range(EVAL_ITERS, 2 * EVAL_ITERS), 3, rank, 2)


def test_of_a_tensor_parallel_group_the_first_rank_loads(
    corpus: ReferenceCorpus, server: ReferenceServer, plan: dict[str, Any], tmp_path: Path
) -> None:
    """With the masks and positions that Megatron's options ask for."""
    changes = {"micro_batch_size": 6, "eod_mask_loss": True, "reset_position_ids": True}
    first, second = on_ranks(2, tmp_path, train, server.url, 2, changes, 2, 7)
    assert second is None
    for number, part in enumerate(first["train"]):
        step, at = divmod(number, 2)
        assert part == rows_of(corpus, plan, step)[6 * at : 6 * at + 6]
        for row, mask, positions in zip(
            part, first["masks"][number], first["positions"][number], strict=True
        ):
            assert mask == [float(token != 7) for token in row[:-1]]
            begins = [0, *(at + 1 for at, token in enumerate(row[:-2]) if token == 7)]
            assert positions == [at - max(b for b in begins if b <= at) for at in range(SEQ_LEN)]
