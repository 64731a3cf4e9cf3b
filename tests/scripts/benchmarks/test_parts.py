"""The parts that axes share: figures, contenders, disk, clients, other commits."""

import hashlib
import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.benchmarks import corpus, disk
from scripts.benchmarks.axes import paced
from scripts.benchmarks.clients import Job, connected
from scripts.benchmarks.contender import Shape, check, windows_of
from scripts.benchmarks.measure import P50, SPEED, Rounds, measure_once
from scripts.benchmarks.peers.bare import MAX_SLICES, SENDINGS, Bare, Sending
from scripts.benchmarks.servers import checked_out, spawn_peer
from scripts.processes import ROOT
from tests.corpora import some_tokens, write_raw
from tests.pages import drop, resident_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.make(tmp_path_factory.mktemp("corpus"), 10**6)


def test_ratios_are_taken_round_by_round() -> None:
    """Of medians alone it would be 2 / 4."""
    rounds = Rounds("some")
    for of, to in ((1, 4), (2, 1), (8, 16)):
        rounds.add("a", {SPEED: of, P50: 1})
        rounds.add("b", {SPEED: to})
    assert rounds.ratio("a", "b", SPEED) == {"median": 0.5, "lowest": 0.25, "highest": 2.0}
    assert rounds.spread("a", SPEED) == {"median": 2, "lowest": 1, "highest": 8}
    assert rounds.table().rows[0][:2] == ["a", "2 (1 - 8)"]
    assert rounds.ratio_table([("a", "b")]).rows == [["a / b", "0.50 (0.25 - 2.00)", "", "", ""]]
    target = rounds.target("a", SPEED, "at least", 0.4, to="b")
    assert target.met
    assert target.figure == "some: a / b, M tokens/s"


def test_the_strongest_is_chosen_anew_in_every_round() -> None:
    rounds = Rounds("some")
    for first, second in ((1, 2), (4, 3), (1, 5)):
        rounds.add("first", {SPEED: first, P50: first})
        rounds.add("second", {SPEED: second, P50: second})
    assert rounds.add_strongest("strongest", ["first", "second"]) == {"second": 2, "first": 1}
    assert rounds.values["strongest"] == {SPEED: [2, 4, 5], P50: [2, 4, 5]}


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


def test_a_file_that_stays_in_memory_is_refused(tmp_path: Path) -> None:
    """As is one that somebody has mapped and touched."""
    path = corpus.make(tmp_path, 10**6)
    drop(path)  # skips where pages cannot be dropped
    disk.drop(path)
    assert not resident_of(path).any()
    touched = np.memmap(path, np.uint16, "r")
    assert touched.sum()
    with pytest.raises(RuntimeError, match=r"100% of .* stay in memory; end the processes that map it"):
        disk.drop(path)


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


def test_clients_that_cannot_start_fail_the_axis(capfd: pytest.CaptureFixture[str]) -> None:
    """What they wrote is shown."""
    job = Job(kind="paced", at="nowhere", rows=2, length=9, ranks=[0], offsets=[0.0])
    with pytest.raises(RuntimeError, match="a client of the bench ended with 1"), connected([job]):
        pytest.fail("it never was ready")
    assert "url must be" in capfd.readouterr().err


def known(commit: str) -> bool:
    """Whether this is a git checkout that holds a commit."""
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not known("HEAD"), reason="this is no git checkout")
def test_another_commit_is_checked_out_and_removed() -> None:
    with checked_out("HEAD") as tree:
        assert (tree / "corpus_server" / "settings.py").exists()
    assert not tree.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(tree) not in listed.stdout
    with pytest.raises(SystemExit, match=r"git worktree add .* failed: "), checked_out("0" * 40):
        pytest.fail("there is no such commit")
