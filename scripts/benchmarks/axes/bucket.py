"""Measure a corpus in a bucket that is far away: 30 ms until it responds, 200 MB/s for all readers together.

64 shards of 512 MiB are read in a bounded shuffle of 8 blocks of 64 MiB by 1, 2 and 4 replicas, each with an
empty cache of its own and a rank of one plan; several also behind the shipped `store-cache.conf`. All ranks
together use half of the bandwidth. The first batch is timed from the request for it, with the server running.
A batch is late if the loop waits for it for more than 0.1 s. Bytes are counted by the bucket, between the
first and the last beginning of a group at which it has nothing to send: then as much is fetched ahead as the
caches have room for. Bytes that are used are those of the rows. A turn ends after 100 s, and whoever stalls
has fewer steps then. Without two such groups all bytes count, those that were fetched ahead, too.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from corpus_client import CorpusLoader, Placement
from corpus_server.plan import Plan, Sampler
from scripts.benchmarks.contest import BEFORE, NOW
from scripts.benchmarks.measure import Rounds
from scripts.benchmarks.report import Options, Report, Target
from scripts.benchmarks.servers import checked_out, serving
from scripts.processes import ROOT
from tests.buckets import NAME, Bucket, Repeated
from tests.docker.proxy import STORE_CACHE

HELP = "a corpus in a far bucket: first batch, stalls, bytes fetched, by 1, 2 and 4 replicas"

SEQ_LEN, ROWS = 2048, 512
WINDOW_BYTES = 2 * SEQ_LEN
FIRST, STALLS, STALLED, LONGEST, PER_BYTE = "first", "stalls", "stalled", "longest", "per_byte"
COLUMNS = {
    FIRST: ("first batch s", ",.2f"),
    STALLS: ("late batches", ",.0f"),
    STALLED: ("stalled s", ",.2f"),
    LONGEST: ("longest s", ",.2f"),
    PER_BYTE: ("bucket bytes / byte used", ",.2f"),
    "steps": ("steps", ",.0f"),
}
SHARED = "one cache"
LATE_SECONDS = 0.1
IDLE_SECONDS = 0.3  # after which a bucket has nothing to send: it waits 30 ms, and nginx asks twice a second
MOST_SECONDS = 100.0  # of a turn
FIRST_SECONDS, BYTES_OF_ONE, BYTES_OF_ALL = 3.0, 1.05, 1.1


@dataclass(frozen=True, kw_only=True)
class _Far:
    """A corpus in a bucket, how it is read, and how far it is."""

    num_shards: int = 64
    shard_windows: int = 2**17  # 512 MiB
    block_windows: int = 2**14
    group_blocks: int = 8
    num_groups: int = 8
    cache_groups: int = 3
    delay_seconds: float = 0.03
    bytes_per_second: float = 200e6
    replicas: tuple[int, ...] = (1, 2, 4)

    @property
    def objects(self) -> dict[str, Repeated]:
        """The shards; each has one token more than its windows."""
        num_tokens = self.shard_windows * SEQ_LEN + 1
        return {f"far/{n:03}.bin": Repeated(num_tokens, n) for n in range(self.num_shards)}

    @property
    def order(self) -> dict[str, Any]:
        """The bounded shuffle of plans."""
        return {"shuffle": {"block_windows": self.block_windows, "group_blocks": self.group_blocks}}

    @property
    def plan(self) -> dict[str, Any]:
        """The document of the plan."""
        stages = [{"global_batch_size": ROWS, "mixture": {"far": 1.0}}]
        return {"seq_len": SEQ_LEN, "order": self.order, "stages": stages}

    def check(self, tokens: np.ndarray, step: int, rank: int, world_size: int) -> None:
        """Raise RuntimeError unless these are the tokens of a rank's step."""
        shards = list(self.objects.values())
        sizes = [len(each) // 2 for each in shards]
        rows = Sampler(Plan.from_json(self.plan), {"far": sizes}).locate(
            step, rank=rank, world_size=world_size
        )
        for row, (shard, start) in zip(tokens, rows.reshape(-1, 2).tolist(), strict=True):
            if not np.array_equal(row, shards[shard].tokens(start, start + SEQ_LEN + 1)):
                raise RuntimeError(f"rank {rank} has other tokens than the bucket at step {step}")

    @property
    def group_steps(self) -> int:
        """Steps of a group."""
        return self.block_windows * self.group_blocks // ROWS

    def cache_bytes(self, tree: Path) -> int:
        """Room for three groups; a server that stages whole shards needs room for those that groups touch."""
        of_block = min(self.block_windows, self.shard_windows) * WINDOW_BYTES + (32 << 20)
        if not (tree / "corpus_server" / "stores" / "extents.py").exists():
            of_block = 2 * (self.shard_windows * WINDOW_BYTES + 2)
        return self.cache_groups * self.group_blocks * of_block


QUICK = _Far(
    num_shards=4, shard_windows=2**11, block_windows=2**9, num_groups=4, delay_seconds=0.0, replicas=(1, 2)
)  # fmt: skip


def measure(options: Options) -> Report:
    """Measure every number of replicas, of this tree and of the commit before."""
    far = QUICK if options.quick else _Far()
    rounds = Rounds(f"{far.num_shards} shards, {far.bytes_per_second / 1e6:.0f} MB/s", COLUMNS)
    with ExitStack() as stack:
        trees = {NOW: ROOT}
        if options.before is not None:
            trees[BEFORE] = stack.enter_context(checked_out(options.before))
        bucket = stack.enter_context(Bucket(objects=dict(far.objects), delay_seconds=far.delay_seconds))
        bucket.bytes_per_second = far.bytes_per_second
        stack.enter_context(_environment(bucket.environment))
        for _ in range(options.rounds):
            for num_replicas in options.chosen([str(each) for each in far.replicas]):
                for name, tree in trees.items():
                    figures = _train(far, bucket, int(num_replicas), tree)
                    print(f"{name}, {num_replicas} replicas: {figures}", file=sys.stderr)
                    rounds.add(f"{name}, {num_replicas} replicas", figures)
                if int(num_replicas) > 1 and STORE_CACHE.find() is not None:
                    with (
                        STORE_CACHE.before_store(bucket.url) as cache,
                        _environment({"AWS_PROXY_URL": cache}),
                    ):
                        figures = _train(far, bucket, int(num_replicas), ROOT)
                    rounds.add(f"{NOW}, {num_replicas} replicas, {SHARED}", figures)
                    print(f"{NOW}, {num_replicas} replicas, {SHARED}: {figures}", file=sys.stderr)
    return Report(data=rounds.summary(), tables=[rounds.table()], targets=_targets(rounds))


def _targets(rounds: Rounds) -> list[Target]:
    found = []
    for name in (each for each in rounds.values if each.startswith(NOW)):
        most = BYTES_OF_ONE if name.startswith(f"{NOW}, 1 ") else BYTES_OF_ALL
        found.append(rounds.target(name, FIRST, "at most", FIRST_SECONDS))
        found.append(rounds.target(name, STALLS, "at most", 0))
        found.append(rounds.target(name, PER_BYTE, "at most", most))
    return found


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Mark(NamedTuple):
    """The bytes that the bucket had sent when a rank began a group, and whether it was idle."""

    num_bytes: int
    is_idle: bool


@dataclass
class _Rank:
    """What a rank waited for, and what it saw when it began each group."""

    waits: list[float] = field(default_factory=list)
    marks: list[_Mark] = field(default_factory=list)
    failure: BaseException | None = None


def _train(far: _Far, bucket: Bucket, num_replicas: int, tree: Path) -> dict[str, float]:
    """Train with a rank for each replica, whose caches are empty."""
    cache_bytes = str(far.cache_bytes(tree))
    with tempfile.TemporaryDirectory(prefix="bench-caches-") as folder, ExitStack() as stack:
        urls = []
        for number in range(num_replicas):
            arguments = ("--cache-dir", f"{folder}/{number}", "--cache-bytes", cache_bytes, "--workers", "1")
            corpus = {"far": f"s3://{NAME}/far"}
            urls.append(stack.enter_context(serving(corpus, arguments=arguments, tree=tree)).url)
        ranks = [_Rank() for _ in urls]
        threads = [
            threading.Thread(target=_loop, args=(far, bucket, url, number, num_replicas, ranks[number]))
            for number, url in enumerate(urls)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for each in ranks:
        if each.failure is not None:
            raise each.failure
    return _figures(far, ranks)


def _figures(far: _Far, ranks: list[_Rank]) -> dict[str, float]:
    later = np.concatenate([each.waits[1:] for each in ranks])
    late = later[later > LATE_SECONDS]
    figures = {
        FIRST: max(each.waits[0] for each in ranks),
        STALLS: float(late.size),
        STALLED: max(sum(wait for wait in each.waits[1:] if wait > LATE_SECONDS) for each in ranks),
        LONGEST: float(later.max()),
        "steps": float(min(len(each.waits) for each in ranks)),
    }
    marks = ranks[0].marks
    idle = [number for number, mark in enumerate(marks) if mark.is_idle and number > 0]
    first, last = (idle[0], idle[-1]) if len(idle) > 1 else (0, len(marks) - 1)
    used = (last - first) * far.group_steps * ROWS * WINDOW_BYTES
    figures[PER_BYTE] = (marks[last].num_bytes - marks[first].num_bytes) / used if used else math.inf
    return figures


def _loop(far: _Far, bucket: Bucket, url: str, number: int, world_size: int, rank: _Rank) -> None:
    try:
        _take(far, bucket, url, number, world_size, rank)
    except BaseException as error:  # noqa: BLE001 - raised by whoever started the thread
        rank.failure = error


def _take(far: _Far, bucket: Bucket, url: str, number: int, world_size: int, rank: _Rank) -> None:
    period = 2 * ROWS * WINDOW_BYTES / far.bytes_per_second  # half of the bandwidth
    began = time.monotonic()
    placement = Placement(rank=number, world_size=world_size)
    with CorpusLoader(url, plan=far.plan, device="cpu", dtype=None, placement=placement) as loader:
        for step in range(far.num_groups * far.group_steps + 1):
            if step % far.group_steps == 0:
                rank.marks.append(_Mark(bucket.num_bytes, bucket.idle_seconds > IDLE_SECONDS))
            asked = time.monotonic()
            batch = next(loader)
            rank.waits.append(time.monotonic() - asked)
            if time.monotonic() - began > MOST_SECONDS:
                break
            time.sleep(period)
        far.check(batch.tokens.numpy(), step, number, world_size)
