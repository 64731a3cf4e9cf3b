"""llm.c's `train_gpt2.py`: its `DistributedDataLoader`, in the same order, from a server.

Copy this file beside the script:

    from for_llmc import DistributedDataLoader     # instead of the class in the script
    python train_gpt2.py --input_bin http://data:8000/fineweb ...
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from corpus_client import Batch, CorpusLoader, Placement
from corpus_client.integrations.feed import masked_targets


class DistributedDataLoader(CorpusLoader):
    """A `CorpusLoader` with the constructor and the methods of llm.c's loader.

    Step s has the same tokens on every rank as there, until the last batch of the first shard. llm.c drops
    what does not fill a batch of all ranks, and its ranks other than 0 may leave that batch out; a plan goes
    on with the next window. After that the order of the windows is the same, and their places in batches
    differ.

    The script fetches each batch where it trains on it: `state_dict()`, called at the head of its loop, is
    the state to save.

    filename_pattern: `http://host:port/corpus`; B, T: rows of a rank, tokens of a row.
    """

    def __init__(
        self,
        filename_pattern: str,
        B: int,  # noqa: N803 - llm.c's name
        T: int,  # noqa: N803 - llm.c's name
        process_rank: int,
        num_processes: int,
        **options: Any,
    ) -> None:
        url, _, name = filename_pattern.rstrip("/").rpartition("/")
        if "://" not in url:
            raise ValueError(f"filename_pattern must be http://host:port/corpus, got {filename_pattern!r}")
        place = Placement(rank=process_rank, world_size=num_processes)
        plan: dict[str, Any] = {"corpus": unquote(name), "seq_len": T, "global_batch_size": B * num_processes}
        defaults: dict[str, Any] = {"order": "sequential", "device": "cpu"}  # the script moves batches itself
        super().__init__(url, **plan, placement=place, **{**defaults, **options})

    def next_batch(self) -> Batch:
        """Return the next step's batch: `x, y = loader.next_batch()`, `(B, T) int64` each."""
        batch = next(self)
        batch[1] = masked_targets(batch, -1)  # the script's loss leaves -1 out
        return batch

    def reset(self) -> None:
        """Begin again with the first step."""
        self.seek(0)
