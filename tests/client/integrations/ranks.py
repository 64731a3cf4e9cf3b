"""Processes as torchrun starts them, for jobs inside real frameworks; and which rows each must see."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_client import Network, Staging
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step

ROWS, SEQ_LEN = 12, 16
"""Of the tests' plans; twelve rows divide over 1, 2, 3 and 4 ranks."""

VOCABULARY = 50

PLAN: dict[str, Any] = {"corpus": "web", "seq_len": SEQ_LEN, "global_batch_size": ROWS, "seed": 5}

QUICK: dict[str, Any] = {
    "network": Network(deadline_seconds=60),
    "staging": Staging(prefetch_bytes=1 << 15),  # the tests' server is slow, and most of 64 MiB never used
}


def needs(*frameworks: str) -> pytest.MarkDecorator:
    """Skip where a framework is not installed."""
    missing = [name for name in frameworks if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed here: {', '.join(missing)}")


IN_FRAMEWORK = [
    pytest.mark.filterwarnings("default"),  # those of frameworks are not ours to mend
]
"""Marks of tests that train inside a framework."""


def on_ranks(world_size: int, folder: Path, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `job(*arguments)` in processes that find each other as under torchrun; return what each returned.

    job: a function of a module, which returns what JSON can hold. A rank that kills itself returns nothing.
    """
    import torch  # late: some integrations are tested where there is none

    # The store that they meet at listens here, so that no port has to be free twice.
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with contextlib.suppress(torch.multiprocessing.ProcessExitedException):
        torch.multiprocessing.spawn(
            _one_rank, (world_size, store.port, str(folder), job, arguments), nprocs=world_size
        )
    found = [Path(folder, f"rank-{rank}.json") for rank in range(world_size)]
    return [json.loads(path.read_text()) for path in found if path.exists()]


def _one_rank(
    rank: int, world_size: int, port: int, folder: str, job: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # connect to the store instead of opening one
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(job(*arguments)))
    sys.stdout.flush()
    os._exit(0)  # DistributedDataParallel keeps gloo's threads alive, which may abort a process that ends


def rows_of(
    corpus: ReferenceCorpus, plan: dict[str, Any], step: int, rank: int = 0, world_size: int = 1
) -> list[list[int]]:
    """Return the windows that a rank must train on in a step: `(rows, seq_len + 1)`."""
    rows = ROWS // world_size
    whole: np.ndarray = tokens_of_step(corpus, plan, step)
    return whole[rank * rows : (rank + 1) * rows].tolist()
