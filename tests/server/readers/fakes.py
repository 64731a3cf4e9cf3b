"""Extents of an object store and plans over them, without a store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from corpus_server.errors import CorpusChanged, InvalidParameter
from corpus_server.pieces import Pieces
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import Registry
from corpus_server.stores import Extent
from corpus_server.stores.attached import Sign

_numbers = itertools.count()


class SimpleFile:
    """A file of nobody."""

    corpus = ""

    def sign(self) -> Sign:
        return b"", 0

    def is_surely_good(self, extent: FakeExtent, sign: Sign) -> bool:
        return False


class FakeExtent:
    """An extent that a store delivers at once, after some failures; remembers what was done to it.

    Args:
        failures: what its first fetches raise.
    """

    def __init__(self, name: str = "a", *failures: BaseException, size_bytes: int = 1) -> None:
        self.name, self.size_bytes = name, size_bytes
        self.file = SimpleFile()
        self.failures = list(failures)
        self.is_cached = self.is_changed = False
        self.urgent: list[bool] = []  # of each fetch
        self.num_touched = self.num_synced = self.num_detached = self.num_discarded = self.num_released = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    @property
    def num_fetched(self) -> int:
        return len(self.urgent)

    def attach(self) -> bool:
        return self.is_cached

    def detach(self) -> bool:
        self.num_detached += 1
        return True

    def discard(self) -> None:
        self.num_discarded += 1
        self.is_cached = self.is_changed = False

    def check_unchanged(self) -> None:
        if self.is_changed:
            raise CorpusChanged(f"{self.name} was written to")

    def stage(self, *arguments: object, urgent: bool, on_bytes: Callable[[int], object]) -> None:
        self.urgent.append(urgent)
        self.may_go_on.wait(20)
        if self.failures:
            raise self.failures.pop(0)
        on_bytes(7)
        self.is_cached = True

    def touch(self, *, planned: bool = True) -> None:
        self.num_touched += planned
        self.num_released += not planned

    def sync(self) -> None:
        self.num_synced += 1


def extents(*fakes: FakeExtent) -> list[Extent]:
    return cast("list[Extent]", list(fakes))


class FakePlan:
    """A plan of one row a step, whose step k reads the extent k; it ends with them."""

    is_staged = True
    num_extents = 2**31  # no steps read all

    def __init__(self, *read: FakeExtent) -> None:
        self.root_id = f"plan-{next(_numbers)}"
        self.plan = SimpleNamespace(id=self.root_id)
        self.read = read
        self.staged = [self]
        self.sampler = self
        self.gatherer = SimpleNamespace(num_faults=0)

    def check_part(self, step: int, *, count: int = 1, **part: int) -> int:
        if step + count > len(self.read):
            raise InvalidParameter("the plan ends")
        return 1

    def num_located(self, rows: int, world_size: int) -> int:
        return rows

    def pieces(self, step: int, rows: range, *, count: int = 1, world_size: int = 1) -> Pieces:
        return np.array([[number, 0, 1] for number in range(step, step + count)]), np.arange(count + 1)

    def uses(self, places: np.ndarray) -> list[tuple[int, int, FakeExtent]]:
        return [(k, k, self.read[number]) for k, number in enumerate(places[:, 0].tolist())]

    def ask(self, registry: Registry, step: int = 0) -> None:
        registry.note(as_bound(self), range(step, step + 1), rank=0, world_size=2)


def as_bound(plan: Any) -> BoundPlan:
    return cast("BoundPlan", plan)
