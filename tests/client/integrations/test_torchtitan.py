"""torchtitan's configuration and checkpoints over a plan; its whole trainer needs GPUs.

Both kinds of batches are asked for, whichever torchtitan is installed: rows in 0.3, flat ones after it.
"""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from corpus_client import CorpusLoader, errors
from tests.client.integrations.ranks import PLAN, QUICK, ROWS, SEQ_LEN, on_ranks, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

pytest.importorskip("torchtitan.components", reason="torchtitan is not installed here")

from corpus_client.integrations.torchtitan import CorpusDataLoader


def loader_of(
    url: str, rows: int, rank: int = 0, world_size: int = 1, *, flat: bool = False, **options: Any
) -> CorpusDataLoader:
    """Build the loader as torchtitan's trainer does."""
    plan = {name: value for name, value in PLAN.items() if name != "seq_len"}
    config = CorpusDataLoader.Config(urls=url, options={**plan, **QUICK, **options})
    return config.build(
        dp_world_size=world_size,
        dp_rank=rank,
        tokenizer=None,
        **(
            {"max_context_length": SEQ_LEN, "num_tokens_per_batch": rows * SEQ_LEN}
            if flat
            else {"seq_len": SEQ_LEN, "local_batch_size": rows, "snapshot_every_n_steps": 1}
        ),
    )


def train(url: str, folder: str, rows: int, begin: int, stop: int, flat: bool) -> list[Any]:
    """Take the micro batches of steps as `Trainer.train` does, from a checkpoint to the next; return them."""
    warnings.simplefilter("ignore")  # of torch.distributed.checkpoint
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    loader = loader_of(url, rows, rank, world_size, flat=flat)
    if begin:
        dcp.load({"dataloader": loader}, checkpoint_id=f"{folder}/step-{begin}")
    batches = iter(loader)
    seen = []
    for _ in range(begin, stop):
        for _ in range(ROWS // world_size // rows):  # gradient accumulation
            inputs, labels = next(batches)
            tokens, labels = (each.view(rows, SEQ_LEN) for each in (inputs["input"], labels))
            assert not flat or inputs["positions"].tolist() == [*range(SEQ_LEN)] * rows
            seen.append(torch.cat((tokens, labels[:, -1:]), dim=1).tolist())
    dcp.save({"dataloader": loader}, checkpoint_id=f"{folder}/step-{stop}")
    loader.close()
    return seen


@pytest.mark.parametrize("flat", [False, True])
def test_another_degree_goes_on_from_a_checkpoint_with_the_same_steps(
    corpus: ReferenceCorpus, server: ReferenceServer, tmp_path: Path, flat: bool
) -> None:
    with CorpusLoader(server.url, device="cpu", **PLAN) as loader:
        plan = loader.plan
    stops = sorted(random.Random(5).sample(range(1, 12), 2))

    def expected(steps: range, rows: int, rank: int = 0, world_size: int = 1) -> list[Any]:
        whole = [rows_of(corpus, plan, step, rank, world_size) for step in steps]
        return [step[at : at + rows] for step in whole for at in range(0, len(step), rows)]

    begun = train(server.url, str(tmp_path), 4, 0, stops[0], flat)
    assert begun == expected(range(stops[0]), 4)
    on_two = on_ranks(2, tmp_path, train, server.url, str(tmp_path), 3, *stops, flat)
    assert on_two == [expected(range(*stops), 3, rank, 2) for rank in range(2)]
    ended = train(server.url, str(tmp_path), 12, stops[1], 14, flat)
    assert ended == expected(range(stops[1], 14), 12)


def test_what_would_train_on_other_steps_is_refused(server: ReferenceServer) -> None:
    with pytest.raises(errors.InvalidArgument, match="a micro batch must divide this rank's 12 rows"):
        next(iter(loader_of(server.url, 5)))
    for name in ("infinite", "repeat"):
        with pytest.raises(errors.InvalidArgument, match="a pass that ends"):
            CorpusDataLoader.Config(urls=server.url, options=dict(PLAN), **{name: False}).build(
                dp_world_size=1, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=4
            )
    with pytest.raises(errors.InvalidArgument, match="divisible by max_context_length, got 24 and 16"):
        CorpusDataLoader.Config(urls=server.url, options=dict(PLAN)).build(
            dp_world_size=1, dp_rank=0, max_context_length=16, num_tokens_per_batch=24
        )
    with pytest.raises(errors.InvalidArgument, match="torchtitan sets device; leave them out"):
        loader_of(server.url, 4, device="cpu")
    whole = {"seq_len": 8, "stages": [{"from_step": 0, "global_batch_size": ROWS, "mixture": {"web": 1.0}}]}
    with pytest.raises(errors.InvalidArgument, match="the plan's seq_len must be torchtitan's, got 8 and 16"):
        CorpusDataLoader.Config(
            urls=server.url, options={"plan": {"seed": 0, "order": "shuffle", **whole}}
        ).build(dp_world_size=1, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=4)
    loader = loader_of(server.url, 4)
    next(iter(loader))
    with pytest.raises(errors.StepOutOfOrder, match="2 micro batches of step 0 left"):
        loader.state_dict()
    state = loader_of(server.url, 4).state_dict()
    with pytest.raises(errors.StateMismatch, match="seed: the state has 5, this loader 6"):
        loader_of(server.url, 4, seed=6).load_state_dict(state)
