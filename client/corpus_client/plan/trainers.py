"""What a trainer does with a loader's batches, where it would lose or repeat some without a word.

No framework tells a loader who takes its batches. These checks ask the frameworks instead, and only those
that the program has imported.
"""

from __future__ import annotations

import gc
import sys
from operator import length_hint
from types import FunctionType, ModuleType
from typing import Any

from corpus_client import errors

MAX_OBJECTS = 100_000
"""Of a dataset that are looked at; 0.05 s."""


def check_dealt_out(source: Any, world_size: int) -> None:
    """Raise `WrongRows` if accelerate deals out the batches that `source` is being asked for to other ranks.

    `Accelerator.prepare` of a DataLoader whose dataset is iterable sends the batches of rank 0 to all ranks,
    or lets each rank drop those of the others. Both are wrong for batches that are one rank's rows already.

    source: a loader, or a dataset; world_size: over how many ranks its rows are divided. With 1 each batch is
    whole, and may be dealt out.
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
    if divided and _reads(active.dataset, source):
        raise errors.WrongRows(
            f"accelerate's {kind.__name__} divides the batches over the ranks, and each is one rank's rows "
            "already: steps would be left out. Do not pass the DataLoader to accelerator.prepare (or pass it "
            "to corpus_client.integrations.accelerate.already_sharded first), or use AccelerateLoader from "
            "there; for HF Trainer use corpus_client.integrations.transformers.train_from"
        )


def _reads(dataset: Any, source: Any) -> bool:
    """Whether a dataset is `source`, or a DataLoader is just reading from it what leads to `source`.

    Its iterator is a generator, which runs just now, or it holds the loader. A loop that was left early has
    no iterator any more; inside a loop's body the generator does not run.
    """
    from torch.utils.data._utils import fetch  # late: `ArrayLoader` works without torch

    if source in (dataset, getattr(dataset, "dataset", None)):
        return True
    reading = [each for each in gc.get_objects() if type(each) is fetch._IterableDatasetFetcher]
    found: list[Any] = [each for each in reading if each.dataset is dataset]
    if any(getattr(getattr(each, "dataset_iter", None), "gi_running", False) for each in found):
        return True
    seen: set[int] = set()
    while found and len(seen) < MAX_OBJECTS:
        for each in gc.get_referents(found.pop()):
            if each is source:
                return True
            if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
                seen.add(id(each))
                found.append(each)
    return False


def check_held_ahead(loader: Any) -> None:
    """Raise `StateMismatch` if Lightning iterates over the loader and asks for batches ahead.

    Lightning holds one batch that it has not trained on, unless the loader has a length. The loader's state
    counts that batch as done, so a resumed run would leave it out.
    """
    combined = [
        module.CombinedLoader
        for package in ("lightning.pytorch", "pytorch_lightning")
        if (module := sys.modules.get(f"{package}.utilities.combined_loader")) is not None
    ]
    if not combined or length_hint(loader, -1) >= 0:
        return
    # No registry names the trainers of a process. A checkpoint takes longer than this look at all objects.
    for each in gc.get_objects():
        if type(each) in combined and any(held is loader for held in each.flattened):
            raise errors.StateMismatch(
                f"Lightning iterates over this {type(loader).__name__} and holds a batch that it has not "
                "trained on, which the state would count as done: a resumed run would leave it out. Pass "
                "datamodule=corpus_client.integrations.lightning.CorpusDataModule(...) to fit, or give the "
                "loader a length by num_steps=, with which Lightning holds none"
            )
