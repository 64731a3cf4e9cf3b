"""Which part of the global batch is this process's: from arguments, a device mesh or the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from corpus_client import errors
from corpus_client.remote import RankSlice

WHOLE = (0, 1)


class Mesh(Protocol):
    """What is asked of a `torch.distributed.device_mesh.DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of its dimensions."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dimensions."""

    def get_coordinate(self) -> Sequence[int] | None:
        """This process's place in every dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process's part: some rows of the global batch, some columns of the sequence.

    Args:
        part: the rows; processes that differ only in tensor, pipeline or context coordinates share it.
        context: (rank, size) of the contiguous slice of the sequence.
    """

    part: RankSlice
    context: tuple[int, int]


def find_place(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    mesh: Mesh | None = None,
    data_dims: str | Sequence[str] | None = None,
    context_parallel: tuple[int, int] | None = None,
    context_dim: str | None = None,
) -> Place:
    """Read the loader's arguments of these names; without any, see `find_rank`."""
    if (rank, world_size) != (None, None) and (dp_rank, dp_world_size) != (None, None):
        raise errors.InvalidArgument(
            "rank, world_size and dp_rank, dp_world_size are two spellings of the same; give one, "
            f"got rank={rank}, world_size={world_size}, dp_rank={dp_rank}, dp_world_size={dp_world_size}"
        )
    prefix = "" if (dp_rank, dp_world_size) == (None, None) else "dp_"
    rank, world_size = (rank, world_size) if not prefix else (dp_rank, dp_world_size)
    context = WHOLE
    if context_parallel is not None:
        if context_dim is not None:
            raise errors.InvalidArgument("context_parallel and context_dim say the same; give one")
        try:
            context_rank, context_size = context_parallel
        except (TypeError, ValueError) as error:
            raise errors.InvalidArgument(
                f"context_parallel must be (rank, world size), got {context_parallel!r}"
            ) from error
        context = _checked(context_rank, context_size, "context_parallel's ")
    if mesh is None:
        if data_dims is not None or context_dim is not None:
            raise errors.InvalidArgument("data_dims and context_dim need mesh=, got none")
        rank, world_size = find_rank(rank, world_size, prefix)
    else:
        if (rank, world_size) != (None, None):
            raise errors.InvalidArgument(f"mesh and {prefix}rank say the same; give one")
        if data_dims is None:
            raise errors.InvalidArgument(
                f"data_dims must name the mesh's data dimensions, out of {_names(mesh)}"
            )
        names = (data_dims,) if isinstance(data_dims, str) else tuple(data_dims)
        rank, world_size = mesh_rank(mesh, names)
        if context_dim is not None:
            if context_dim in names:
                raise errors.InvalidArgument(f"context_dim must not be a data dimension, got {context_dim!r}")
            context = mesh_rank(mesh, (context_dim,))
    return Place(part=RankSlice(rank=rank, world_size=world_size), context=context)


def find_rank(rank: int | None, world_size: int | None, prefix: str = "") -> tuple[int, int]:
    """(rank, world size): the arguments, else torch.distributed, else RANK and WORLD_SIZE, else (0, 1).

    prefix: of the arguments' names in messages.
    """
    if (rank is None) != (world_size is None):
        raise errors.InvalidArgument(
            f"{prefix}rank and {prefix}world_size must be given together, "
            f"got {prefix}rank={rank}, {prefix}world_size={world_size}"
        )
    if rank is None or world_size is None:
        rank, world_size = _from_torch() or _from_environment()
    return _checked(rank, world_size, prefix)


def ranks_on_host() -> int:
    """How many ranks share this host's memory: LOCAL_WORLD_SIZE, which torchrun sets, else 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def mesh_rank(mesh: Mesh, dims: Sequence[str]) -> tuple[int, int]:
    """(rank, size) along some dimensions taken as one, the first varying slowest.

    At (replicate 1, shard 2, tensor 0) of a 2 x 4 x 2 mesh, ("replicate", "shard") gives (6, 8).
    """
    names = _names(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise errors.InvalidArgument("mesh must contain this process, got one that does not")
    if len(set(dims)) != len(dims):
        raise errors.InvalidArgument(f"data_dims must name each dimension once, got {list(dims)}")
    rank, size = WHOLE
    for name in dims:
        if name not in names:
            raise errors.InvalidArgument(f"the mesh's dimensions are {names}, got {name!r}")
        at = names.index(name)
        rank = rank * mesh.shape[at] + coordinate[at]
        size *= mesh.shape[at]
    return rank, size


def _names(mesh: Mesh) -> list[str]:
    if not mesh.mesh_dim_names:
        raise errors.InvalidArgument("mesh must have named dimensions; make it with mesh_dim_names=")
    return list(mesh.mesh_dim_names)


def _checked(rank: int, world_size: int, prefix: str) -> tuple[int, int]:
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (rank, world_size))
    if not whole or world_size < 1 or not 0 <= rank < world_size:
        raise errors.InvalidArgument(
            f"{prefix}rank must be in [0, {prefix}world_size), "
            f"got {prefix}rank={rank!r}, {prefix}world_size={world_size!r}"
        )
    return rank, world_size


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
