"""Runs an example as it is, and notes every batch that reaches it.

EXAMPLE  its module, `train` by default
RECORD   folder; each rank appends a line of JSON per batch to a file of its own
KILL_AT  "rank step": that rank ends by SIGKILL when it has this batch, before training on it
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import xxhash

from corpus_client import Batch, CorpusLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "client" / "examples"))
example = importlib.import_module(os.environ.get("EXAMPLE", "train"))

RANK = int(os.environ.get("RANK", "0"))


class RecordingLoader(CorpusLoader):
    def __next__(self) -> Batch:
        batch = super().__next__()
        rows = [xxhash.xxh3_64_hexdigest(row.numpy()) for row in batch.tokens.contiguous()]
        with Path(os.environ["RECORD"], f"{RANK}.jsonl").open("a") as file:
            corpora = list(self.plan["stages"][0]["mixture"])
            file.write(json.dumps({"corpora": corpora, "step": batch.step, "rows": rows}) + "\n")
        if os.environ.get("KILL_AT") == f"{RANK} {batch.step}":
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


torch.set_num_threads(1)
example.CorpusLoader = RecordingLoader  # type: ignore[attr-defined]
sys.exit(example.main())
