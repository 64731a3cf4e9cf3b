"""Rows 1 and 2 of the reliability catalogue: the same question has one response, wherever it is asked."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest

from corpus_client.errors import ServerError
from tests.conftest import ServedCorpus
from tests.contract.conftest import Replicas, local_root, make_loader
from tests.plans import PLAIN_ORDERS
from tests.reference import batch, one_source
from tests.serving import RunningServer, ask

SEQ_LEN, GLOBAL_BATCH = 16, 24
WORLD_SIZES = (1, 2, 3, 4, 8)


BOUNDED = {"shuffle": {"block_windows": 30, "group_blocks": 4}}
SPELLED = {
    **{order: (order, f"order={order}") for order in PLAIN_ORDERS},
    "bounded": (BOUNDED, "order=shuffle&block_windows=30&group_blocks=4"),
}


def _expected(corpora: dict[str, ServedCorpus], order: Any, step: int, **part: int) -> np.ndarray:
    """Return the tokens of a rank in a step, by the slow reference: `(rows, SEQ_LEN + 1)`."""
    plan = one_source("web", SEQ_LEN, GLOBAL_BATCH, seed=7, order=order)
    return batch(plan, corpora["web"].shards, step, **part)[0]


@pytest.mark.parametrize("name", SPELLED)
def test_any_deployment_answers_as_the_slow_reference(
    name: str, corpora: dict[str, ServedCorpus], replicas: Replicas
) -> None:
    """1,300 random (step, rank, world size) over all orders, spread over five servers."""
    order, spelled = SPELLED[name]
    draw = random.Random(f"triples {name}")
    urls = [url for deployment in replicas.values() for url in deployment]
    with contextlib.ExitStack() as stack:
        connections = []
        for url in urls:
            server = RunningServer({}, local_root(corpora))
            server.port = int(url.rsplit(":", 1)[1])
            connections.append(stack.enter_context(contextlib.closing(server.connect())))
        for _ in range(334):
            step = draw.choice([draw.randrange(50), draw.randrange(10**9)])
            world_size = draw.choice(WORLD_SIZES)
            rank = draw.randrange(world_size)
            target = (
                f"/v1/batches?corpus=web&seq_len={SEQ_LEN}&batch_size={GLOBAL_BATCH}&seed=7&{spelled}"
                f"&step={step}&rank={rank}&world_size={world_size}&format=raw"
            )
            bodies = {ask(connection, target).body for connection in draw.sample(connections, 2)}
            expected = _expected(corpora, order, step, rank=rank, world_size=world_size)
            assert bodies == {expected.astype("<u2").tobytes()}, (order, step, rank, world_size)


def test_a_loader_takes_a_bounded_shuffle(corpora: dict[str, ServedCorpus], replicas: Replicas) -> None:
    with make_loader(replicas["1 worker"], order=BOUNDED) as loader:
        assert loader.state_dict()["plan"]["order"] == BOUNDED
        for _, got in zip(range(10), loader, strict=False):
            assert got.tokens.numpy().tolist() == _expected(corpora, BOUNDED, got.step).tolist()
    with pytest.raises(ServerError, match=r"one of shuffle.*block_windows"):
        make_loader(replicas["1 worker"], order={"shufle": {}})


@pytest.mark.parametrize("deployment", ["1 worker", "4 workers", "3 replicas"])
@pytest.mark.parametrize("source", ["batches", "indices"])
def test_the_loader_delivers_the_same_bytes_from_everywhere(
    deployment: str, source: str, corpora: dict[str, ServedCorpus], replicas: Replicas
) -> None:
    local = {"local_root": local_root(corpora)} if source == "indices" else {}
    with make_loader(replicas[deployment], start_step=1_000_000, **local) as loader:
        for _, got in zip(range(40), loader, strict=False):
            expected = _expected(corpora, "shuffle", got.step)
            np.testing.assert_array_equal(got.tokens.numpy(), expected)
            np.testing.assert_array_equal(got.inputs.numpy(), expected[:, :-1])
            np.testing.assert_array_equal(got.targets.numpy(), expected[:, 1:])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_ranks_of_a_step_are_the_global_batch(world_size: int, replicas: Replicas) -> None:
    with make_loader(replicas["1 worker"]) as whole:
        expected = [next(whole).tokens for _ in range(5)]
    parts = []
    for rank in range(world_size):
        with make_loader(replicas["4 workers"], rank=rank, world_size=world_size) as loader:
            parts.append([next(loader).tokens for _ in range(5)])
    for step, tokens in enumerate(expected):
        rows = [row for part in parts for row in part[step].tolist()]
        assert rows == tokens.tolist()


def test_a_corpus_of_mixed_types_is_delivered_in_the_widest(
    corpora: dict[str, ServedCorpus], replicas: Replicas
) -> None:
    shards = corpora["mixed"].shards
    windows = {
        tuple(shard[start : start + 9].tolist())
        for shard in shards
        for start in range(0, max(0, len(shard) - 8), 8)
    }
    with make_loader(replicas["1 worker"], corpus="mixed", seq_len=8, global_batch_size=4) as loader:
        batches = [next(loader).tokens.tolist() for _ in range(60)]
    seen = {tuple(row) for rows in batches for row in rows}
    assert seen <= windows
    assert any(max(row) > 65535 for row in seen)
