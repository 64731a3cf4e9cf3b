"""Train over a bucket of which the cache holds a fifth: nothing waits, nothing is seen twice.

Fills a bucket with shards, serves it with room for 20 % of them, and takes an epoch of a bounded shuffle at a
stated pace. In the middle the server is killed and restarted. Reports the first batch's time and every later
wait, checks that each window came exactly once with the right tokens, and that full shuffle is refused with
the arithmetic.

The store is that of --store and of the variables of docs/stores.md, for example a Ceph gateway (radosgw):

    AWS_ENDPOINT_URL=http://127.0.0.1:7480 AWS_ALLOW_HTTP=true AWS_REGION=default \
    AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... scripts/stage_from_store --store s3://corpus-test

An S3 bucket is made if it is missing; others must exist. Without --store it starts moto's S3 server on this
machine.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import obstore.store

from corpus_client import CorpusLoader, Staging
from scripts.processes import ROOT, claim_port, is_ready, running

SEQ_LEN = 256
CACHE_SHARE = 5  # the cache holds a fifth
LATE_SECONDS = 0.5
VOCABULARY = 50_000

MOTO = (
    "import sys; from moto.server import ThreadedMotoServer as S; s = S('127.0.0.1', 0, verbose=False); "
    "s.start(); print(s.get_host_and_port()[1], flush=True); sys.stdin.read()"
)


def main() -> None:
    """Run the scenario and print what it saw; exit 1 if something is not as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", metavar="URL", help="s3://, gs:// or az://; what is put there stays")
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--shard-tokens", type=int, default=262_400, help="default: 1,024 windows")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps-per-second", type=float, default=40.0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.store is None:
            stack.enter_context(_moto())
            options.store = "s3://corpus-scenario"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = _run(options, folder)
    print(json.dumps(report, indent=2))
    sys.exit(0 if report["ok"] else 1)


def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shard_bytes = 2 * options.shard_tokens
    shard_windows = (options.shard_tokens - SEQ_LEN - 1) // SEQ_LEN + 1
    group = max(1, options.shards // CACHE_SHARE // 2)
    cache_bytes = options.shards * shard_bytes // CACHE_SHARE
    _fill(options)
    mixture = {"web": 1.0}
    stages = [{"global_batch_size": options.rows, "mixture": mixture}]
    order = {"shuffle": {"block_windows": shard_windows, "group_blocks": group}}
    plan = {"seq_len": SEQ_LEN, "order": order, "seed": 11, "stages": stages}
    steps = options.shards * shard_windows // options.rows
    seen = np.zeros(options.shards * shard_windows, dtype=np.int64)
    waits: list[float] = []
    staging = Staging(prefetch_bytes=min(64 << 20, shard_bytes))
    port = claim_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        process = server.enter_context(_server(options, folder, port, cache_bytes))
        refusal = _refusal(url, {**plan, "order": "shuffle"})
        began = time.monotonic()
        loader = stack.enter_context(CorpusLoader(url, plan=plan, device="cpu", dtype=None, staging=staging))
        batches = iter(loader)
        due = restart_seconds = 0.0
        for step in range(steps):
            time.sleep(max(0.0, due - time.monotonic()))
            asked = time.monotonic()
            batch = next(batches)
            waits.append(time.monotonic() - asked)
            due = max(due, asked) + 1 / options.steps_per_second if step else time.monotonic()
            _count(seen, batch.inputs.numpy(), shard_windows, options.shard_tokens)
            if step == steps // 2:
                killed = time.monotonic()
                os.killpg(process.pid, signal.SIGKILL)
                server.close()
                process = server.enter_context(_server(options, folder, port, cache_bytes))
                restart_seconds = time.monotonic() - killed  # the loop stands still, so it counts for no pace
        seconds = time.monotonic() - began - restart_seconds
        held = sum(path.stat().st_size for path in (folder / "cache" / "shards").glob("*/*"))
    late = {step: round(wait, 3) for step, wait in enumerate(waits) if step and wait > LATE_SECONDS}
    restart = {
        step: wait for step, wait in late.items() if abs(step - steps // 2) < 2 * options.steps_per_second
    }
    missed = steps * options.rows - int((seen == 1).sum())
    return {
        "shards": options.shards,
        "shard_bytes": shard_bytes,
        "cache_bytes": cache_bytes,
        "cache_held_bytes": held,
        "group_shards": group,
        "steps": steps,
        "steps_per_second_wanted": options.steps_per_second,
        "steps_per_second": round(steps / seconds, 1),
        "megabytes_per_second": round(steps * options.rows * SEQ_LEN * 2 / seconds / 1e6, 1),
        "restart_seconds": round(restart_seconds, 1),
        "first_batch_seconds": round(waits[0], 2),
        "longest_later_wait_seconds": max(
            (w for s, w in enumerate(waits) if s and s not in restart), default=0
        ),
        "late_steps": late,
        "of_these_at_the_restart": restart,
        "windows_missed_or_repeated": missed,
        "full_shuffle": refusal,
        "ok": not missed
        and len(late) == len(restart)
        and "cache-too-small" in refusal
        and held <= cache_bytes,
    }


@functools.lru_cache(maxsize=64)
def _shard(number: int, num_tokens: int) -> np.ndarray:
    """Return a shard whose every window of `SEQ_LEN` tells its number by its first two tokens."""
    tokens = np.random.default_rng(number).integers(0, VOCABULARY, num_tokens, dtype=np.uint16)
    windows = (num_tokens - SEQ_LEN - 1) // SEQ_LEN + 1
    tokens[: windows * SEQ_LEN : SEQ_LEN] = number
    tokens[1 : windows * SEQ_LEN : SEQ_LEN] = np.arange(windows)
    return tokens


def _count(seen: np.ndarray, inputs: np.ndarray, shard_windows: int, shard_tokens: int) -> None:
    """Count the windows of a batch, after a look at their other tokens."""
    numbers = inputs[:, 0].astype(np.int64) * shard_windows + inputs[:, 1]
    np.add.at(seen, numbers, 1)
    shard, window = int(inputs[0, 0]), int(inputs[0, 1])
    expected = _shard(shard, shard_tokens)[window * SEQ_LEN : (window + 1) * SEQ_LEN]
    if not np.array_equal(inputs[0], expected):
        raise SystemExit(f"window {window} of shard {shard} has wrong tokens")


def _fill(options: argparse.Namespace) -> None:
    if options.store.startswith("s3://"):
        boto3: Any = importlib.import_module("boto3")  # has no types
        client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
        try:
            client.create_bucket(Bucket=options.store.removeprefix("s3://"))
        except client.exceptions.ClientError as error:
            if "BucketAlready" not in str(error):
                raise
    store = obstore.store.from_url(options.store)
    for number in range(options.shards):
        body = _shard(number, options.shard_tokens).tobytes()
        # In one part: then S3's ETag is an MD5, which staging checks.
        obstore.put(store, f"web/{number:05}.bin", body, use_multipart=False)


@contextmanager
def _server(
    options: argparse.Namespace, folder: Path, port: int, cache_bytes: int
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "corpus_server", "serve", f"web={options.store}/web"),
        *("--port", str(port), "--workers", str(options.workers), "--state-dir", str(folder / "state")),
        *("--cache-dir", str(folder / "cache"), "--cache-bytes", str(cache_bytes)),
    ]
    url = f"http://127.0.0.1:{port}"
    with running(command, ready=lambda: is_ready(url), log=folder / "server.log") as process:
        yield process


def _refusal(url: str, plan: dict[str, Any]) -> str:
    """Return what the server says to full shuffle."""
    request = urllib.request.Request(f"{url}/v1/plans", json.dumps(plan).encode(), method="POST")
    with urllib.request.urlopen(request) as answer:
        plan_id = json.load(answer)["id"]
    try:
        with urllib.request.urlopen(f"{url}/v1/batches?plan={plan_id}&step=0"):
            return "it was answered"
    except urllib.error.HTTPError as error:
        problem = json.load(error)
        return f"{problem['type']}: {problem['detail']}; {problem.get('remedy')}"


@contextmanager
def _moto() -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        line = b""
        while not line.strip().isdigit():
            line = process.stdout.readline()
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{int(line)}",
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",
            AWS_DEFAULT_REGION="us-east-1",
            AWS_REGION="us-east-1",
            AWS_ALLOW_HTTP="true",
        )
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
