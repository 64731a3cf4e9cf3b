"""A server over a corpus whose responses are larger than what is ever held of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import ServedCorpus
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

NUM_TOKENS = 6_000_000


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> ServedCorpus:
    """12 MB in two shards; a response of 150 steps is more than is ever gathered whole."""
    folder = tmp_path_factory.mktemp("big")
    shards = [some_tokens(NUM_TOKENS // 2, seed=seed) for seed in range(2)]
    for number, tokens in enumerate(shards):
        write_raw(folder / f"{number}.bin", tokens)
    return ServedCorpus(folder, tuple(shards))


@pytest.fixture(scope="session")
def roomy(big: ServedCorpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of one worker with the memory it usually has; tests leave it as it is."""
    with RunningServer({"big": big.path}, tmp_path_factory.mktemp("roomy")) as running:
        yield running
