"""Catalogue row 5 on the running service: the smallest corpora and the largest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import some_tokens, write_raw, write_sparse
from tests.plans import PLAIN_ORDERS, STRIDES
from tests.reference import batch, one_source, window_of_row
from tests.serving import RunningServer

SEQ_LEN = 8
TRILLION = 10**12
FIRST_BATCH = {"seq_len": 1024, "batch_size": 512, "seed": 11}
BEYOND = {"2-31": 2**31 + 12_345, "2-32": 2**32 + 54_321}
BEYOND_TOKENS = 2**32 + 2**20


@pytest.fixture(scope="module")
def shards() -> dict[str, list[np.ndarray]]:
    """Tokens of the small corpora by name."""
    return {
        "none": [some_tokens(0)],
        "seq-len": [some_tokens(SEQ_LEN)],
        "seq-len-1": [some_tokens(SEQ_LEN + 1)],
        "seq-len-2": [some_tokens(SEQ_LEN + 2)],
        "ones": [some_tokens(SEQ_LEN + 1, seed=seed) for seed in range(30)],
        "gaps": [some_tokens(size, seed=size) for size in (0, SEQ_LEN, SEQ_LEN + 1, 0, 40, 3, 0)],
    }


def trillion_markers() -> dict[int, int]:
    """Number the rows of the first batch by a token at the beginning and the end of their windows."""
    plan = one_source("trillion", FIRST_BATCH["seq_len"], FIRST_BATCH["batch_size"], seed=FIRST_BATCH["seed"])
    markers = {}
    for row in range(0, FIRST_BATCH["batch_size"], 8):
        _, start = window_of_row(plan, [TRILLION], 0, row)
        markers |= {start + 1: row + 1, start + 1023: row + 2}
    return markers


@pytest.fixture(scope="module")
def server(
    shards: dict[str, list[np.ndarray]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("edges")
    for name, arrays in shards.items():
        (folder / name).mkdir()
        for number, tokens in enumerate(arrays):
            write_raw(folder / name / f"{number}.bin", tokens)
    markers = {start + k: k + 1 for start in BEYOND.values() for k in range(64)}
    write_sparse(folder / "beyond.bin", BEYOND_TOKENS, at=markers)
    write_sparse(folder / "trillion.bin", TRILLION, at=trillion_markers())
    corpora = {name: folder / name for name in shards}
    corpora |= {name: folder / f"{name}.bin" for name in ("beyond", "trillion")}
    with RunningServer(corpora, folder) as running:
        yield running


@pytest.mark.parametrize("name", ["none", "seq-len"])
@pytest.mark.parametrize("order", PLAIN_ORDERS)
def test_a_corpus_without_a_window_is_refused(server: RunningServer, name: str, order: str) -> None:
    response = server.get("/v1/batches", corpus=name, seq_len=SEQ_LEN, batch_size=2, step=0, order=order)
    assert (response.status, response.json()["type"]) == (422, "invalid-plan")
    assert "seq_len + 1 = 9 tokens" in response.json()["detail"]


@pytest.mark.parametrize("name", ["seq-len-1", "seq-len-2", "ones", "gaps"])
@pytest.mark.parametrize("order", PLAIN_ORDERS)
@pytest.mark.parametrize("stride", [1, SEQ_LEN, SEQ_LEN + 1])
def test_small_corpora_give_the_reference_s_windows(
    server: RunningServer, shards: dict[str, list[np.ndarray]], name: str, order: str, stride: int
) -> None:
    """Far more rows than windows: an epoch is shorter than a step."""
    query = {"corpus": name, "seq_len": SEQ_LEN, "batch_size": 64, "order": order, "stride": stride}
    response = server.get("/v1/batches", **query, step=5, count=3)
    if STRIDES.get(order, stride) != stride:
        assert response.json()["type"] == "invalid-plan"
        return
    plan = one_source(name, SEQ_LEN, 64, order=order, stride=stride)
    assert (response.array() == batch(plan, shards[name], 5, count=3)).all()


def test_the_tokens_of_an_empty_corpus(server: RunningServer) -> None:
    assert server.get("/v1/corpora/none").json()["num_tokens"] == 0
    assert server.get("/v1/corpora/none/tokens").array().shape == (0,)
    assert server.get("/v1/corpora/none/tokens", count=1).status == 422


@pytest.mark.parametrize("place", BEYOND)
def test_tokens_beyond_32_bits_are_the_right_ones(server: RunningServer, place: str) -> None:
    """Starts of tokens and of bytes above 2^31 and 2^32, marked in a sparse file."""
    start = BEYOND[place]
    expected = [0, *range(1, 65), 0]
    assert server.get("/v1/corpora/beyond/tokens", start=start - 1, count=66).array().tolist() == expected
    window = start // 1000
    query = {"corpus": "beyond", "seq_len": 1000, "batch_size": 1, "order": "sequential", "step": window}
    assert server.get("/v1/indices", **query).json()["indices"] == [[[0, window * 1000]]]
    row = server.get("/v1/batches", **query).array()[0, 0]
    offset = start - window * 1000
    assert row[offset : offset + 64].tolist() == expected[1:-1][: 1001 - offset]
    assert np.count_nonzero(row) == min(64, 1001 - offset)


def test_the_last_window_of_a_large_file(server: RunningServer) -> None:
    last = (BEYOND_TOKENS - 2) // 1
    query = {"corpus": "beyond", "seq_len": 1, "batch_size": 1, "order": "sequential", "stride": 1}
    assert server.get("/v1/indices", **query, step=last).json()["indices"] == [[[0, BEYOND_TOKENS - 2]]]
    assert server.get("/v1/batches", **query, step=last).array().tolist() == [[[0, 0]]]
    assert server.get("/v1/indices", **query, step=last + 1).json()["indices"] == [[[0, 0]]]


def private_kilobytes(pid: int) -> int:
    """Return what a process holds in memory for itself alone, all of its libraries' data included."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) for size in re.findall(r"^Private_\w+: +(\d+) kB", rollup, re.MULTILINE))


def test_a_trillion_tokens_open_and_answer_in_little_memory(server: RunningServer) -> None:
    response = server.get("/v1/batches", corpus="trillion", step=0, **FIRST_BATCH)
    assert response.headers["Corpus-Shape"] == "1,512,1025"
    tokens = response.array()[0]
    rows = np.arange(0, 512, 8)
    assert tokens[rows, 1].tolist() == (rows + 1).tolist()
    assert tokens[rows, 1023].tolist() == (rows + 2).tolist()
    assert np.count_nonzero(tokens) == 2 * rows.size
    assert server.get("/v1/corpora/trillion").json()["num_tokens"] == TRILLION
    assert private_kilobytes(server.worker_pid) < 100_000
