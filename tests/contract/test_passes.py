"""One pass over a corpus, and another one: every row once, the last batch short or masked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import ArrayLoader, CorpusIterableDataset, CorpusLoader, Placement, errors
from tests.corpora import write_raw
from tests.serving import RunningServer

SEQ_LEN = 16
NUM_ROWS = 95
PLAN: dict[str, Any] = {"corpus": "web", "seq_len": SEQ_LEN, "global_batch_size": 32}

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("passes")
    tokens = np.arange(NUM_ROWS * SEQ_LEN + 1)
    paths = {"web": write_raw(folder / "web.bin", tokens), "code": write_raw(folder / "code.bin", tokens)}
    with RunningServer(paths, folder) as server:
        yield server.url


def first_tokens(batches: Iterable[Any]) -> list[int]:
    """Return the first token of each row, by which a row is known."""
    return [int(token) for batch in batches for token in batch.inputs[:, 0]]


def open_rank(url: str, rank: int = 0, world_size: int = 1, **options: Any) -> CorpusLoader:
    place = Placement(rank=rank, world_size=world_size)
    return CorpusLoader(url, **{**PLAN, "device": "cpu", "num_steps": "epoch", "placement": place, **options})


@pytest.mark.parametrize("order", ["sequential", "shuffle"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("batch_size", [32, 64, 128])
def test_an_epoch_has_every_row_once(url: str, order: str, world_size: int, batch_size: int) -> None:
    """Also in batches larger than the corpus; a rank whose rows are all of the next epoch has none."""
    options = {"order": order, "global_batch_size": batch_size}
    found: list[int] = []
    for rank in range(world_size):
        with open_rank(url, rank, world_size, **options) as loader:
            batches = list(loader)
            assert len(batches) == len(loader) == -(-NUM_ROWS // batch_size)
            found += first_tokens(batches)
        with ArrayLoader(
            url, **{**PLAN, **options}, num_steps="epoch", rank=rank, world_size=world_size
        ) as arrays:
            assert first_tokens(arrays) == first_tokens(batches)
    assert sorted(found) == [row * SEQ_LEN for row in range(NUM_ROWS)]


@pytest.mark.parametrize(
    ("order", "num_steps", "level"),
    [
        ("sequential", 3, "WARNING"),
        ("shuffle", 3, "INFO"),
        ("sequential", 2, None),
        ("sequential", None, None),
    ],
)
def test_more_than_a_pass_is_told(
    url: str, order: str, num_steps: int | None, level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluation that runs past the end would count rows twice."""
    with caplog.at_level("INFO", "corpus_client"), open_rank(url, order=order, num_steps=num_steps):
        pass
    said = [
        (each.levelname, each.getMessage()) for each in caplog.records if "a pass over" in each.getMessage()
    ]
    told = "a pass over web ends in step 2 of 3, then rows come again; num_steps='epoch' is one pass"
    assert said == ([] if level is None else [(level, told)])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_tells_of_more_than_a_pass_once(
    url: str, num_workers: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its passes, and its workers, do not say it again."""
    place = Placement(rank=0, world_size=1)
    with caplog.at_level("INFO", "corpus_client"):
        dataset = CorpusIterableDataset(url, **PLAN, order="sequential", num_steps=3, placement=place)
        for epoch in range(2):
            dataset.set_epoch(epoch)
            assert len(list(DataLoader(dataset, batch_size=None, num_workers=num_workers))) == 3
    assert caplog.text.count("a pass over") == 1
    assert "a pass over" not in capfd.readouterr().err


def test_with_ignore_index_the_last_batch_keeps_its_shape(url: str) -> None:
    with open_rank(url, ignore_index=-100, eot_id=65535, order="sequential") as loader:
        *_, last = loader
    assert last.inputs.shape == (32, SEQ_LEN)
    assert (last.targets == -100).all(dim=1).tolist() == [False] * 31 + [True]


def test_an_epoch_goes_into_the_callers_tensors(url: str) -> None:
    inputs, targets = torch.zeros(2, 32, SEQ_LEN, dtype=torch.int64)
    found = []
    with open_rank(url) as loader:
        for _ in range(len(loader)):
            found += first_tokens([loader.next_into(inputs, targets)])
    assert sorted(found) == [row * SEQ_LEN for row in range(NUM_ROWS)]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 16])
def test_a_dataset_has_the_same_pass_again(url: str, num_workers: int) -> None:
    dataset = CorpusIterableDataset(url, **PLAN, num_steps="epoch", placement=Placement(rank=0, world_size=1))
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    passes = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        passes.append(first_tokens(loader))
    assert len(dataset) == 3
    assert passes[0] == passes[1]
    assert sorted(passes[0]) == [row * SEQ_LEN for row in range(NUM_ROWS)]


@pytest.mark.parametrize(
    "stages",
    [
        [{"from_step": 0, "global_batch_size": 8, "mixture": {"web": 0.5, "code": 0.5}}],
        [{"from_step": at, "global_batch_size": 8 + at, "mixture": {"web": 1.0}} for at in (0, 4)],
    ],
)
def test_an_epoch_of_several_corpora_or_stages_is_refused(url: str, stages: list[Any]) -> None:
    with pytest.raises(errors.InvalidArgument, match="'epoch' needs a plan of one stage and one corpus"):
        CorpusLoader(url, plan={"seq_len": SEQ_LEN, "stages": stages}, device="cpu", num_steps="epoch")


def test_an_evaluation_may_be_iterated_again(url: str) -> None:
    with open_rank(url, reiterable=True) as loader:
        first = first_tokens(loader)
        for _ in zip(range(2), loader, strict=False):  # a pass that is left early
            pass
        assert first_tokens(loader) == first
    with open_rank(url) as once:
        assert first_tokens(once) == first
        with pytest.raises(errors.RunComplete, match="reiterable=True"):
            first_tokens(once)
    with ArrayLoader(url, **PLAN, rank=0, world_size=1, num_steps=2, reiterable=True) as arrays:
        assert first_tokens(arrays) == first_tokens(arrays)


def test_a_run_of_bytes_is_extended_by_a_wider_view(tmp_path: Path) -> None:
    """The rows so far lie where they lay: as windows by the one plan, as pieces by the other."""
    from tests.views import write_corpus, write_view

    narrow = write_raw(tmp_path / "narrow.bin", np.arange(4000) % 251, dtype="uint8")
    web = write_corpus(tmp_path / "web", [[5] * 100])
    view = write_view(web, [n % 3 for n in range(100)], tmp_path / "hq.view")
    (tmp_path / "server").mkdir()
    arguments = [f"narrow={narrow},dtype=uint8", f"web={web},dtype=uint32", f"hq=web?view={view}"]
    with RunningServer({}, tmp_path / "server", arguments=arguments) as server:
        options = {"seq_len": 16, "global_batch_size": 4, "device": "cpu", "order": "shuffle"}
        with CorpusLoader(server.url, corpus="narrow", **options) as loader:
            for _ in zip(range(9), loader, strict=False):
                pass
            loader.extend(mixture={"narrow": 0.5, "hq": 0.5})
            assert next(loader).step == 9
