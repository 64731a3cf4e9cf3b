"""`CorpusIterableDataset`: a plan's batches, for those who must keep a `torch.utils.data.DataLoader`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from corpus_client import errors
from corpus_client.batch import Batch
from corpus_client.loader import CorpusLoader
from corpus_client.plan.document import MAX_STEP, integer
from corpus_client.plan.state import make_state
from corpus_client.plan.world import Placement
from corpus_client.staging.options import Staging

STATE_FIELDS = {"plan_id", "next_step", "pass", "worker", "num_workers"}
SHARDING_MODULES = ("accelerate.data_loader", "transformers.trainer_pt_utils")
SHARDING_CLASSES = ("IterableDatasetShard", "DataLoaderDispatcher")
"""What wraps a dataset there on several processes; on a single one they do not."""

PLAN_ARGUMENTS = ("corpus", "seq_len", "global_batch_size", "seed", "order")


class CorpusIterableDataset(IterableDataset[Batch]):
    """Yield whole batches in the order of `CorpusLoader`, whatever `num_workers` is.

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

    To resume, keep `state_at(batch.step + 1)` of the batch trained on last, and load it here before
    iterating, under any DataLoader with any number of workers, or into a `CorpusLoader`. torchdata's
    StatefulDataLoader saves and loads the positions of its workers, for the same `num_workers` only;
    `integrations.torchdata` has one for any number.

    Args:
        dtype: of the batches. None, as stored, moves a half to a quarter of the bytes between processes
            and to the device; widen there: `batch.to("cuda", dtype=torch.int64, non_blocking=True)`.
        start_step: first step of the first pass.
        num_steps: steps of one pass over the DataLoader, its `len`; None: a pass does not end. Every pass
            has the same steps unless `set_epoch` tells them apart.
        staging: its `prefetch_bytes` bounds what all workers together have fetched ahead.
        placement: rank and world size are found now, as workers cannot ask torch.distributed.
        options: any other argument of `CorpusLoader`: the plan, `eot_id`, `network`...

    Raises:
        InvalidArgument: the arguments cannot work; and what else `CorpusLoader` raises.
        WrongRows: when a pass begins, something else (`accelerator.prepare`, HF Trainer) divides its batches
            over the ranks again; `integrations` has what these need instead.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        dtype: torch.dtype | None = torch.int64,
        start_step: int = 0,
        num_steps: int | None = None,
        staging: Staging | None = None,
        placement: Placement | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        placement = placement or Placement()
        if "device" in options or placement.step_stride != 1:
            raise errors.InvalidArgument(
                "device and step_stride are not for a dataset: its batches are in host memory, each step "
                "once; move them with batch.to(device, non_blocking=True)"
            )
        place = placement.find()
        self.place = place[:2]  # rank and world size whose rows the batches have
        self._asked = placement
        self._placement = Placement(
            rank=place.rank, world_size=place.world_size, context_parallel=place.context
        )
        self._urls = urls
        self._dtype = dtype
        self._start_step = integer("start_step", start_step, 0, MAX_STEP)
        self._num_steps = None if num_steps is None else integer("num_steps", num_steps, 1, MAX_STEP)
        self._staging = staging or Staging()
        self._options = options
        with self._make_loader() as loader:  # here a mistake is raised, not in a worker
            self._bound = loader.prepared.bound
        plain = {name: options[name] for name in options if name not in PLAN_ARGUMENTS}
        self._options = {**plain, "plan": self._bound.document}
        self._position: tuple[int, int] | None = None  # number of the pass, next step
        self._resume = False  # whether the next pass begins at `_position`
        # Shared memory: persistent workers hear of the next pass by it, and the main process of workers.
        self._number = _shared(0)
        self._moved = _shared([-1, 0])  # this pass begins at that step
        self._in_workers = _shared(False)

    def __len__(self) -> int:
        """Return `num_steps`, the steps of a pass."""
        if self._num_steps is None:
            raise TypeError("a dataset without num_steps= has no length")
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Return a pass: all of it, or in a worker of a DataLoader its share."""
        worker, num_workers = _worker()
        self._in_workers.fill_(get_worker_info() is not None)
        self._check_use()
        if self._position is None or not self._resume:
            number, step = self._pass_start()
            self._position = number, step + worker
        self._resume = False
        number, step = self._position
        stop = None if self._num_steps is None else self._start_step + (number + 1) * self._num_steps
        loader = self._make_loader(stop, num_workers)
        loader.seek(step)
        # No generator: one that raised an error is over, and here the same step is asked for again.
        return iter(partial(self._next, loader, number), None)

    @property
    def first_step(self) -> int:
        """The step with which the next pass begins."""
        return self._pass_start()[1]

    @property
    def plan_id(self) -> str:
        """64 hex digits that stand for plan and corpora."""
        return self._bound.plan_id

    def set_epoch(self, epoch: int) -> None:
        """Let the passes that begin from now on have the steps after those of `epoch` passes.

        Trainers call this; what they call an epoch is a pass over the DataLoader, not an epoch of the plan.
        Pass e has `num_steps` steps from `start_step + e * num_steps` on. Workers of any kind hear it.
        """
        integer("epoch", epoch, 0, MAX_STEP)
        self._check_use()  # accelerate calls this on every rank, also where it takes rank 0's batches only
        if epoch and self._num_steps is None:
            raise errors.InvalidArgument(f"epoch must be 0 for a dataset without num_steps=, got {epoch}")
        self._number.fill_(epoch)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state of a run whose next step is this one: `batch.step + 1` once it was trained on."""
        return make_state(self._bound, integer("step", step, 0, MAX_STEP))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this process's share; StatefulDataLoader asks for it after every batch.

        It names the plan by its id alone, which changes with whatever is in it.

        Raises:
            InvalidArgument: worker processes iterate, and this one does not know how far they are.
        """
        if get_worker_info() is None and self._in_workers:
            raise errors.InvalidArgument(
                "the dataset is iterated in worker processes, which know how far they are; save "
                "state_at(batch.step + 1), or the state of a torchdata StatefulDataLoader"
            )
        number, step = self._position or self._pass_start()
        place = dict(zip(("worker", "num_workers"), _worker(), strict=True))
        return {"plan_id": self.plan_id, "next_step": step, "pass": number, **place}

    def load_state_dict(self, saved: Mapping[str, Any], *, trained_steps: int | None = None) -> None:
        """Go on with a state of `state_at`, of a `CorpusLoader`, or of `state_dict`.

        The first two move the beginning of the pass that `next_step` lies in, for every DataLoader; the
        last is for the next pass of this process alone, which StatefulDataLoader sees to.
        `trained_steps` as `CorpusLoader.load_state_dict` has it, for the first two.

        Raises:
            StateMismatch: the state is of another plan or corpus, or of another number of workers.
        """
        if not isinstance(saved, Mapping) or set(saved) != STATE_FIELDS:
            with self._make_loader() as loader:
                loader.load_state_dict(saved, trained_steps=trained_steps)
                step = loader.step
            if step < self._start_step:
                raise errors.StateMismatch(
                    "next_step must not lie before the dataset's start_step, got "
                    f"{step} and {self._start_step}"
                )
            number = (step - self._start_step) // self._num_steps if self._num_steps else 0
            self._moved.copy_(torch.tensor([number, step]))
            self._number.fill_(number)
            return
        if saved["plan_id"] != self.plan_id:
            raise errors.StateMismatch(
                f"the state belongs to plan {saved['plan_id']}, this dataset to {self.plan_id}; "
                "`corpus-server plans diff` tells where the two differ"
            )
        if (saved["worker"], saved["num_workers"]) != _worker():
            raise errors.StateMismatch(
                f"the state is of worker {saved['worker']} of {saved['num_workers']}, this is worker "
                "{} of {}; keep num_workers, or resume from state_at(step)".format(*_worker())
            )
        number = integer("pass", saved["pass"], 0, MAX_STEP)
        self._position = number, integer("next_step", saved["next_step"], 0, 2 * MAX_STEP)
        self._resume = True

    def _next(self, loader: CorpusLoader, number: int) -> Batch:
        """Return the next batch of pass `number`."""
        batch = next(loader)
        self._position = number, loader.step
        # As stored it is a view of slot memory, which would be overwritten on its way out.
        return batch.detached(copy=self._dtype is None)

    def _check_use(self) -> None:
        if get_worker_info() is None:  # a worker does not know torch.distributed
            self._asked.check(self._placement.find())
        _check_callers()

    def _make_loader(self, end_step: int | None = None, num_workers: int = 1) -> CorpusLoader:
        return CorpusLoader(
            self._urls,
            dtype=self._dtype,
            device="cpu",
            num_steps=end_step,
            staging=replace(self._staging, prefetch_bytes=self._staging.prefetch_bytes // num_workers),
            placement=replace(self._placement, step_stride=num_workers),
            **self._options,
        )

    def _pass_start(self) -> tuple[int, int]:
        """Return (number, first step) of the pass that begins next."""
        number, (moved_number, moved_step) = int(self._number), self._moved.tolist()
        start = self._start_step + number * (self._num_steps or 0)
        return number, moved_step if number == moved_number else start


def _check_callers() -> None:
    """Raise an error if the code that uses a dataset right now divides its batches, or joins them.

    No framework tells a dataset what it is wrapped in, so this looks for their frames on the stack, once a
    pass.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module, variables = frame.f_globals.get("__name__", ""), frame.f_locals
        if module in SHARDING_MODULES and type(variables.get("self")).__name__ in SHARDING_CLASSES:
            raise errors.WrongRows(
                f"{module} divides the batches over the ranks, and each is one rank's rows already: steps "
                "would be left out. Do not pass the DataLoader to accelerator.prepare (or pass it to "
                "corpus_client.integrations.accelerate.already_sharded first), or use AccelerateLoader from "
                "there; for HF Trainer use corpus_client.integrations.transformers.train_from"
            )
        if module == "torch.utils.data._utils.fetch" and variables.get("auto_collation"):
            raise errors.InvalidArgument(
                "the DataLoader puts the batches of several steps together, and each is a whole rank batch "
                "already; pass batch_size=None to it"
            )
        frame = frame.f_back


def _worker() -> tuple[int, int]:
    """Return (worker, number of workers) of the DataLoader that iterates here."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _shared(value: int | list[int]) -> torch.Tensor:
    """Return the value in memory that worker processes see too, forked or spawned."""
    return torch.tensor(value).share_memory_()  # type: ignore[no-untyped-call,no-any-return]
