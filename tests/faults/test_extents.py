"""Stores and disks that fail while the extents of shards, several of each, come from an object store."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from corpus_client import CorpusLoader, Staging
from corpus_server.stores import Cache
from tests import stores
from tests.buckets import NAME, Bucket
from tests.corpora import some_tokens
from tests.serving import Response, RunningServer, check_problem, run_here, wait_until
from tests.stores import Reply, once_staged

pytest.importorskip("obstore")

NUM_SHARDS, SHARD_TOKENS, SEQ_LEN, NUM_ROWS = 6, 20_000, 100, 8
EXTENT_BYTES = 4096  # ten of a shard, the last one shorter
SHARD_BYTES, SHARD_WINDOWS = 2 * SHARD_TOKENS, 199
LAST = SHARD_WINDOWS // NUM_ROWS - 1  # step whose rows lie in the last extents of the first shard
PLAN = {
    "seq_len": SEQ_LEN,
    "order": "sequential",
    "stages": [{"global_batch_size": NUM_ROWS, "mixture": {"web": 1.0}}],
}
QUERY = {"corpus": "web", "seq_len": SEQ_LEN, "batch_size": NUM_ROWS, "order": "sequential"}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The shards as local files, with hashes of their blocks: they find bytes that changed on the way."""
    folder = tmp_path / "local" / "web"
    folder.mkdir(parents=True)
    for number in range(NUM_SHARDS):
        (folder / f"{number}.bin").write_bytes(some_tokens(SHARD_TOKENS, seed=number).tobytes())
    assert run_here("verify", folder, "--record").returncode == 0
    return folder


@pytest.fixture
def bucket(local: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    objects = {f"web/{name}": content for name, content in stores.contents(local).items()}
    with Bucket(objects=dict(objects)) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def start(folder: Path, cache: Path, *, cache_bytes: int = 3 * SHARD_BYTES) -> RunningServer:
    folder.mkdir(exist_ok=True)
    numbers = ("--cache-bytes", str(cache_bytes), "--extent-bytes", str(EXTENT_BYTES))
    return RunningServer({"web": f"s3://{NAME}/web"}, folder, arguments=("--cache-dir", str(cache), *numbers))


def right(local: Path, step: int) -> np.ndarray:
    """Return the rows of a step, from the files."""
    rows = []
    for row in range(step * NUM_ROWS, (step + 1) * NUM_ROWS):
        shard, window = divmod(row % (NUM_SHARDS * SHARD_WINDOWS), SHARD_WINDOWS)
        tokens = np.fromfile(local / f"{shard}.bin", "<u2")
        rows.append(tokens[window * SEQ_LEN : window * SEQ_LEN + SEQ_LEN + 1])
    return np.stack(rows)


def ask(server: RunningServer, step: int) -> Response:
    return server.get("/v1/batches", **QUERY, step=step)


def is_right(response: Response, local: Path, step: int) -> bool:
    assert response.status != 200 or response.body == right(local, step).tobytes(), f"wrong tokens in {step}"
    return response.status == 200


def staged(cache: Path) -> int:
    return len(list((cache / "extents").glob("*/*/tokens")))


def late(change: Callable[[Reply], None]) -> stores.Fault:
    """Return a fault of the extents behind the fifth one of the first shard: those before it come."""

    def fault(path: str, reply: Reply) -> None:
        first = reply.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
        if path.endswith("0.bin") and len(reply.body) <= EXTENT_BYTES and int(first) >= 5 * EXTENT_BYTES:
            change(reply)

    return fault


def replaced(reply: Reply) -> None:
    """Send what a store does that has another version by now."""
    reply.status, reply.body = 412, b"<Error><Code>PreconditionFailed</Code></Error>"


class Sometimes:
    """Spoils a share of the ranges of shards, each in one way that a seed chooses."""

    def __init__(self, share: float, *changes: Callable[[Reply], None]) -> None:
        self._random, self._share, self._changes = random.Random(7), share, changes
        self._lock = threading.Lock()
        self.num_met = 0

    def __call__(self, path: str, reply: Reply) -> None:
        with self._lock:
            is_met = path.endswith(".bin") and self._random.random() < self._share
            change = self._random.choice(self._changes)
            self.num_met += is_met
        if is_met:
            change(reply)


def test_a_loop_over_a_store_that_fails_in_every_way_reads_what_the_files_hold(
    tmp_path: Path, local: Path, bucket: Bucket
) -> None:
    """Each window once, in order, through a cache of half of the shards; a kill -9 in the middle."""
    waits, steps = [], NUM_SHARDS * SHARD_WINDOWS // NUM_ROWS
    staging = Staging(prefetch_bytes=20_000)
    with start(tmp_path / "a", tmp_path / "cache") as server:
        bucket.fault = faults = Sometimes(
            0.2,
            *(stores.unavailable, stores.broken, stores.cut, stores.short, stores.flipped, stores.whole),
            *(stores.shifted, stores.changed, stores.after(0.5)),
        )
        with CorpusLoader(server.url, plan=PLAN, device="cpu", dtype=None, staging=staging) as loader:
            for step in range(steps):
                if step == steps // 2:
                    server.kill()
                    bucket.fault = lambda path, reply: None  # a start reads some of each shard, and refuses
                    server.start()
                    bucket.fault = faults
                began = time.monotonic()
                batch = next(loader)
                waits.append(time.monotonic() - began)
                assert np.array_equal(batch.tokens.numpy(), right(local, step)), f"wrong tokens in {step}"
        log = server.log()
    assert faults.num_met >= 10
    assert log.count("was not staged") <= faults.num_met
    assert "Traceback" not in log
    assert max(waits) < 60, waits


@pytest.mark.parametrize("name", ["unavailable", "broken", "cut", "flipped", "replaced"])
def test_extents_that_are_here_are_served_while_others_fail_which_is_one_line(
    tmp_path: Path, local: Path, bucket: Bucket, name: str
) -> None:
    """500, 503, bodies that are cut, wrong bytes, and an object that changes between two of its extents."""
    with start(tmp_path / "a", tmp_path / "cache") as server:
        bucket.fault = late(replaced if name == "replaced" else getattr(stores, name))
        slug = "corpus-changed" if name == "replaced" else "store-failed"
        assert is_right(once_staged(lambda: ask(server, 0)), local, 0)
        seen: set[str] = set()

        def is_refused() -> bool:
            began = time.monotonic()
            response = ask(server, LAST)
            seen.add(check_problem(response, 503, response.json()["type"])["type"])
            assert time.monotonic() - began < 30
            return slug in seen

        wait_until(is_refused)  # 500 and 503 are asked for again for longer than a response waits
        assert is_refused()
        assert seen <= {slug, "not-staged"}
        assert is_right(once_staged(lambda: ask(server, 0)), local, 0)
        assert server.log().count("was not staged") == 1
        bucket.fault = lambda path, reply: None
        wait_until(lambda: is_right(ask(server, LAST), local, LAST))


def test_a_server_killed_between_two_extents_of_a_shard_goes_on_with_those_that_are_whole(
    tmp_path: Path, local: Path, bucket: Bucket
) -> None:
    cache = tmp_path / "cache"
    with start(tmp_path / "a", cache) as server:
        bucket.fault = late(stores.after(60.0))
        assert is_right(once_staged(lambda: ask(server, 0)), local, 0)
        wait_until(lambda: list((cache / "extents").glob("*/*/.tokens.tmp")))
        server.kill()
        num_whole = staged(cache)
        assert num_whole > 0
        bucket.fault = lambda path, reply: None
        server.start()
        assert (staged(cache), list((cache / "extents").glob("*/*/.tokens.tmp"))) == (num_whole, [])
        assert is_right(once_staged(lambda: ask(server, 0)), local, 0)
        assert is_right(once_staged(lambda: ask(server, LAST)), local, LAST)


def test_a_full_disk_is_said_in_one_line_and_what_fits_is_served(
    tmp_path: Path, local: Path, bucket: Bucket, small_disk: Path
) -> None:
    """The cache may hold three shards, and its disk some extents of one."""
    subprocess.run(["mount", "-o", "remount,size=64k", small_disk], check=True)
    with start(tmp_path / "a", small_disk / "cache") as server:
        first = time.monotonic()
        assert is_right(once_staged(lambda: ask(server, 0)), local, 0)
        wait_until(lambda: "No space left on device" in server.log(), "steps ahead fill the disk")
        for _ in range(3):
            began = time.monotonic()
            problem = check_problem(once_staged(lambda: ask(server, 3 * LAST)), 503, "cache-full")
            assert time.monotonic() - began < 30
            assert "No space left on device" in problem["detail"]
            assert is_right(once_staged(lambda: ask(server, 0)), local, 0)
        num_said = server.log().count("No space left on device")
        assert 1 <= num_said <= 1 + (time.monotonic() - first) / 60  # it is said again after each minute
        subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
        wait_until(lambda: is_right(ask(server, 3 * LAST), local, 3 * LAST))


@pytest.mark.parametrize("cache_shards", [3, 7])
@pytest.mark.parametrize("how", ["cut", "given up"])
def test_an_extent_that_is_cut_or_given_up_while_it_is_served_is_never_read_as_zeros(
    tmp_path: Path, local: Path, bucket: Bucket, how: str, cache_shards: int
) -> None:
    """Also in the middle of a response, and where the cache holds all extents of the plan."""
    folder = tmp_path / "cache"

    def spoil() -> None:
        cache = Cache(folder, cache_shards * SHARD_BYTES, EXTENT_BYTES)
        for path in (folder / "extents").glob("*/*/tokens"):
            if how == "cut":
                os.truncate(path, 0)
            else:
                with path.open("r+b") as file:
                    file.write(bytes(path.stat().st_size))
                key = path.parent.relative_to(cache.extents).as_posix()
                cache.mark_wrong("o", "0" * 32, [key])

    def wait_for(step: int) -> None:
        wait_until(lambda: is_right(ask(server, step), local, step))

    with start(tmp_path / "a", folder, cache_bytes=cache_shards * SHARD_BYTES) as server:
        for _ in range(3):
            steps = range(0, NUM_SHARDS * SHARD_WINDOWS // NUM_ROWS, 3 if cache_shards == 7 else 200)
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(wait_for, steps))
            assert is_right(once_staged(lambda: ask(server, 0)), local, 0)
            spoil()
            for _ in range(3):
                is_right(ask(server, 0), local, 0)
        wait_until(lambda: is_right(ask(server, 0), local, 0))
