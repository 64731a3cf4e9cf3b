"""`CorpusIterableDataset`: a plan's batches, for those who must keep a `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from corpus_client import errors
from corpus_client.batch import Batch
from corpus_client.loader import CorpusLoader
from corpus_client.network.given import Servers, resolved
from corpus_client.network.options import Network
from corpus_client.network.own_server import OwnServer
from corpus_client.plan.document import MAX_STEP, integer
from corpus_client.plan.iteration import EPOCH, NumSteps, Steps
from corpus_client.plan.state import make_state
from corpus_client.plan.world import Placement, check_dealt_out
from corpus_client.staging.options import PREFETCH_BYTES, Staging

PLAN_ARGUMENTS = (
    "corpus",
    "epochs",
    "tokens",
    "seq_len",
    "global_batch_size",
    "seed",
    "order",
    "rows",
    "family",
    "tokenizers",
)


class _Pass(CorpusLoader):
    """A pass of a dataset, which has said already whether its steps are more than one pass over a corpus."""

    def _tell_of_passes(self, num_steps: int) -> None:
        pass


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
    iterating, under any DataLoader with any number of workers, or into a `CorpusLoader`.
    `integrations.torchdata` has a DataLoader that keeps this state itself.

    Args:
        dtype: of the batches. None, as stored, moves a half to a quarter of the bytes between processes
            and to the device; widen there: `batch.to("cuda", dtype=torch.int64, non_blocking=True)`.
        start_step: first step of the first pass.
        num_steps: steps of one pass over the DataLoader, its `len`; None: a pass does not end. Every pass
            has the same steps unless `set_epoch` tells them apart. `"epoch"`: one pass over the corpus, as
            `CorpusLoader` has it, and every pass is that.
        staging: its `prefetch_bytes` bounds what each worker has fetched ahead. Left out, the workers share
            64 MiB, and each has two batches at least.
        placement: rank and world size are found now, as workers cannot ask torch.distributed.
        options: any other argument of `CorpusLoader`: the plan, `eot_id`, `network`...

    Raises:
        InvalidArgument: the arguments cannot work; and what else `CorpusLoader` raises.
        WrongRows: when a pass begins, accelerate (`accelerator.prepare`, HF Trainer) divides its batches over
            the ranks again; `integrations` has what it needs instead.
    """

    def __init__(
        self,
        urls: Servers,
        *,
        dtype: torch.dtype | None = torch.int64,
        start_step: int = 0,
        num_steps: NumSteps = None,
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
        self._asked, self._part = placement, placement.find()
        self.place = self._part[:2]  # rank and world size whose rows the batches have
        self.declared = False  # whether an integration has compared the place with its framework's
        self._urls = resolved(urls, options.get("network") or Network())
        # A pass must not begin with the start of a server. A worker that this is sent to holds it, too.
        self._hold = self._urls.hold() if isinstance(self._urls, OwnServer) else None
        self._dtype = dtype
        self._start_step = integer("start_step", start_step, 0, MAX_STEP)
        self._is_epoch = num_steps == EPOCH
        if self._is_epoch and start_step:
            raise errors.InvalidArgument("start_step must be 0 with num_steps='epoch'")
        no_number = num_steps in (None, EPOCH)
        self._num_steps = None if no_number else integer("num_steps", num_steps, 1, MAX_STEP)
        self._staging = staging or Staging()
        self._options = options
        self._least_bytes = 0
        with self._make_loader(num_steps) as loader:  # here a mistake is raised, not in a worker
            self._bound = loader.prepared.bound
            if self._is_epoch:
                self._num_steps = len(loader)
            elif self._num_steps is None and self._bound.num_steps is not None:
                self._num_steps = max(0, self._bound.num_steps - start_step)
            self._least_bytes = loader.prepared.sizes.least_bytes
        plain = {name: options[name] for name in options if name not in PLAN_ARGUMENTS}
        self._options = {**plain, "plan": self._bound.whole}
        # In memory that workers see too, forked or spawned: those that persist hear of the next pass.
        first_step = torch.tensor(self._start_step, device="cpu")  # whatever `set_default_device` says
        self._first_step = first_step.share_memory_()  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        rank, world_size = self.place
        return (
            f"CorpusIterableDataset(plan {self.plan_id[:12]}, step {self.first_step}, "
            f"rank {rank} of {world_size})"
        )

    def __len__(self) -> int:
        """Return `num_steps`, the steps of a pass."""
        if self._num_steps is None:
            raise TypeError("a dataset without num_steps= has no length")
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Return a pass: all of it, or in a worker of a DataLoader its share."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._check_use()
        step = self.first_step
        stop = None if self._num_steps is None else self._pass_start(self._pass_of(step) + 1)
        loader = self._make_loader(EPOCH if self._is_epoch else stop, num_workers, _Pass)
        first = step + worker
        loader.seek(first if self._num_steps is None else min(first, len(loader)))  # none is left for some
        # No generator: one that raised an error is over, and here the same step is asked for again.
        return Steps(partial(self._next, loader))

    @property
    def first_step(self) -> int:
        """The step with which the next pass begins."""
        return int(self._first_step)

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
        if epoch != self._pass_of(self.first_step):  # else a state may have moved its beginning
            self._first_step.fill_(self._pass_start(epoch))

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state of a run whose next step is this one: `batch.step + 1` once it was trained on."""
        return make_state(self._bound, integer("step", step, 0, MAX_STEP))

    def state_dict(self) -> dict[str, Any]:
        """Refuse: a dataset does not know which of its batches were trained on.

        A plain StatefulDataLoader calls this. Its own state would count the batches that it has fetched, also
        those that a trainer holds and has not trained on.
        """
        raise errors.InvalidArgument(
            "a CorpusIterableDataset has no state of its own; take "
            "integrations.torchdata.StatefulCorpusLoader in place of a StatefulDataLoader, or save "
            "dataset.state_at(batch.step + 1) of the batch trained on last"
        )

    def load_state_dict(self, saved: Mapping[str, Any], *, trained_steps: int | None = None) -> None:
        """Go on with a state of `state_at` or of a `CorpusLoader`: the pass it lies in begins there.

        `trained_steps` as `CorpusLoader.load_state_dict` has it.

        Raises:
            StateMismatch: the state is of another plan or corpus, or of a step before `start_step`.
        """
        with self._make_loader() as loader:
            loader.load_state_dict(saved, trained_steps=trained_steps)
            step = loader.step
        if step < self._start_step:
            raise errors.StateMismatch(
                f"next_step must not lie before the dataset's start_step, got {step} and {self._start_step}"
            )
        self._first_step.fill_(step)

    def _next(self, loader: CorpusLoader) -> Batch:
        # As stored it is a view of slot memory, which would be overwritten on its way out.
        return next(loader).detached(copy=self._dtype is None)

    def _check_use(self) -> None:
        if get_worker_info() is None:  # a worker does not know torch.distributed
            self._asked.check(self._part)
        if not self.declared:
            check_dealt_out(self.place[1])

    def _make_loader(
        self, end_step: NumSteps = None, num_workers: int = 1, kind: type[CorpusLoader] = CorpusLoader
    ) -> CorpusLoader:
        staging = self._staging
        if num_workers > 1 and staging.prefetch_bytes is None:
            staging = replace(staging, prefetch_bytes=max(PREFETCH_BYTES // num_workers, self._least_bytes))
        loader = kind(
            self._urls,
            dtype=self._dtype,
            device="cpu",
            num_steps=end_step,
            staging=staging,
            placement=Placement(
                rank=self._part.rank,
                world_size=self._part.world_size,
                context_parallel=self._part.context[:2],
                context_order=self._asked.context_order,
                step_stride=num_workers,
            ),
            **self._options,
        )
        loader.declared = True  # `_check_use` asks accelerate
        return loader

    def _pass_start(self, number: int) -> int:
        return 0 if self._is_epoch else self._start_step + number * (self._num_steps or 0)

    def _pass_of(self, step: int) -> int:
        return (step - self._start_step) // self._num_steps if self._num_steps and not self._is_epoch else 0
