"""Reading ahead for bounded shuffles: which groups are read, when they are dropped, and what stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.shards import Shard
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import BoundedShuffle, Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import Prefetcher, Registry
from corpus_server.readers import groups as groups_module
from corpus_server.readers import registry as registry_module
from corpus_server.readers.groups import Extent, Groups
from corpus_server.work import Budget
from tests.corpora import some_tokens, write_npy, write_raw
from tests.pages import drop, resident_of
from tests.serving import wait_until

SEQ_LEN, ROWS = 64, 8
ORDER = BoundedShuffle(block_windows=32, group_blocks=4)


class Disk:
    """Records what shards are asked for instead of asking the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bound: BoundPlan) -> None:
        self.numbers = {id(shard): number for number, (_, shard) in enumerate(bound.shards)}
        self.read: list[Extent] = []
        self.dropped: list[Extent] = []
        monkeypatch.setattr(bound.gatherer, "read_ahead", self.start_reading)
        monkeypatch.setattr(bound.gatherer, "are_resident", lambda places: False)
        monkeypatch.setattr(Shard, "drop", lambda shard, *part: self.drop(shard, *part))
        monkeypatch.setattr(Shard, "release", lambda shard, *part: None)

    def start_reading(self, places: np.ndarray, lengths: np.ndarray) -> None:
        (shard,) = set(places[:, 0].tolist())
        start, stop = int(places[0, 1]), int(places[-1, 1] + lengths[-1])
        assert (places[:, 1] + lengths).tolist() == [*places[1:, 1].tolist(), stop]
        self.read.append((shard, start, stop))

    def drop(self, shard: Shard, start: int, stop: int) -> None:
        self.dropped.append((self.numbers[id(shard)], start, stop))


class Asker:
    """Sends requests for a plan and has all of its groups read."""

    def __init__(self, bound: BoundPlan) -> None:
        self.groups = Groups(bound)

    def request(self, step: int) -> None:
        assert self.groups.note(step, 0.0)
        self.groups.look(self.groups.take_steps(0.0), [])
        while self.groups.read_chunk():
            pass


@contextmanager
def two_sources(folder: Path, share: float) -> Iterator[BoundPlan]:
    paths = [write_raw(folder / f"{name}.bin", some_tokens(25_000)) for name in "ab"]
    with Catalog.open([CorpusSpec(name=path.stem, path=path) for path in paths]) as opened:
        stage = Stage(global_batch_size=ROWS, mixture={"a": share, "b": 1 - share})
        yield opened.bind(Plan(seq_len=SEQ_LEN, seed=0, order=ORDER, stages=(stage,)), Budget())


def test_the_groups_of_all_sources_that_a_request_is_in_come_before_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps later one source is groups further than the other."""
    with two_sources(tmp_path, 0.8) as bound:
        disk = Disk(monkeypatch, bound)
        Asker(bound).request(60)
        numbers = bound.sampler.group_numbers(60)
        assert numbers[0] > numbers[1] + 1
        now, later = (
            [
                chunk
                for source in range(2)
                for chunk in bound.sampler.group_extents(source, numbers[source] + k)
            ]
            for k in range(2)
        )
        assert sorted(disk.read[: len(now)]) == sorted(now)
        assert sorted(disk.read[len(now) :]) == sorted(later)


@pytest.mark.parametrize("names", ["", "a", "b", "ab"])
def test_dropping_all_leaves_the_corpora_of_other_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """Of those that are read now: another plan may have begun since the latest look. And each once."""
    with two_sources(tmp_path, 0.5) as bound:
        disk = Disk(monkeypatch, bound)
        asker = Asker(bound)
        asker.request(0)
        read = list(disk.read)
        for _ in range(2):
            asker.groups.drop_all([bound.corpora[name] for name in names])
        assert sorted(disk.dropped) == sorted(chunk for chunk in read if "ab"[chunk[0]] not in names)


def test_the_groups_of_each_source_take_page_cache(tmp_path: Path) -> None:
    """With its own type of tokens, and of its own windows if they are fewer; a plan needs all of it."""
    paths = [write_raw(tmp_path / "a.bin", some_tokens(25_000))]
    for name, num_tokens in (("b", 25_000), ("c", 2001)):
        path = tmp_path / f"{name}.npy"
        paths.append(write_npy(path, some_tokens(num_tokens, dtype="uint32"), dtype="uint32"))
    with Catalog.open([CorpusSpec(name=path.stem, path=path) for path in paths]) as opened:
        stage = Stage(global_batch_size=ROWS, mixture={"a": 0.5, "b": 0.25, "c": 0.25})
        order = BoundedShuffle(block_windows=10, group_blocks=2)
        plan = Plan(seq_len=SEQ_LEN, seed=0, order=order, stride=50, stages=(stage,))
        tokens = 3 * 20 * 50 + SEQ_LEN
        assert Groups(opened.bind(plan, Budget())).num_bytes == 2 * tokens + 4 * tokens + 4 * 2001


@pytest.mark.parametrize("how", ["the next group", "the rank falls silent", "the catalogue is reloaded"])
def test_groups_come_from_the_disk_and_leave_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """16 blocks of 1 MiB, two to a group, through the registry, the thread and the kernel."""
    monkeypatch.setattr(groups_module, "_KEPT_REQUESTS", 2)
    path = write_raw(tmp_path / "web.bin", some_tokens(2**23 + 1))
    drop(path)
    stage = Stage(global_batch_size=32, mixture={"web": 1.0})
    plan = Plan(seq_len=1024, order=BoundedShuffle(block_windows=512, group_blocks=2), stages=(stage,))
    specs = [CorpusSpec(name="web", path=path)]
    with Catalog.open(specs) as catalog, Catalog.open(specs) as reloaded:
        bound, registry = catalog.bind(plan, Budget()), Registry()
        prefetcher = Prefetcher(registry, 2**30)

        def share(number: int) -> float:
            pages = resident_of(path)
            extents = [
                (start // 2048, stop // 2048) for _, start, stop in bound.sampler.group_extents(0, number)
            ]
            return float(np.mean(np.concatenate([pages[low:high] for low, high in extents])))

        def ask(step: int, bound: BoundPlan = bound) -> None:
            registry.note(bound, range(step, step + 1), rank=0, world_size=1)

        ask(0)
        wait_until(lambda: share(0) == share(1) == 1)
        assert share(3) < 0.1
        bound.gatherer.gather(bound.sampler.locate(0)[0], 1025, bound.dtype)  # maps its pages

        def left() -> bool:
            if how == "the next group":
                ask(64)
            return (share(3) == 1 or how == "the rank falls silent") and share(0) < 0.1

        if how == "the rank falls silent":
            real = time.monotonic
            monkeypatch.setattr(registry_module.time, "monotonic", lambda: real() + 61)
            registry.end_idle()
        elif how == "the catalogue is reloaded":
            ask(96, reloaded.bind(plan, Budget()))
        wait_until(left)
        prefetcher.close()
