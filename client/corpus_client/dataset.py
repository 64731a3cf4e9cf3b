"""`CorpusIterableDataset`: a plan's batches, for those who must keep a `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from corpus_client import errors
from corpus_client.loader import PREFETCH_BYTES, CorpusLoader
from corpus_client.plan import integer
from corpus_client.world import find_place
from corpus_client.yielded import Batch

STATE_FIELDS = {"plan_id", "next_step", "pass", "worker", "num_workers"}
PLACE_ARGUMENTS = (
    *("rank", "world_size", "dp_rank", "dp_world_size"),
    *("mesh", "data_dims", "context_parallel", "context_dim"),
)


@dataclass(frozen=True, slots=True)
class _Position:
    """Which step comes next, of which pass."""

    number: int
    next_step: int


class CorpusIterableDataset(IterableDataset[Batch]):
    """Whole batches in the order of `CorpusLoader`, whatever `num_workers` is.

        dataset = CorpusIterableDataset(url, corpus="web", seq_len=1024, global_batch_size=512)
        for batch in DataLoader(dataset, batch_size=None, num_workers=1, pin_memory=True):
            batch = batch.to("cuda", non_blocking=True)

    An item is this rank's `Batch` of a step: `batch_size=None` keeps the DataLoader from putting several
    together. It asks its workers in turn, so worker k of n makes every n-th step, from the k-th on:

        num_workers=3    worker 0: steps 0 3 6 ...    worker 1: 1 4 7 ...    worker 2: 2 5 8 ...

    Prefer `CorpusLoader`, which receives many steps per request straight into pinned memory. Here a batch
    is copied into shared memory by its worker and again into pinned memory by the DataLoader's thread; with
    more than one worker each step is a request of its own. One worker fetches ahead too, and is enough
    until those copies are the limit.

    Only plain data is kept before iteration, so fork, spawn, `persistent_workers` and several DataLoaders
    over one dataset work. Dropping an iterator, as after a `break`, stops its fetching.

    To resume, either let torchdata's StatefulDataLoader save and load the positions of its workers, which
    it does for the same `num_workers` only; or keep `state_at(batch.step + 1)`, and load it here before
    iterating, under any DataLoader with any number of workers, or into a `CorpusLoader`.

    Args:
        urls: as `CorpusLoader`'s.
        dtype: of the batches. None, as stored, moves a half to a quarter of the bytes between processes
            and to the device; widen there: `batch.to("cuda", dtype=torch.int64, non_blocking=True)`.
        start_step: first step of the first pass.
        num_steps: steps of one pass over the DataLoader, its `len`; None: a pass does not end. Every pass
            has the same steps unless `set_epoch` tells them apart.
        prefetch_bytes: bound of the memory for what all workers together have fetched ahead.
        options: any other argument of `CorpusLoader`: the plan, the rank, `deadline_seconds`... Rank and
            world size are found now, as workers cannot ask torch.distributed.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        dtype: torch.dtype | None = torch.int64,
        start_step: int = 0,
        num_steps: int | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        **options: Any,
    ) -> None:
        super().__init__()
        for name in ("device", "step_stride"):
            if name in options:
                raise errors.InvalidArgument(
                    f"{name} is not for a dataset: its batches are in host memory, each step once; "
                    "move them with batch.to(device, non_blocking=True)"
                )
        place = find_place(**{name: options.pop(name, None) for name in PLACE_ARGUMENTS})
        self._place: dict[str, Any] = {
            "rank": place.part.rank,
            "world_size": place.part.world_size,
            "context_parallel": place.context,
        }
        self._urls = urls
        self._dtype = dtype
        self._start_step = start_step
        self._num_steps = None if num_steps is None else integer("num_steps", num_steps, 1, 2**40)
        self._prefetch_bytes = prefetch_bytes
        self._options = options
        with self._make_loader(start_step=start_step) as loader:  # here a mistake is raised, not in a worker
            self._plan = loader.plan
            self._plan_id = loader.plan_id
        plan_arguments = ("corpus", "seq_len", "global_batch_size", "seed", "order", "stride")
        self._options = {name: options[name] for name in options if name not in plan_arguments}
        self._options["plan"] = self._plan
        self._resume: _Position | None = None
        self._position: _Position | None = None
        # Shared memory: persistent workers hear of the next pass by it, and the main process of workers.
        self._number = _shared(0)
        self._moved = _shared([-1, 0])  # this pass begins at that step
        self._in_workers = _shared(False)

    def __len__(self) -> int:
        """Steps of a pass, `num_steps`."""
        if self._num_steps is None:
            raise TypeError("a dataset without num_steps= has no length")
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """A pass: all of it, or in a worker of a DataLoader its share."""
        worker, num_workers = _worker()
        self._in_workers.fill_(get_worker_info() is not None)
        position, self._resume = self._resume, None
        if position is None:
            start = self._pass_start(int(self._number))
            position = _Position(start.number, start.next_step + worker)
        self._position = position
        stop = None if self._num_steps is None else self._start_step + (position.number + 1) * self._num_steps
        loader = self._make_loader(
            start_step=position.next_step,
            num_steps=None if stop is None else max(0, stop - position.next_step),
            step_stride=num_workers,
            prefetch_bytes=self._prefetch_bytes // num_workers,
        )
        return _Pass(self, loader, position.number)

    @property
    def plan_id(self) -> str:
        """64 hex digits that stand for plan and corpora."""
        return self._plan_id

    def set_epoch(self, epoch: int) -> None:
        """Let the passes that begin from now on have the steps after those of `epoch` passes.

        What is an epoch to torch and its trainers, who call this, is a pass over the DataLoader: pass e
        has the steps `start_step + e * num_steps` and the `num_steps - 1` after it. (A plan counts its
        epochs by itself, and needs no telling.) Workers of any kind hear it.
        """
        integer("epoch", epoch, 0, 2**40)
        if epoch and self._num_steps is None:
            raise errors.InvalidArgument(f"epoch must be 0 for a dataset without num_steps=, got {epoch}")
        self._number.fill_(epoch)

    def state_at(self, step: int) -> dict[str, Any]:
        """The state of a run whose next step is this one: `{"plan", "plan_id", "next_step"}`.

        `state_at(batch.step + 1)` after a batch was trained on; what was fetched ahead does not count.
        """
        return {"plan": self._plan, "plan_id": self._plan_id, "next_step": integer("step", step, 0, 2**40)}

    def state_dict(self) -> dict[str, Any]:
        """The position of this process's share, for StatefulDataLoader, which asks after every batch.

        It names the plan by its id alone, which changes with whatever is in it.
        """
        worker, num_workers = _worker()
        if get_worker_info() is None and self._in_workers:
            raise errors.InvalidArgument(
                "the dataset is iterated in worker processes, which know how far they are; save "
                "state_at(batch.step + 1), or the state of a torchdata StatefulDataLoader"
            )
        position = self._resume or self._position or self._pass_start(int(self._number))
        return {
            "plan_id": self._plan_id,
            "next_step": position.next_step,
            "pass": position.number,
            "worker": worker,
            "num_workers": num_workers,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with a state of `state_at`, of a `CorpusLoader`, or of `state_dict`.

        The first two move the beginning of the pass that `next_step` lies in, for every DataLoader; the
        last is for the next pass of this process alone, which StatefulDataLoader sees to.

        Raises:
            StateMismatch: the state is of another plan or corpus, or of another number of workers.
        """
        if not isinstance(saved, Mapping) or set(saved) != STATE_FIELDS:
            with self._make_loader(start_step=0) as loader:
                loader.load_state_dict(saved)
                position = self._find(loader.step)
            self._moved.copy_(torch.tensor([position.number, position.next_step]))
            self._number.fill_(position.number)
            return
        if saved["plan_id"] != self._plan_id:
            raise errors.StateMismatch(
                f"the state belongs to plan {saved['plan_id']}, this dataset to {self._plan_id}; "
                "`corpus-server plans diff` tells where the two differ"
            )
        if (saved["worker"], saved["num_workers"]) != _worker():
            raise errors.StateMismatch(
                f"the state is of worker {saved['worker']} of {saved['num_workers']}, this is worker "
                "{} of {}; keep num_workers, or resume from state_at(step)".format(*_worker())
            )
        self._resume = _Position(
            integer("pass", saved["pass"], 0, 2**40), integer("next_step", saved["next_step"], 0, 2**41)
        )

    def _make_loader(self, **changes: Any) -> CorpusLoader:
        options = {"prefetch_bytes": self._prefetch_bytes, **self._options, **self._place, **changes}
        return CorpusLoader(self._urls, dtype=self._dtype, device="cpu", **options)

    def _pass_start(self, number: int) -> _Position:
        moved_number, moved_step = self._moved.tolist()
        if number == moved_number:
            return _Position(number, moved_step)
        return _Position(number, self._start_step + number * (self._num_steps or 0))

    def _find(self, step: int) -> _Position:
        if step < self._start_step:
            raise errors.StateMismatch(
                f"next_step must not lie before the dataset's start_step, got {step} and {self._start_step}"
            )
        return _Position((step - self._start_step) // self._num_steps if self._num_steps else 0, step)


class _Pass(Iterator[Batch]):
    """Batches of one worker's share; an error does not end it, asking again asks for the same step."""

    def __init__(self, dataset: CorpusIterableDataset, loader: CorpusLoader, number: int) -> None:
        self._dataset = dataset
        self._loader = loader
        self._number = number

    def __next__(self) -> Batch:
        batch = next(self._loader)
        self._dataset._position = _Position(self._number, self._loader.step)
        if self._dataset._dtype is None:  # a view of slot memory, which would be overwritten on its way out
            batch = replace(batch, tokens=batch.tokens.clone())
        return batch


def _worker() -> tuple[int, int]:
    """(worker, number of workers) of the DataLoader that iterates here."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _shared(value: int | list[int]) -> torch.Tensor:
    """The value in memory that worker processes see too, forked or spawned."""
    return torch.tensor(value).share_memory_()  # type: ignore[no-untyped-call,no-any-return]
