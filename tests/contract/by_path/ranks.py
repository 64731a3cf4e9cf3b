"""Ranks that train from a path: `python -m tests.contract.by_path.ranks SOURCE WORLD_SIZE`, told by stdin.

`start RANK STEP STOP FILE` forks a rank, which appends a line for each batch to FILE: the step and the digest
of its tokens. This process has imported torch, so a start costs 20 ms and not seconds. It prints
`started RANK PID` and `ended PID CODE`, adopts what its children leave behind, and ends when stdin does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time

import torch
import xxhash

from corpus_client import CorpusLoader, Placement, Staging

SEQ_LEN, GLOBAL_BATCH_SIZE = 16, 1200
PLAN = {"seq_len": SEQ_LEN, "global_batch_size": GLOBAL_BATCH_SIZE, "seed": 7}
PAUSE_SECONDS = 0.004

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def train(source: str, place: Placement, start: int, stop: int, file: str) -> None:
    """Write a line for each step."""
    staging = Staging(prefetch_bytes=1 << 17)
    with (
        open(file, "a", buffering=1) as lines,  # noqa: PTH123
        CorpusLoader(
            json.loads(source),
            **PLAN,
            dtype=None,
            device="cpu",
            num_steps=stop,
            placement=place,
            staging=staging,
        ) as loader,
    ):
        loader.seek(start)
        for batch in loader:
            lines.write(f"{batch.step} {xxhash.xxh3_64_hexdigest(batch.tokens.numpy())}\n")
            time.sleep(PAUSE_SECONDS)


def reap() -> None:
    """Say how each child ended, those of ended children included."""
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            time.sleep(0.01)
        else:
            print("ended", pid, os.waitstatus_to_exitcode(status), flush=True)


def main(source: str, world_size: int) -> None:
    """Fork ranks as standard input says."""
    for line in sys.stdin:
        _, rank, start, stop, file = line.split()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                train(source, Placement(rank=int(rank), world_size=world_size), int(start), int(stop), file)
                code = 0
            finally:
                sys.stderr.flush()
                if code:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
        print("started", rank, pid, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    threading.Thread(target=reap, daemon=True).start()
    main(sys.argv[1], int(sys.argv[2]))
