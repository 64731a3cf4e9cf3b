"""Measure staging from an object store beside obstore's plain parallel download of the same ranges.

The limit fetches the same ranges with the same number of threads and writes them to files of the same disk,
unchecked. Staging compares versions and sizes, and publishes each shard. Neither waits for the disk. Both
begin with the same memory: a virtual machine may have given the pages of the page cache back to its host. An
object that was put in one part also has its MD5 checked, which takes a core for each 650 MB/s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.readers import Registry, Stager
from corpus_server.stores import StagedFile
from corpus_server.stores.download import RANGE_BYTES, RANGES_AT_ONCE
from scripts.benchmarks import disk
from scripts.benchmarks.measure import Rounds
from scripts.benchmarks.object_server import PARTS
from scripts.benchmarks.report import Options, Report
from scripts.processes import running

HELP = "staging from an object store beside a plain parallel download"

NUM_SHARDS, SHARD_BYTES = 16, 64 << 20
QUICK_SHARDS, QUICK_BYTES = 3, 1 << 20
OURS, WITH_MD5, LIMIT = "staging", "staging, with MD5", "obstore, parallel ranges"
OF_LIMIT = 0.8
RATE = "megabytes_per_second"
WAIT_SECONDS = 600.0


def measure(options: Options) -> Report:
    """Stage all shards of a bucket and download them plainly, in turn."""
    number, size = (QUICK_SHARDS, QUICK_BYTES) if options.quick else (NUM_SHARDS, SHARD_BYTES)
    folder = _shards(options.cache, number, size)
    rounds = Rounds(f"{number} shards of {size >> 20} MiB", {RATE: ("MB/s", ",.0f")})
    target = options.cache / "staged"
    with _bucket(folder):
        for turn in range(options.rounds):
            contenders: dict[str, Callable[[Path], float]] = {
                OURS: partial(_stage, PARTS),
                WITH_MD5: partial(_stage, "whole"),
                LIMIT: _download,
            }
            for name in list(contenders)[:: -1 if turn % 2 else 1]:
                shutil.rmtree(target, ignore_errors=True)
                os.sync()  # what the one before has written must not be flushed at this one's cost
                seconds = contenders[name](target)
                rounds.add(name, {RATE: number * size / 1e6 / seconds})
    shutil.rmtree(target)
    return Report(
        data=rounds.summary(),
        tables=[rounds.table(), rounds.ratio_table([(OURS, LIMIT), (WITH_MD5, LIMIT)])],
        targets=[rounds.target(OURS, RATE, "at least", OF_LIMIT, to=LIMIT)],
    )


def _stage(bucket: str, target: Path) -> float:
    with Catalog.open([CorpusSpec.parse(f"web=s3://{bucket}")], cache_dir=target) as catalog:
        files = {each.file for each in catalog.corpus("web").shards if isinstance(each.file, StagedFile)}
        with Stager(Registry(), catalog.cache) as stager:
            _warm_memory(each.size_bytes for each in files)
            began = time.perf_counter()
            while (waiting := stager.want(files, time.monotonic() + WAIT_SECONDS)) is not None:
                waiting.result()
            return time.perf_counter() - began


def _download(target: Path) -> float:
    import obstore  # not where the axes are listed: it is an extra
    from obstore.store import S3Store

    store = S3Store(PARTS)
    target.mkdir()
    listed = [each for batch in obstore.list(store) for each in batch]

    def fetch(path: str, start: int, stop: int) -> None:
        content = obstore.get_range(store, path, start=start, end=stop)
        with (target / path).open("r+b") as file:
            os.pwrite(file.fileno(), content, start)

    with ThreadPoolExecutor(RANGES_AT_ONCE) as threads:
        _warm_memory(each["size"] for each in listed)
        began = time.perf_counter()
        jobs = []
        for each in listed:
            path, size = each["path"], each["size"]
            with (target / path).open("wb") as file:
                file.truncate(size)
            jobs += [
                threads.submit(fetch, path, start, min(start + RANGE_BYTES, size))
                for start in range(0, size, RANGE_BYTES)
            ]
        for job in jobs:
            job.result()
        return time.perf_counter() - began


def _warm_memory(sizes: Iterable[int]) -> None:
    disk.warm_memory(3 * sum(sizes) // 2)  # the shards in the page cache, and ranges on their way


@contextmanager
def _bucket(folder: Path) -> Iterator[None]:
    """Serve a folder as a bucket; obstore finds it by the environment."""
    command = [sys.executable, "-m", "scripts.benchmarks.object_server", str(folder)]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        given = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(process.stdout.readline())}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _shards(cache: Path, number: int, size: int) -> Path:
    """Return a folder of random shards, made once and read into the page cache."""
    folder = cache / f"objects_{number}x{size}"
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(number):
        path = folder / f"{shard:06}.bin"
        if not path.exists():
            path.write_bytes(np.random.default_rng(shard).bytes(size))
        path.read_bytes()
    return folder
