"""The shipped cache between servers and a store, run by a real nginx: each range is fetched once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import stores
from tests.buckets import NAME, Bucket
from tests.corpora import some_tokens
from tests.docker.proxy import STORE_CACHE
from tests.serving import Response, RunningServer, wait_until
from tests.stores import Faults, once_staged

pytest.importorskip("obstore")
pytestmark = pytest.mark.skipif(STORE_CACHE.find() is None, reason="nginx is not installed here")

NUM_SHARDS, SHARD_TOKENS = 6, 1_000_000
SHARDS = {f"web/{n:03}.bin": some_tokens(SHARD_TOKENS, seed=n).tobytes() for n in range(NUM_SHARDS)}
STEPS = range(0, NUM_SHARDS * SHARD_TOKENS // 100 // 8, 500)


@dataclass
class Cluster:
    """A bucket, the cache in front of it, and servers that know only the cache."""

    bucket: Bucket
    stack: ExitStack
    folder: Path

    def server(self, name: str) -> RunningServer:
        (self.folder / name).mkdir()
        arguments = ("--cache-dir", str(self.folder / name / "cache"))
        server = RunningServer({"web": f"s3://{NAME}/web"}, self.folder / name, arguments=arguments)
        return self.stack.enter_context(server)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with ExitStack() as stack:
        bucket = stack.enter_context(Bucket(objects=dict(SHARDS)))
        cache = stack.enter_context(STORE_CACHE.before_store(bucket.url))
        for name, value in (bucket.environment | {"AWS_PROXY_URL": cache}).items():
            monkeypatch.setenv(name, value)
        yield Cluster(bucket, stack, tmp_path)


def ask(server: RunningServer, step: int) -> Response:
    query = {"corpus": "web", "seq_len": 100, "batch_size": 8, "order": "sequential", "step": step}
    return once_staged(lambda: server.get("/v1/batches", **query))


def expected(step: int) -> bytes:
    """Step of a plan whose shards have 9,999 windows each."""
    rows = []
    for row in range(8 * step, 8 * step + 8):
        shard, window = divmod(row, (SHARD_TOKENS - 1) // 100)
        start = 2 * 100 * window
        rows.append(SHARDS[f"web/{shard:03}.bin"][start : start + 2 * 101])
    return b"".join(rows)


def test_signed_requests_pass_and_four_servers_fetch_what_one_does(cluster: Cluster) -> None:
    """The bucket checks signatures; without the cache it would send four times the corpus."""
    for name in ("first", "second", "third", "fourth"):
        server = cluster.server(name)
        for step in STEPS:
            response = ask(server, step)
            assert (response.status, response.body) == (200, expected(step))
    num_bytes = sum(map(len, SHARDS.values()))
    assert num_bytes < cluster.bucket.num_bytes < 1.1 * num_bytes


def test_a_replaced_object_is_another_version_in_the_cache_too(cluster: Cluster) -> None:
    old = cluster.server("old")
    assert ask(old, 0).body == expected(0)
    cluster.bucket.objects["web/000.bin"] = SHARDS["web/001.bin"]
    new = cluster.server("new")
    assert ask(new, 0).body == SHARDS["web/001.bin"][: 2 * 101] + ask(new, 0).body[2 * 101 :]
    assert ask(new, 0).body != expected(0)
    assert ask(old, 0).body == expected(0)


@pytest.mark.parametrize("name", ["unavailable", "cut", "short", "whole", "changed"])
def test_what_went_wrong_once_is_not_kept(cluster: Cluster, name: str) -> None:
    """A range that is cut or wrong is asked for again, by the server or when its client comes again."""
    server = cluster.server("first")
    faults = Faults(getattr(stores, name), most=1)
    # The first shard as a whole: a fingerprint is computed besides, of samples of 4 KiB.
    is_met = lambda path, reply: "000" in path and len(reply.body) > SHARD_TOKENS  # noqa: E731
    cluster.bucket.fault = lambda path, reply: faults(path, reply) if is_met(path, reply) else None
    wait_until(lambda: ask(server, 0).status == 200, "what went wrong is still in the cache")
    assert faults.num_met == 1
    assert ask(server, 0).body == expected(0)
