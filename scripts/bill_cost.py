"""Measure bills of materials: time, size, proofs and their verification, for a run of many steps.

    python -m scripts.bill_cost --folder DIR [--steps 1000000] [--batch 8] [--seq-len 128]

The corpus has random tokens: what they are costs nothing. All commands read it by its path, so they start a
server of this machine. CPU is that of the command; the server, which is shared and ends later, is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

NUM_TOKENS = 50_000_000


def run(*words: object) -> tuple[float, float, str]:
    """Run a command of corpus-client; return seconds, its seconds of CPU, and what it printed."""
    began, before = time.monotonic(), os.times()
    command = [sys.executable, "-m", "corpus_client", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, after = time.monotonic() - began, os.times()
    if done.returncode:
        raise SystemExit(done.stderr)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, cpu, done.stdout


def main() -> None:
    """Measure, and print what a dated result says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    options = parser.parse_args()
    folder, steps = options.folder, options.steps
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS).astype(np.uint16)
    tokens.tofile(folder / "web.bin")
    stage = {"from_step": 0, "global_batch_size": options.batch, "mixture": {"web": 1}}
    (folder / "plan.json").write_text(json.dumps({"seq_len": options.seq_len, "seed": 1, "stages": [stage]}))
    bill, proof = folder / "bill.json", folder / "proof.json"
    for path in (bill, proof):
        path.unlink(missing_ok=True)
    web = f"web={folder / 'web.bin'}"
    seconds, cpu, said = run("bill", web, "--plan", folder / "plan.json", "--stop", steps, "--out", bill)
    print(said.strip())
    rate = steps * options.batch * options.seq_len / seconds / 1e6
    print(f"bill: {seconds:.1f} s, {cpu:.1f} s of CPU, {steps / seconds:,.0f} steps/s, {rate:.1f} M tokens/s")
    leaves = Path(f"{bill}.leaves").stat().st_size
    print(f"size: {bill.stat().st_size:,} bytes, leaves {leaves:,} bytes")
    seconds, cpu, said = run("prove", bill, "--step", steps * 7 // 10, "--out", proof)
    print(
        f"prove: {seconds:.2f} s, {cpu:.2f} s of CPU, {said.split()[0]} hashes, "
        f"{proof.stat().st_size:,} bytes"
    )
    for _ in range(3):
        seconds, cpu, _ = run("verify-bill", bill, web, "--proof", proof)
        print(f"verify-bill --proof: {seconds:.2f} s, {cpu:.2f} s of CPU")
    seconds, cpu, _ = run("verify-bill", bill, web)
    print(f"verify-bill of all steps: {seconds:.1f} s, {cpu:.1f} s of CPU")


if __name__ == "__main__":
    main()
