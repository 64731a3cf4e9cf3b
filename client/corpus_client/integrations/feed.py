"""What the integrations share: a loader's batches in a framework's form or in parts, the step trained on."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from corpus_client import errors
from corpus_client.plan.document import integer
from corpus_client.plan.iteration import Steps
from corpus_client.plan.world import Placement

if TYPE_CHECKING:
    import torch

    from corpus_client.arrays import ArrayLoader
    from corpus_client.batch import Batch
    from corpus_client.loader import CorpusLoader


class Feed:
    """Yield a loader's batches in the form that a framework takes; its state counts the steps trained on.

    A framework holds batches ahead: Lightning one, HF Trainer all of an optimizer step. `trained` reports
    each batch when it was trained on, so that the state never counts a batch that was only held:

        yielded    0 1 2 3 4       five batches were asked for
        trained    0 1 2           `trained()` was called three times
        state            3         `next_step`: the batches 3 and 4 come again

    Args:
        loader: the loader; nothing else may read from it.
        convert: what a batch becomes; None: it stays what it is.
        epoch_steps: after how many steps of the plan an iterator ends; the next one has the steps after them.
    """

    def __init__(
        self,
        loader: CorpusLoader | ArrayLoader,
        convert: Callable[[Any], Any] | None = None,
        *,
        epoch_steps: int | None = None,
    ) -> None:
        self.loader = loader
        self._convert = convert
        self._epoch_steps = epoch_steps
        self._step = loader.step

    def __len__(self) -> int:
        """Return the steps of an epoch, or those of the whole run: the loader's `num_steps`."""
        return self._epoch_steps or len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the steps not trained on; batches that were only held come again."""
        if self.loader.step != self._step:
            self.loader.seek(self._step)
        iter(self.loader)  # raises `RunComplete` after the last step
        # Not the feed itself: a prefetcher that takes the first batch by `next` iterates over its iterator.
        rest = Steps(self.__next__)
        size = self._epoch_steps
        return rest if size is None else itertools.islice(rest, size - self._step % size)

    def __next__(self) -> Any:
        """Return the next step's batch, converted."""
        batch = next(self.loader)
        return batch if self._convert is None else self._convert(batch)

    @property
    def step(self) -> int:
        """The first step that was not trained on."""
        return self._step

    def trained(self, num_batches: int = 1) -> None:
        """Report that the next `num_batches` of the yielded batches were trained on.

        Raises:
            StepOutOfOrder: so many were not yielded; the framework got batches from elsewhere, or some twice.
        """
        step = self._step + integer("num_batches", num_batches, 0, self.loader.step)
        if step > self.loader.step:
            raise errors.StepOutOfOrder(
                f"steps before {step} are reported as trained on, but only those before {self.loader.step} "
                "were yielded; was a batch trained on twice, or did it come from elsewhere?"
            )
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run that goes on after the last batch trained on."""
        return self.loader.state_at(self._step)

    def load_state_dict(self, saved: Mapping[str, Any], *, trained_steps: int | None = None) -> None:
        """Go on at the state's next step; `trained_steps` as `CorpusLoader.load_state_dict` has it."""
        self.loader.load_state_dict(saved, trained_steps=trained_steps)
        self._step = self.loader.step


class MicroBatches(Iterator["Batch"]):
    """Yield a loader's batches in parts of `num_rows`: a step of the plan is one of the optimizer.

        plan: 12 rows a step    2 ranks, num_rows=3    a rank's micro batches: 3 3 | 3 3 | ...
                                3 ranks, num_rows=2                            2 2 | 2 2 | ...

    So another number of ranks, or of rows in a forward pass, goes on with the same steps. The trainer must
    not read ahead: the state is that of the micro batches yielded.
    """

    def __init__(self, loader: CorpusLoader, num_rows: int) -> None:
        self.loader = loader
        self._num_rows = num_rows
        self._parts: deque[Batch] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro batch; `step` is the plan's."""
        if not self._parts:
            self._parts.extend(next(self.loader).split(self._num_rows))
        return self._parts.popleft()

    @property
    def num_left(self) -> int:
        """Micro batches of the current step that are still to come."""
        return len(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state.

        Raises:
            StepOutOfOrder: the trainer's step is over and the plan's is not.
        """
        if self._parts:
            raise errors.StepOutOfOrder(
                f"a checkpoint was asked for with {len(self._parts)} micro batches of step "
                f"{self.loader.step - 1} left; the plan's global_batch_size must be the trainer's, "
                "gradient accumulation included"
            )
        return self.loader.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on at the state's next step."""
        self._parts.clear()
        self.loader.load_state_dict(saved)


def open_at(
    urls: str | Sequence[str], place: tuple[int, int], device: Any, options: Mapping[str, Any]
) -> CorpusLoader:
    """Return a loader for a framework's (rank, world size) and device, where `options` name no others."""
    from corpus_client.loader import CorpusLoader  # late: the feed of an `ArrayLoader` needs no torch

    placement = Placement(rank=place[0], world_size=place[1])
    loader = CorpusLoader(urls, **{"device": device, "placement": placement, **options})
    loader.declared = True
    return loader


def masked_targets(batch: Batch, ignored: int) -> torch.Tensor:
    """Return a batch's targets, for a framework that takes no mask: what corpora mask is `ignored` there.

    ignored: what the framework's loss leaves out.
    """
    return batch.targets if batch.corpus_mask is None else targets_in(batch, batch.corpus_mask, ignored)


def targets_in(batch: Batch, mask: torch.Tensor, ignored: int) -> torch.Tensor:
    """Return a batch's targets, `ignored` where a mask leaves them out; refuse weights."""
    if mask.is_floating_point():
        raise errors.InvalidArgument(
            "loss masks of the plan's corpora hold weights, which this framework's loss does not take; "
            "loss_mask=False trains on all tokens alike"
        )
    return batch.targets.masked_fill(~mask, ignored)


def check_place(found: tuple[int, int], expected: tuple[int, int], framework: str) -> None:
    """Raise `WrongRows` unless a loader's (rank, world size) are those of the framework.

    found: of the loader; processes that must get the same rows, as tensor parallel ones, have one rank.
    """
    if found != expected:
        raise errors.WrongRows(
            f"the loader reads as rank {found[0]} of {found[1]}, {framework} trains as rank {expected[0]} of "
            f"{expected[1]}: rows would be trained on twice or left out; make the loader after {framework} "
            f"has set up its processes, or with placement=Placement(rank={expected[0]}, "
            f"world_size={expected[1]})"
        )
