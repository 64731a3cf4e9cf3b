"""The parts that axes share: figures, contenders, disk, clients, other commits."""

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.benchmarks import corpus, disk
from scripts.benchmarks.axes import paced
from scripts.benchmarks.clients import Job
from scripts.benchmarks.contender import Shape, check, windows_of
from scripts.benchmarks.measure import SPEED, measure_once
from scripts.benchmarks.peers.bare import MAX_SLICES, SENDINGS, Bare, Sending
from scripts.benchmarks.servers import spawn_peer
from tests.corpora import some_tokens, write_raw


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.make(tmp_path_factory.mktemp("corpus"), 10**6)


class Shifted:
    """Delivers windows that begin some tokens late."""

    name = "shifted"
    pids: tuple[int, ...] = ()
    ahead_bytes = 0

    def __init__(self, tokens: np.ndarray, shape: Shape, late: int) -> None:
        self._tokens, self._shape, self._late = tokens, shape, late

    def next(self) -> torch.Tensor:
        length = self._shape.length
        return torch.from_numpy(
            np.stack([self._tokens[at + self._late :][:length] for at in self.starts(0).tolist()])
        )

    def starts(self, step: int) -> np.ndarray:
        return np.arange(self._shape.rows) * 10

    def close(self) -> None:
        pass


def test_a_contender_that_delivers_other_tokens_is_refused(tmp_path: Path) -> None:
    shape, tokens = Shape(rows=4, length=9), some_tokens(100)
    write_raw(tmp_path / "corpus.bin", tokens)
    good = Shifted(tokens, shape, late=0)
    check(good, tmp_path / "corpus.bin", shape)  # type: ignore[arg-type]
    assert measure_once(good, shape, 0.001)[SPEED] > 0  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="shifted: step 0 of 4 x 9 must hold the windows at"):
        check(Shifted(tokens, shape, late=1), tmp_path / "corpus.bin", shape)  # type: ignore[arg-type]


def test_inputs_and_targets_that_do_not_belong_together_are_refused() -> None:
    tokens = torch.arange(10).view(2, 5)
    assert windows_of((tokens[:, :-1], tokens[:, 1:])).tolist() == tokens.tolist()
    with pytest.raises(RuntimeError, match="moved by one token"):
        windows_of((tokens[:, :-1], tokens[:, :-1]))


def test_bare_sockets_send_batches_of_more_slices_than_one_call_takes(path: Path) -> None:
    """In every way, one step or several to a request."""
    shape = Shape(rows=2 * MAX_SLICES + 1, length=129)
    with spawn_peer("bare", path) as peer:
        for sending, steps in itertools.product(SENDINGS, (1, 2)):
            bare = Bare(sending, peer, shape, sending=sending, steps=steps)
            check(bare, path, shape)
            bare.close()


@pytest.mark.parametrize("sending", SENDINGS)
def test_connections_of_a_bare_server_do_not_share_buffers(path: Path, sending: Sending) -> None:
    """One that waits with responses in flight still gets its own tokens."""
    shape = Shape(rows=512, length=2049)
    with spawn_peer("bare", path) as peer:
        waiting, busy = (Bare("bare", peer, shape, sending=sending, steps=4) for _ in range(2))
        for _ in range(5):
            busy.next()
        check(waiting, path, shape, num_steps=8)
        waiting.close()
        busy.close()


@pytest.mark.parametrize("depth", [1, 7])
def test_threads_read_every_window_once(path: Path, depth: int) -> None:
    offsets = np.arange(0, 10**6, 5000)
    num_windows, _ = disk.read_parallel(path, offsets, 100, depth=depth, seconds=60)
    assert num_windows == len(offsets)


def test_a_worker_with_other_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.bin"
    write_raw(path, some_tokens(1000))
    digest = hashlib.sha256(np.zeros((2, 9), "uint16").tobytes()).hexdigest()
    job = Job(kind="paced", at="", rows=2, length=9, world_size=2, num_batches=3)
    with pytest.raises(RuntimeError, match="worker 1 must end with the windows of step 3"):
        paced.check_last([{"rank": 1, "last": (3, digest)}], job, path)
