"""Which part of the global batch is this process's."""

from __future__ import annotations

import os
import sys

from corpus_client import errors
from corpus_client.remote import RankSlice


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): the arguments, else torch.distributed, else RANK and WORLD_SIZE, else (0, 1)."""
    if (rank is None) != (world_size is None):
        raise errors.InvalidArgument(
            f"rank and world_size must be given together, got rank={rank}, world_size={world_size}"
        )
    if rank is None or world_size is None:
        rank, world_size = _from_torch() or _from_environment()
    if world_size < 1 or not 0 <= rank < world_size:
        raise errors.InvalidArgument(
            f"rank must be in [0, world_size), got rank={rank}, world_size={world_size}"
        )
    return rank, world_size


def slice_of(global_batch_size: int, rank: int, world_size: int) -> RankSlice:
    """The rank's rows; refuses what does not divide, naming what would."""
    if global_batch_size % world_size:
        divisors = [n for n in range(1, min(global_batch_size, 4096) + 1) if global_batch_size % n == 0]
        shown = ", ".join(map(str, divisors[:32]))
        raise errors.InvalidArgument(
            f"global_batch_size must be divisible by world_size, got {global_batch_size} over {world_size}; "
            f"it divides over {shown}"
        )
    return RankSlice(rank=rank, world_size=world_size, num_rows=global_batch_size // world_size)


def _from_torch() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _from_environment() -> tuple[int, int]:
    texts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if not any(texts.values()):
        return 0, 1
    try:
        return int(texts["RANK"] or ""), int(texts["WORLD_SIZE"] or "")
    except ValueError as error:
        raise errors.InvalidArgument(
            f"RANK and WORLD_SIZE must both be set to integers, got {texts}; or pass rank= and world_size="
        ) from error
