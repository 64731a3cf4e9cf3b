"""A corpus of few token ids, so that the smallest models can learn from it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.client.integrations.ranks import VOCABULARY
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer


@pytest.fixture(scope="module", autouse=True)
def in_one_thread(one_thread: None) -> None:
    """Let every test here use `one_thread`."""


@pytest.fixture(scope="module")
def corpus() -> ReferenceCorpus:
    draw = np.random.default_rng(3)
    return ReferenceCorpus(
        "web", [draw.integers(0, VOCABULARY, length, np.uint16) for length in (9000, 4000)]
    )


@pytest.fixture(scope="module")
def server(corpus: ReferenceCorpus) -> Iterator[ReferenceServer]:
    with ReferenceServer([corpus]) as server:
        yield server
