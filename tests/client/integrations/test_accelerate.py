"""Inside accelerate: the plan's batches on every rank, and `save_state` knows which were trained on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from corpus_client import CorpusIterableDataset, errors
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


def refusals(url: str) -> list[str]:
    """Return what is said where accelerate would divide, or send, the batches of a dataset."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from corpus_client.integrations.accelerate import already_sharded

    found = []
    dataset = CorpusIterableDataset(url, **PLAN, num_steps=4, **QUICK)
    for dispatch in (None, False):
        for num_workers in (0, 1):
            accelerator = Accelerator(
                cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
            )
            batches = accelerator.prepare(DataLoader(dataset, batch_size=None, num_workers=num_workers))
            try:
                next(iter(batches))
            except errors.WrongRows as error:
                found.append(str(error))
    declared = already_sharded(DataLoader(dataset, batch_size=None), accelerator)
    assert accelerator.prepare(declared) is declared
    return [*found, [batch.tokens.tolist() for batch in declared]]


def both(url: str, folder: str, save_after: int) -> list[Any]:
    return [train(url, folder, save_after, resume=False), refusals(url)]


def test_two_ranks_are_interrupted_and_one_goes_on(
    server: ReferenceServer, corpus: ReferenceCorpus, tmp_path: Path
) -> None:
    save_after = random.Random(11).randrange(1, NUM_STEPS - 1)
    found = on_ranks(2, tmp_path, both, server.url, str(tmp_path / "saved"), save_after)
    (plan,) = (plan for plan in server.plans.values() if plan["seed"] == PLAN["seed"])
    for rank, (seen, (*refused, declared)) in enumerate(found):
        assert seen == [rows_of(corpus, plan, step, rank, 2) for step in range(save_after)]
        assert len(refused) == 4, refused
        assert all("divides the batches over the ranks" in text for text in refused)
        assert declared == [rows_of(corpus, plan, step, rank, 2) for step in range(4)]
    seen = train(server.url, str(tmp_path / "saved"), 0, resume=True)
    assert seen == [rows_of(corpus, plan, step) for step in range(save_after, NUM_STEPS)]
