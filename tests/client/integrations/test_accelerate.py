"""Inside accelerate: the plan's batches on every rank, and `save_state` knows which were trained on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import CorpusIterableDataset, CorpusLoader, errors
from tests.client.integrations.ranks import IN_FRAMEWORK, PLAN, QUICK, VOCABULARY, needs, on_ranks, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

pytestmark = [needs("accelerate"), *IN_FRAMEWORK]

NUM_STEPS = 11


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Do as a prefetcher does."""
    iterator = iter(batches)
    held = next(iterator)
    for batch in iterator:
        yield held
        held = batch
    yield held


def train(url: str, folder: str, save_after: int, *, resume: bool) -> list[Any]:
    """Train to `save_after` batches and save, or from there to the end; return the windows."""
    from accelerate import Accelerator

    from corpus_client.integrations.accelerate import AccelerateLoader

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = AccelerateLoader(accelerator, url, **PLAN, num_steps=NUM_STEPS, **QUICK)
    assert accelerator.prepare(loader) is loader
    if resume:
        accelerator.load_state(folder)
    seen = []
    for batch in one_ahead(loader):
        with accelerator.accumulate(model):
            logits = model(batch["input_ids"][:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(batch["input_ids"].tolist())
        if len(seen) == save_after and not resume:
            accelerator.save_state(folder)
            break
    loader.loader.close()
    return seen


class OwnDataset(torch.utils.data.IterableDataset[Any]):
    """What a user may write around a loader; `late`: the loader is made when a pass begins."""

    def __init__(self, url: str, *, late: bool) -> None:
        self.url = url
        self.loader = None if late else self.make()

    def make(self) -> CorpusLoader:
        return CorpusLoader(self.url, **PLAN, num_steps=4, device="cpu", **QUICK)

    def __iter__(self) -> Iterator[Any]:
        for inputs, targets in self.loader or self.make():
            yield {"input_ids": inputs, "labels": targets}


def refusals(url: str) -> list[Any]:
    """Return what is said where accelerate would divide the batches of a dataset; then the right rows."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from corpus_client.integrations.accelerate import AccelerateLoader, already_sharded

    found = []
    dataset = CorpusIterableDataset(url, **PLAN, num_steps=4, **QUICK)
    for dispatch in (None, False):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
        )
        for num_workers in (0, 1):
            batches = accelerator.prepare(DataLoader(dataset, batch_size=None, num_workers=num_workers))
            try:
                next(iter(batches))
            except errors.WrongRows as error:
                found.append(str(error))
    declared = already_sharded(DataLoader(dataset, batch_size=None), accelerator)
    assert accelerator.prepare(declared) is declared
    rest = accelerator.skip_first_batches(declared, 1)
    loader = AccelerateLoader(accelerator, url, **PLAN, **QUICK)
    with pytest.raises(errors.InvalidArgument, match="skip_first_batches is not for an AccelerateLoader"):
        accelerator.skip_first_batches(loader, 1)
    rows = [[batch.tokens.tolist() for batch in batches] for batches in (declared, rest)]
    return [*found, *rows]


@pytest.mark.parametrize("late", [False, True])
def test_rows_of_ones_own_dataset_are_not_dealt_out(
    server: ReferenceServer, tmp_path: Path, late: bool
) -> None:
    """Rank 0 would send its rows to all, and those of rank 1 would never be asked for."""
    assert on_ranks(2, tmp_path, dealt_out, server.url, str(tmp_path), late)[0] == "refused"


def dealt_out(url: str, folder: str, late: bool) -> str:
    from accelerate import Accelerator

    from corpus_client.integrations.accelerate import AccelerateLoader

    accelerator = Accelerator(cpu=True)
    plain = [torch.zeros(2)] * 4
    dealt = accelerator.prepare(DataLoader(Plain(plain), batch_size=2))
    for _ in dealt:
        break  # left early, as to look at a batch
    inside = AccelerateLoader(accelerator, url, **PLAN, **QUICK)
    for _ in dealt:
        next(inside)  # beside another DataLoader that deals out: allowed, as it knows the ranks
    inside.loader.close()
    batches = accelerator.prepare(DataLoader(OwnDataset(url, late=late), batch_size=None))
    if accelerator.process_index:  # it would wait for rank 0
        while not Path(folder, "rank-0.json").exists():
            time.sleep(0.05)
        return ""
    with pytest.raises(errors.WrongRows, match="DataLoaderDispatcher divides the batches over the ranks"):
        next(iter(batches))
    return "refused"


class Plain(torch.utils.data.IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def both(url: str, folder: str, save_after: int) -> list[Any]:
    return [train(url, folder, save_after, resume=False), refusals(url)]


def test_two_ranks_are_interrupted_and_one_goes_on(
    server: ReferenceServer, corpus: ReferenceCorpus, tmp_path: Path
) -> None:
    save_after = random.Random(11).randrange(1, NUM_STEPS - 1)
    found = on_ranks(2, tmp_path, both, server.url, str(tmp_path / "saved"), save_after)
    (plan,) = (plan for plan in server.plans.values() if plan["seed"] == PLAN["seed"])
    for rank, (seen, (*refused, declared, rest)) in enumerate(found):
        assert seen == [rows_of(corpus, plan, step, rank, 2) for step in range(save_after)]
        assert len(refused) == 4, refused
        assert all("divides the batches over the ranks" in text for text in refused)
        assert declared == [rows_of(corpus, plan, step, rank, 2) for step in range(4)]
        assert rest == declared[1:]
    seen = train(server.url, str(tmp_path / "saved"), 0, resume=True)
    assert seen == [rows_of(corpus, plan, step) for step in range(save_after, NUM_STEPS)]
