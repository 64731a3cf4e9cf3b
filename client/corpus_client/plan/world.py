"""Which part of the global batch a process gets: from arguments, a device mesh or the environment."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from corpus_client import errors
from corpus_client.plan.document import MAX_STEP, integer

RANK_AND_SIZE = ("RANK", "WORLD_SIZE")
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),  # MVAPICH from 3.0 on
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),  # which `flux batch` takes out of its script's environment
    ("PALS_RANKID", "PMI_SIZE"),  # PALS has no size of its own
    ("PMIX_RANK", "PMIX_SIZE"),  # PMIx says no size in the environment; somebody may
)
"""What mpirun and its like set in each of their processes."""
SLURM_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
"""What srun sets in each of its tasks. `srun --preserve-env`, by which salloc starts its shell, leaves the
job's SLURM_NTASKS. SLURM_STEP_ID tells no task: the shell of a job's script has it since Slurm 26.05."""
SLURM_JOB = ("SLURM_PROCID", "SLURM_NTASKS")
"""What the shell of a job's script has, as task 0, and a task's container that is given these two alone."""

log = logging.getLogger("corpus_client")

Names = tuple[str, str]
"""Variables of the environment: of the rank, and of the number of ranks."""
Place = tuple[int, int | None]

ContextOrder = Literal["contiguous", "zigzag", "documents"]


class Context(NamedTuple):
    """A part of each sequence: with `zigzag` two chunks, one from either half, else one.

    With `by_document` two chunks of each document in the sequence. Of 16 inputs over two ranks, rank 0 has:

        contiguous    0 1 2 3 4 5 6 7
        zigzag        0 1 2 3 12 13 14 15     chunks 0 and 3 of 4; rank 1 has chunks 1 and 2
        documents     0 3 4 5 6 13 14 15      of documents of 4 and 12 inputs
    """

    rank: int = 0
    size: int = 1
    zigzag: bool = False
    by_document: bool = False

    @property
    def num_chunks(self) -> int:
        """Chunks of equal length into which a sequence is cut for all ranks."""
        return self.size * (2 if self.zigzag or self.by_document else 1)


WHOLE = Context()


class RankPart(NamedTuple):
    """A process's part: rows of the global batch by its rank; context: its part of each of them."""

    rank: int
    world_size: int
    context: Context = WHOLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which part of the global batch a process gets: the `placement=` of `CorpusLoader`.

    Rank r of W gets rows `[r*G/W, (r+1)*G/W)`: with G = 8, W = 4, rank 1 gets rows 2 and 3. Processes that
    have the same rank here send the same requests, byte for byte, which caches on the way answer.

    Args:
        rank, world_size: default torch.distributed, then RANK and WORLD_SIZE, then what mpirun and its
            like (`OMPI_COMM_WORLD_RANK`, `PMI_RANK`, `FLUX_TASK_RANK`...) or srun (`SLURM_PROCID`) set, then
            0 and 1. Variables that contradict each other are refused, and those of several processes that do
            not say of how many.
        mesh: a named `DeviceMesh` instead of these. Processes that differ only in other dimensions than
            `data_dims` get the same batch, by the same requests.
        data_dims: dimensions of the mesh over which rows are divided, the first one slowest.
        context_parallel: (rank, size): yield this part of each sequence.
        context_dim: dimension of the mesh that says so instead.
        context_order: `contiguous`: part r is the r-th slice. `zigzag`: part r is chunk r and then chunk
            2 * size - 1 - r of 2 * size, so that under a causal mask every rank of a ring attention has as
            much to compute. `documents`: the same with each document of the sequence, so that it holds within
            documents, too; see `Batch.chunk_ids`.
        step_stride: yield every so many steps one, for processes that take turns in feeding a rank (as
            `CorpusIterableDataset` does); above 1 each step is a request of its own.
    """

    rank: int | None = None
    world_size: int | None = None
    mesh: Any = None
    data_dims: str | Sequence[str] | None = None
    context_parallel: tuple[int, int] | None = None
    context_dim: str | None = None
    context_order: ContextOrder = "contiguous"
    step_stride: int = 1

    def __post_init__(self) -> None:
        stride = integer("step_stride", self.step_stride, 1, MAX_STEP)
        object.__setattr__(self, "step_stride", stride)  # an int, as states hold sums of it
        if self.context_parallel is not None and self.context_dim is not None:
            raise errors.InvalidArgument("context_parallel and context_dim say the same; give one")
        if self.mesh is None and (self.data_dims is not None or self.context_dim is not None):
            raise errors.InvalidArgument("data_dims and context_dim need mesh=, got none")
        if self.context_order not in get_args(ContextOrder):
            raise errors.InvalidArgument(
                f"context_order must be {' or '.join(get_args(ContextOrder))}, got {self.context_order!r}"
            )
        if self.mesh is not None and (self.rank, self.world_size) != (None, None):
            raise errors.InvalidArgument("mesh and rank say the same; give one")
        if self.mesh is not None and not hasattr(self.mesh, "mesh_dim_names"):
            raise errors.InvalidArgument(f"mesh must be a DeviceMesh, got {self.mesh!r:.200}")
        dims = self.data_dims
        are_names = isinstance(dims, Sequence) and all(isinstance(each, str) for each in dims)
        if dims is not None and not are_names:
            raise errors.InvalidArgument(f"data_dims must name dimensions of the mesh, got {dims!r:.200}")

    def find(self) -> RankPart:
        """Return this process's part; asks torch.distributed and the environment where nothing is given."""
        dims = (self.data_dims,) if isinstance(self.data_dims, str) else self.data_dims
        if self.mesh is None:
            rank, world_size = find_rank(self.rank, self.world_size)
        elif dims is None:
            raise errors.InvalidArgument(
                f"data_dims must name the mesh's data dimensions, out of {_names(self.mesh)}"
            )
        else:
            rank, world_size = mesh_rank(self.mesh, dims)
        part = WHOLE[:2]
        if self.context_dim is not None:
            if self.context_dim in (dims or ()):
                raise errors.InvalidArgument(
                    f"context_dim must not be a data dimension, got {self.context_dim!r}"
                )
            part = mesh_rank(self.mesh, (self.context_dim,))
        elif (given := self.context_parallel) is not None:
            if not isinstance(given, Sequence) or len(given) != 2:
                raise errors.InvalidArgument(f"context_parallel must be (rank, world size), got {given!r}")
            part = _checked(*given, "context_parallel's ")
        # One rank has all of the sequence, in order, either way.
        order = self.context_order if part[1] > 1 else "contiguous"
        return RankPart(rank, world_size, Context(*part, order == "zigzag", order == "documents"))

    def check(self, found: RankPart) -> None:
        """Raise `WrongRows` if torch.distributed was set up after `found` was found, and says otherwise."""
        given = self.mesh is not None or self.rank is not None
        now = None if given else _from_torch()
        if now not in (None, found[:2]):
            raise errors.WrongRows(
                f"the rows are those of rank {found.rank} of {found.world_size}, and torch.distributed, set "
                "up later, says rank {} of {}; call init_process_group first, or pass placement=".format(*now)
            )


def check_dealt_out(world_size: int) -> None:
    """Raise `WrongRows` if accelerate divides the batches of an iterable DataLoader at this moment.

    `Accelerator.prepare` sends the batches that rank 0 gets from an iterable dataset to all ranks, or lets
    each rank drop those of the others. Both are wrong for batches that are one rank's rows already. Nothing
    tells a loader who takes its batches, so any that begins meanwhile is refused unless an integration that
    knows the ranks has made it. Only accelerate that the program has imported is asked.

    world_size: over how many ranks the rows are divided. With 1 each batch is whole, and may be dealt out.
    """
    states, loaders = (sys.modules.get(f"accelerate.{name}") for name in ("state", "data_loader"))
    if world_size == 1 or states is None or loaders is None or not states.GradientState._shared_state:
        return
    # The one that is iterated over, or was left by a `break`.
    active = states.GradientState().active_dataloader
    kind = type(active)
    divided = kind is loaders.DataLoaderDispatcher and active.state.num_processes > 1
    if kind is loaders.DataLoaderShard and isinstance(active.dataset, loaders.IterableDatasetShard):
        divided = active.dataset.num_processes > 1
    if divided:
        raise errors.WrongRows(
            f"accelerate's {kind.__name__} divides the batches over the ranks, and each is one rank's rows "
            "already: steps would be left out. Do not pass the DataLoader to accelerator.prepare (or pass it "
            "to corpus_client.integrations.accelerate.already_sharded first), or use AccelerateLoader from "
            "there; for HF Trainer use corpus_client.integrations.transformers.train_from"
        )


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world size): as given, else torch.distributed's, else the environment's, or (0, 1)."""
    if (rank is None) != (world_size is None):
        raise errors.InvalidArgument(
            f"rank and world_size must be given together, got rank={rank}, world_size={world_size}"
        )
    if rank is None or world_size is None:
        rank, world_size = _from_torch() or _from_environment()
    return _checked(rank, world_size)


def ranks_on_host(otherwise: int = 1) -> int:
    """Return how many ranks share this host: LOCAL_WORLD_SIZE, which torchrun sets, or else `otherwise`."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else otherwise


def mesh_rank(mesh: Any, dims: Sequence[str]) -> tuple[int, int]:
    """(rank, size) along some dimensions taken as one, the first varying slowest.

    At (replicate 1, shard 2, tensor 0) of a 2 x 4 x 2 mesh, ("replicate", "shard") gives (6, 8).
    """
    names = _names(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise errors.InvalidArgument("mesh must contain this process, got one that does not")
    if len(set(dims)) != len(dims):
        raise errors.InvalidArgument(f"data_dims must name each dimension once, got {list(dims)}")
    rank, size = 0, 1
    for name in dims:
        if name not in names:
            raise errors.InvalidArgument(f"the mesh's dimensions are {names}, got {name!r}")
        at = names.index(name)
        rank = rank * mesh.shape[at] + coordinate[at]
        size *= mesh.shape[at]
    return rank, size


def _names(mesh: Any) -> list[str]:
    if not mesh.mesh_dim_names:
        raise errors.InvalidArgument("mesh must have named dimensions; make it with mesh_dim_names=")
    return list(mesh.mesh_dim_names)


def _checked(rank: int, world_size: int, prefix: str = "") -> tuple[int, int]:
    world_size = integer(f"{prefix}world_size", world_size, 1, 2**31)
    return integer(f"{prefix}rank", rank, 0, world_size - 1), world_size


def _from_torch() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _from_environment() -> tuple[int, int]:
    """Return (rank, world size) as RANK and WORLD_SIZE say, else as what started the processes says."""
    slurm = SLURM_STEP if os.environ.get(SLURM_STEP[1]) else SLURM_JOB
    # The first that is there decides; Slurm last, as mpirun's processes inherit the variables of its shell.
    found = {names: _pair(*names) for names in (RANK_AND_SIZE, *LAUNCHERS, slurm)}
    said = {names: place for names, place in found.items() if place is not None}
    # A job's script hands its own variables to all that it starts: they contradict nothing, and are a guess.
    shell = said.pop(SLURM_JOB) if said.get(SLURM_JOB, (1, None))[0] == 0 else None
    sized = [(names, (rank, size)) for names, (rank, size) in said.items() if size is not None]
    if sized:
        names, (rank, world_size) = sized[0]
        _check_agreement(names, rank, world_size, said)
        if names != RANK_AND_SIZE:
            _log_place(logging.INFO, rank, world_size, names)
        return rank, world_size
    _check_alone(said)
    if shell is None:
        return 0, 1
    rank, num_tasks = shell
    level, world_size = (logging.INFO, 1) if num_tasks is None else (logging.WARNING, num_tasks)
    _log_place(level, rank, world_size, SLURM_JOB)
    return rank, world_size


def _check_agreement(names: Names, rank: int, world_size: int, said: dict[Names, Place]) -> None:
    """Refuse variables that say that more processes run than are known, or that two have the same rank."""
    # torchrun, started once a node by srun or mpirun, has an order of its own: node10 comes before node9.
    may_reorder = names == RANK_AND_SIZE and "TORCHELASTIC_RUN_ID" in os.environ
    for others, (other_rank, other_size) in said.items():
        is_larger = (other_rank + 1 if other_size is None else other_size) > world_size
        is_reordered = other_size == world_size and other_rank != rank and not may_reorder
        if is_larger or is_reordered:
            raise errors.InvalidArgument(
                f"{_said(names)} and {_said(others)} contradict each other: several processes would read the "
                "same rows; unset those that are wrong, or pass rank and world_size "
                "(placement=Placement(...) of a CorpusLoader)"
            )


def _check_alone(said: dict[Names, Place]) -> None:
    """Refuse variables of several processes that do not say how many there are."""
    found = [_said(names) for names in said]
    for name, least in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) >= least:
            found.append(f"{name}={text}")
    if found:
        raise errors.InvalidArgument(
            f"{', '.join(found)}: this is one of several processes, and nothing says how many read rows; set "
            "RANK and WORLD_SIZE (0 and 1 for a single process), call init_process_group first, or pass rank "
            "and world_size (placement=Placement(...) of a CorpusLoader)"
        )


def _pair(rank_name: str, size_name: str) -> Place | None:
    """Return (rank, size) of two variables; of all but RANK, the rank may have no size."""
    texts = {name: os.environ.get(name) for name in (rank_name, size_name)}
    rank_text, size_text = texts.values()
    if not rank_text and (rank_name != "RANK" or not size_text):  # salloc's shell has SLURM_NTASKS alone
        return None
    try:
        rank = int(rank_text or "")
        if size_text or rank_name == "RANK":
            return rank, int(size_text or "")
    except ValueError as error:
        raise errors.InvalidArgument(
            f"{rank_name} and {size_name} must both be set to integers, got {texts}; or pass rank= and "
            "world_size="
        ) from error
    return (rank, None) if rank >= 0 else None


def _log_place(level: int, rank: int, world_size: int, names: Names) -> None:
    log.log(level, "rank %d of %d, by %s; placement= says otherwise", rank, world_size, _said(names))


def _said(names: Names) -> str:
    rank, size = (os.environ.get(name) for name in names)
    return f"{names[0]}={rank} {names[1]}={size}" if size else f"{names[0]}={rank} without {names[1]}"
