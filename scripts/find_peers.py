"""Measure `corpus-server find` beside infini-gram (Liu et al. 2024), a suffix array on disk.

    pip install infini-gram
    python -m scripts.find_peers --folder DIR [--tokens 1000000000] [--items 10000] [--mem 2]

Both read what `scripts.find_cost` makes, first if it is not there. 10^9 tokens need about 16 GB of disk.
Index: its own programs on the tokens of the corpus, with time, the most memory and the bytes that stay.
Query: each n-gram of the first items is counted, as `corpus-server find` looks for each; infini-gram stops
there, and says neither spans nor documents.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from scripts import find_cost

N, EOT, TOKEN_BYTES, HACK = 13, 0, 2, 100_000


def tokenized(folder: Path, index: Path) -> int:
    """Write the tokens as infini-gram has them: documents begin with 65,535; return the bytes."""
    shutil.rmtree(index, ignore_errors=True)
    index.mkdir()
    starts = []
    with (index / "tokenized.0").open("wb") as file:
        for path in sorted((folder / "web").glob("*.bin")):
            tokens = np.fromfile(path, np.uint16)
            ends = np.flatnonzero(tokens == EOT)
            for document in np.split(tokens, ends + 1):
                if document.size:
                    starts.append(file.tell())
                    file.write(b"\xff\xff")
                    document.tofile(file)
    np.array(starts, np.uint64).tofile(index / "offset.0")
    return (index / "tokenized.0").stat().st_size


def build(index: Path, size: int, *, mem_gib: int, cpus: int) -> None:
    """Make the suffix array, in parts that fit into memory."""
    spec = find_spec("infini_gram")
    if spec is None or spec.origin is None:
        raise SystemExit("infini-gram is not installed: pip install infini-gram")
    program = Path(spec.origin).with_name("rust_indexing")
    ratio = int(np.ceil(np.log2(size) / 8))
    batches = 1
    while batches * (mem_gib * 2**30 // 8) < size:
        batches *= 2
    jobs = batches * cpus
    part = -(-(size // jobs) // TOKEN_BYTES) * TOKEN_BYTES
    parts, merged = index / "parts", index / "merged"
    parts.mkdir()
    merged.mkdir()
    given = [
        "--data-file",
        str(index / "tokenized.0"),
        "--ratio",
        str(ratio),
        "--token-width",
        str(TOKEN_BYTES),
    ]

    def start(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([str(program), *words, *given], stdout=subprocess.DEVNULL)

    def finish(process: subprocess.Popen[bytes]) -> None:
        if process.wait():
            raise SystemExit(f"{program.name} ended with {process.returncode}")

    for first in range(0, jobs, cpus):
        running = []
        for job in range(first, min(first + cpus, jobs)):
            ends = ("--start-byte", str(job * part), "--end-byte", str(min((job + 1) * part + HACK, size)))
            running.append(start("make-part", "--parts-dir", str(parts), *ends))
        for process in running:
            finish(process)
    threads = ("--num-threads", str(cpus))
    folders = ("--parts-dir", str(parts), "--merged-dir", str(merged))
    finish(start("merge", *folders, "--hacksize", str(HACK), *threads))
    shutil.rmtree(parts)
    finish(start("concat", "--merged-dir", str(merged), "--merged-file", str(index / "table.0"), *threads))
    shutil.rmtree(merged)


def query(index: Path, folder: Path, num_items: int) -> tuple[int, int]:
    """Count each n-gram of some items; return how many there are, and how many of them are in the corpus."""
    engine = import_module("infini_gram.engine").InfiniGramEngine(
        index_dir=str(index), eos_token_id=EOT, vocab_size=65_535, version=4, token_dtype="u16"
    )
    num_grams = num_found = 0
    with (folder / "items.jsonl").open() as lines:
        for _, line in zip(range(num_items), lines, strict=False):
            ids = json.loads(line)["ids"]
            for at in range(len(ids) - N + 1):
                num_grams += 1
                num_found += engine.count(input_ids=ids[at : at + N])["count"] > 0
    return num_grams, num_found


def main() -> None:
    """Measure, and print what a dated result says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10**9, help="of the corpus, if it is to be made")
    parser.add_argument("--items", type=int, default=10**4, help="of 100,000, that infini-gram is asked for")
    parser.add_argument("--mem", type=int, default=2, help="GiB for the index")
    parser.add_argument("--cpus", type=int, default=2)
    options = parser.parse_args()
    if not (options.folder / "planted.npy").exists():
        find_cost.make(options.folder, options.tokens, 10**5)
    seconds, cpu, memory, report = find_cost.run(options.folder, options.cpus)
    print(
        f"find, all items: {seconds:.1f} s, {cpu:.1f} s of CPU, {memory:,.0f} MiB: {report['corpora']}",
        flush=True,
    )
    index = options.folder / "infini-gram"
    size = tokenized(options.folder, index)
    began, before = time.monotonic(), os.times()
    build(index, size, mem_gib=options.mem, cpus=options.cpus)
    seconds, after = time.monotonic() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    kept = sum(each.stat().st_size for each in index.iterdir())
    tokens = size // TOKEN_BYTES
    print(
        f"index of {tokens:,} tokens: {seconds:.1f} s, {cpu:.1f} s of CPU, {kept / 1e9:.2f} GB, "
        f"largest process {most:,.0f} MiB"
    )
    began, cpu_before = time.monotonic(), time.process_time()
    num_grams, num_found = query(index, options.folder, options.items)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu_before
    told = f"{num_grams:,} n-grams of {options.items:,} items, {num_found:,} in the corpus"
    print(f"query: {told}: {seconds:.1f} s, {cpu:.1f} s of CPU, {1e6 * cpu / num_grams:.1f} us each")


if __name__ == "__main__":
    main()
