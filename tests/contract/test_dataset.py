"""Under a DataLoader, a dataset's batches are the loader's: same steps, same tokens, same order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from corpus_client import Batch, CorpusIterableDataset, Network, errors
from tests.conftest import ServedCorpus
from tests.loaders import grouped, open_loader
from tests.serving import RunningServer

PLAN: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12, "seed": 7}
NUM_STEPS = 11  # no multiple of any number of workers below

pytestmark = [
    # Python 3.12 warns of every fork beside threads; whether a worker comes up is what is tested here.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # fewer cores than workers
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11 calls it
]


@pytest.fixture(scope="module")
def url(corpora: dict[str, ServedCorpus], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RunningServer({"web": corpora["web"].path}, tmp_path_factory.mktemp("dataset")) as server:
        yield server.url


@pytest.fixture
def make_dataset(url: str) -> Callable[..., CorpusIterableDataset]:
    def make(**changes: Any) -> CorpusIterableDataset:
        options = {**PLAN, "rank": 0, "world_size": 1, "deadline_seconds": 60, "num_steps": NUM_STEPS}
        return CorpusIterableDataset(url, **grouped({**options, **changes}))

    return make


def expected(url: str, start: int = 0, stop: int = NUM_STEPS, **changes: Any) -> list[tuple[int, list[Any]]]:
    """What a `CorpusLoader` yields."""
    options = {**PLAN, "rank": 0, "world_size": 1, "device": "cpu", **changes}
    with open_loader(url, start_step=start, num_steps=stop, **options) as loader:
        return listed(loader)


def listed(batches: Iterable[Batch]) -> list[tuple[int, list[Any]]]:
    """Step and rows of each batch."""
    return [(batch.step, batch.tokens.tolist()) for batch in batches]


def loaded(dataset: CorpusIterableDataset, num_workers: int, **options: Any) -> DataLoader[Batch]:
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_order_is_the_loaders(
    url: str, make_dataset: Callable[..., CorpusIterableDataset], world_size: int, num_workers: int
) -> None:
    for rank in {0, world_size - 1}:
        part = {"rank": rank, "world_size": world_size}
        found = listed(loaded(make_dataset(**part), num_workers))
        assert found == expected(url, **part)


def test_a_dataset_that_was_iterated_here_goes_to_workers_too(
    url: str, make_dataset: Callable[..., CorpusIterableDataset]
) -> None:
    """Neither threads nor sockets of the pass that is under way are taken along."""
    dataset = make_dataset()
    here = iter(dataset)
    first = next(here)
    assert listed(loaded(dataset, 2)) == expected(url)
    assert listed([first, *here]) == expected(url)


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_stay_what_they_were(
    url: str, make_dataset: Callable[..., CorpusIterableDataset], num_workers: int, dtype: torch.dtype | None
) -> None:
    """Also as stored, where a loader would hand out memory that the next batch overwrites."""
    kept = list(loaded(make_dataset(dtype=dtype, prefetch_bytes=1 << 16), num_workers))
    assert {batch.tokens.dtype for batch in kept} == {dtype or torch.uint16}
    assert listed(kept) == expected(url)
    assert kept[3].inputs.shape == kept[3].targets.shape == (12, 16)
    moved = kept[3].to("cpu", dtype=torch.int64, non_blocking=True)
    assert (moved.step, moved.tokens.dtype) == (3, torch.int64)
    assert moved.tokens.tolist() == kept[3].tokens.tolist()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_passes_repeat_until_an_epoch_is_set(
    url: str, make_dataset: Callable[..., CorpusIterableDataset], num_workers: int, persistent: bool
) -> None:
    dataset = make_dataset()
    batches = loaded(dataset, num_workers, persistent_workers=persistent and num_workers > 0)
    assert len(batches) == len(dataset) == NUM_STEPS
    for _ in range(2):
        assert listed(batches) == expected(url)
    for epoch in (1, 4):
        dataset.set_epoch(epoch)
        assert listed(batches) == expected(url, epoch * NUM_STEPS, (epoch + 1) * NUM_STEPS)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_loses_nothing_of_the_next_pass(
    url: str, make_dataset: Callable[..., CorpusIterableDataset], persistent: bool
) -> None:
    batches = loaded(make_dataset(num_steps=None), 2, persistent_workers=persistent)
    for _ in range(2):
        seen = []
        for batch in batches:
            seen.append(batch)
            if batch.step == 4:
                break
        assert listed(seen) == expected(url, 0, 5)


@pytest.mark.parametrize(("before", "after"), [(0, 3), (2, 0), (3, 2)])
def test_state_at_resumes_with_any_number_of_workers(
    url: str, make_dataset: Callable[..., CorpusIterableDataset], before: int, after: int
) -> None:
    """And each later pass is whole again."""
    dataset = make_dataset()
    dataset.set_epoch(1)
    for batch in loaded(dataset, before):
        if batch.step == NUM_STEPS + 5:
            break
    saved = json.loads(json.dumps(dataset.state_at(batch.step + 1)))
    resumed = make_dataset()
    resumed.load_state_dict(saved)
    batches = loaded(resumed, after, persistent_workers=after > 0)
    assert listed(batches) == expected(url, NUM_STEPS + 6, 2 * NUM_STEPS)
    resumed.set_epoch(2)
    assert listed(batches) == expected(url, 2 * NUM_STEPS, 3 * NUM_STEPS)


def test_a_state_of_another_plan_is_refused(make_dataset: Callable[..., CorpusIterableDataset]) -> None:
    dataset, other = make_dataset(), make_dataset(seed=8)
    with pytest.raises(errors.StateMismatch, match="seed: the state has 7, this loader 8"):
        other.load_state_dict(dataset.state_at(3))
    late = make_dataset(start_step=10)
    with pytest.raises(errors.StateMismatch, match="start_step, got 3 and 10"):
        late.load_state_dict(late.state_at(3))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_plain_stateful_data_loader_is_refused(
    make_dataset: Callable[..., CorpusIterableDataset], num_workers: int
) -> None:
    """Its state would count a batch that a trainer holds and has not trained on, as Lightning does."""
    batches = StatefulDataLoader(make_dataset(), batch_size=None, num_workers=num_workers)
    refusal = pytest.raises(errors.InvalidArgument, match="StatefulCorpusLoader in place of a Stateful")
    if num_workers:
        with refusal:
            next(iter(batches))
    else:
        next(iter(batches))
        with refusal:
            batches.state_dict()


def test_a_mistake_is_found_where_the_dataset_is_made(
    make_dataset: Callable[..., CorpusIterableDataset],
) -> None:
    for changes, message in (
        ({"device": "cuda"}, "device and step_stride are not for a dataset"),
        ({"step_stride": 2}, "device and step_stride are not for a dataset"),
        ({"num_steps": 0}, "num_steps must be an integer"),
        ({"rank": 3, "world_size": 2}, "rank must be an integer in"),
        ({"world_size": 5}, "divisible by world_size"),
    ):
        with pytest.raises(errors.InvalidArgument, match=message):
            make_dataset(**changes)
    with pytest.raises(errors.UnknownCorpus):
        make_dataset(corpus="nothing")
    endless = make_dataset(num_steps=None)
    with pytest.raises(errors.InvalidArgument, match="epoch must be 0"):
        endless.set_epoch(1)
    with pytest.raises(TypeError, match="num_steps="):
        len(endless)


def test_an_error_in_a_worker_reaches_the_training_loop(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    with RunningServer({"web": corpora["web"].path}, tmp_path) as server:
        dataset = CorpusIterableDataset(server.url, **PLAN, network=Network(deadline_seconds=5))
    with pytest.raises(errors.DeadlineExceeded, match="no good response from http"):
        next(iter(loaded(dataset, 1)))


def test_a_stride_takes_every_nth_step(url: str) -> None:
    """And a loader that has one resumes with it."""
    whole = dict(expected(url, 0, 40))
    with open_loader(url, **PLAN, device="cpu", start_step=2, num_steps=32, step_stride=7) as loader:
        found = listed(loader)
        assert [step for step, _ in found] == [2, 9, 16, 23, 30]
        assert all(rows == whole[step] for step, rows in found)
        loader.load_state_dict(loader.state_at(23))
        assert [batch.step for batch in loader] == [23, 30]
