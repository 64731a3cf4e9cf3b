"""A bucket fails in nine ways under a loop; its server is killed, and the cache's disk is full for 3 s."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from corpus_client import CorpusLoader, Staging
from corpus_server.stores.staged import END_BYTES
from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import fill, small_disk
from tests import stores
from tests.buckets import NAME, Bucket
from tests.corpora import some_tokens
from tests.serving import RunningServer, command
from tests.stores import Reply

ROWS = (17,)
COUNT = "10,000 steps over 60 shards of 5 extents; 3 kills, a full disk of 3 s, a fault for 6 % of the ranges"
SECONDS = 80
ORACLE = "the objects in the bucket"
RULE = "no wrong token, no error, no wait above 60 s, no traceback; fewer lines in the log than faults"

EXTENT_BYTES = 65_536  # five of a shard
NUM_STEPS, NUM_ROWS, SEQ_LEN = 10_000, 8, 64
SHARD_WINDOWS, NUM_SHARDS = 2048, 60
SHARD_BYTES = 2 * (SHARD_WINDOWS * SEQ_LEN + 1)
FAULTS: tuple[Callable[[Reply], None], ...] = (
    *(stores.unavailable, stores.broken, stores.cut, stores.short, stores.flipped, stores.whole),
    *(stores.changed, stores.shifted, stores.after(2.0)),
)
KILLS, FULL_AT, FULL_SECONDS = (2000, 4500, 8000), 6000, 3.0
LONGEST_SECONDS = 60.0


class _Faults:
    """Spoils 6 % of the ranges of shards, each in one way that a seed chooses."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._lock = threading.Lock()
        self.num_met = 0

    def __call__(self, path: str, reply: Reply) -> None:
        if not path.endswith(".bin") or len(reply.body) <= END_BYTES:
            return  # the ends of a shard, which a server reads when it starts
        with self._lock:
            is_met = self._random.random() < 0.06
            change = self._random.choice(FAULTS)
            self.num_met += is_met
        if is_met:
            change(reply)


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    tokens = [some_tokens(SHARD_BYTES // 2, seed=number) for number in range(NUM_SHARDS)]
    web = folder / "local" / "web"
    web.mkdir(parents=True)
    for number, each in enumerate(tokens):
        each.tofile(web / f"{number:02}.bin")
    # Hashes of blocks find a bit that changed in one of several extents.
    subprocess.run(command("verify", web, "--record"), check=True, stdout=subprocess.DEVNULL)
    objects = {f"web/{name}": content for name, content in stores.contents(web).items()}
    faults, waits, num_wrong = _Faults(), list[float](), 0
    # Room for 16 shards in the cache, and for 20 on its disk.
    with (
        small_disk(folder / "disk", f"{20 * SHARD_BYTES >> 10}k") as disk,
        Bucket(objects=dict(objects)) as bucket,
    ):
        os.environ.update(bucket.environment)
        options = {"cache-dir": disk / "cache", "cache-bytes": 16 * SHARD_BYTES, "extent-bytes": EXTENT_BYTES}
        arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        with RunningServer({"web": f"s3://{NAME}/web"}, folder, arguments=arguments) as server:
            bucket.fault = faults
            work: dict[int, Callable[[], object]] = dict.fromkeys(KILLS, server.restart)
            work[FULL_AT] = partial(_fill_for_a_while, disk)
            plan = {
                "seq_len": SEQ_LEN,
                "order": "sequential",
                "stages": [{"global_batch_size": NUM_ROWS, "mixture": {"web": 1.0}}],
            }
            staging = Staging(prefetch_bytes=20_000)
            with CorpusLoader(server.url, plan=plan, device="cpu", dtype=None, staging=staging) as loader:
                for step in range(NUM_STEPS):
                    if step in work:
                        work[step]()
                    began = time.monotonic()
                    batch = next(loader)
                    waits.append(time.monotonic() - began)
                    num_wrong += not np.array_equal(batch.tokens.numpy(), _right(tokens, step))
                stats = loader.stats()
            log = server.log()
    found.figure("batches", len(waits), least=NUM_STEPS)
    found.figure("wrong", num_wrong, most=0)
    found.figure("faults of the bucket", faults.num_met, least=10)
    found.figure("longest wait, s", max(waits), most=LONGEST_SECONDS)
    found.figure("waits for the bucket, s", stats.wait.bucket)
    found.figure("lines about shards", log.count("was not staged"), most=faults.num_met + 2)
    found.expect("Traceback" not in log, "the server's log has a traceback")


def _right(tokens: list[np.ndarray], step: int) -> np.ndarray:
    """Return the tokens of a step, `(NUM_ROWS, SEQ_LEN + 1)`, which lie in one shard."""
    shard, window = divmod(step * NUM_ROWS, SHARD_WINDOWS)
    starts = np.arange(window, window + NUM_ROWS) * SEQ_LEN
    return np.asarray(tokens[shard % NUM_SHARDS][starts[:, None] + np.arange(SEQ_LEN + 1)])


def _fill_for_a_while(disk: Path) -> None:
    filler = fill(disk)
    threading.Timer(FULL_SECONDS, filler.unlink).start()
