"""A server on the same host, over a Unix socket: the same bytes, and no other replica than any other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from corpus_client import RemoteCorpus, errors, get_batch
from tests.conftest import ServedCorpus
from tests.contract.conftest import Replicas, make_loader, take
from tests.serving import RunningServer


@pytest.fixture
def path() -> Iterator[Path]:
    """A path with a character that a URL must spell."""
    with TemporaryDirectory() as folder:
        yield Path(folder) / "corpus 1.sock"


@pytest.fixture
def server(corpora: dict[str, ServedCorpus], path: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server on the Unix socket alone."""
    with RunningServer({"web": corpora["web"].path}, tmp_path, uds=path) as server:
        yield server


def test_the_same_batches_as_over_tcp(server: RunningServer, replicas: Replicas) -> None:
    with make_loader(server.url) as here, make_loader(replicas["1 worker"]) as there:
        for (step, tokens), (expected_step, expected) in zip(take(here, 60), take(there, 60), strict=True):
            assert step == expected_step
            np.testing.assert_array_equal(tokens, expected)
        assert here.state_dict() == there.state_dict()


def test_a_remote_corpus_draws_the_same_as_over_tcp(
    server: RunningServer, replicas: Replicas, corpora: dict[str, ServedCorpus]
) -> None:
    drawn = []
    for url in (server.url, replicas["1 worker"][0]):
        with contextlib.closing(RemoteCorpus(url, "web")) as remote:
            assert len(remote) == len(corpora["web"].tokens)
            torch.manual_seed(3)
            drawn.append(get_batch(remote, 4, 16))
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


def test_a_socket_that_dies_is_a_replica_that_dies(server: RunningServer, replicas: Replicas) -> None:
    """Killed in mid-run, then its file removed: the loader goes on over TCP, and no batch is another."""
    with (
        make_loader([server.url, *replicas["1 worker"]], prefetch_bytes=16_384) as loader,
        make_loader(replicas["1 worker"]) as reference,
    ):
        found = take(loader, 20)
        assert b'route="/v1/batches",status="200"' in server.get("/metrics").body  # it had its share
        server.kill()
        found += take(loader, 40)
        assert server.uds is not None
        server.uds.unlink()
        found += take(loader, 40)
        expected = take(reference, 100)
        assert [step for step, _ in found] == [step for step, _ in expected]
        np.testing.assert_array_equal([each for _, each in found], [each for _, each in expected])


def test_killed_and_started_again_on_the_same_path_is_ridden_out(
    server: RunningServer, replicas: Replicas
) -> None:
    with make_loader(server.url, prefetch_bytes=16_384) as loader, make_loader(replicas["1 worker"]) as other:
        found = take(loader, 20)
        server.restart()
        found += take(loader, 40)
        np.testing.assert_array_equal([each for _, each in found], [each for _, each in take(other, 60)])


def test_nobody_there_is_an_error_that_names_the_url(path: Path) -> None:
    for seconds in (0.3, 20):  # the shorter time may be over before a busy machine has tried at all
        with pytest.raises(errors.DeadlineExceeded) as caught:
            make_loader(f"uds://{path}", deadline_seconds=seconds)
        if "No such file" in str(caught.value):
            break
    assert re.search(r"uds:///.*corpus 1\.sock.*No such file", str(caught.value))
