"""Measure the time from nothing to the first batch, by the size of the corpus.

    python -m scripts.first_batch [--rounds 5] [--most 13] [--most-indexed 10]

A loader by path (`CorpusLoader(PATH)`, which starts its server) beside Megatron-Core's `GPTDataset` over the
same number of tokens, which builds its indexes of documents, samples and order first, for one epoch of
samples of 1,024 tokens in documents of 1,000. `pip install --no-deps megatron-core==0.16.1`; where it is
missing its column is left out. Imports do not count for either. The files are sparse, shards of 10^9 tokens:
what a disk takes to read the first rows is in neither.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHARD_TOKENS, DOCUMENT_TOKENS, SEQ_LEN, ROWS = 10**9, 1000, 1024, 64
TOKEN_BYTES = 2


def by_path(folder: Path, num_tokens: int) -> float:
    """Return the seconds until a loader by path has given its first batch."""
    from corpus_client import CorpusLoader

    corpus = folder / "web"
    corpus.mkdir()
    for first in range(0, num_tokens, SHARD_TOKENS):
        with (corpus / f"{first // SHARD_TOKENS:05}.bin").open("wb") as file:
            file.truncate(min(SHARD_TOKENS, num_tokens - first) * TOKEN_BYTES)
    began = time.perf_counter()
    with CorpusLoader(corpus, seq_len=SEQ_LEN, global_batch_size=ROWS, device="cpu") as loader:
        next(iter(loader))
        return time.perf_counter() - began


def by_index(folder: Path, num_tokens: int) -> float:
    """Return the seconds until Megatron-Core's dataset has built its indexes and given its first batch."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import _IndexWriter

    class Tokenizer:
        vocab_size, eod, pad, special_tokens_dict = 65536, 0, -1, {"eod": 0}
        unique_identifiers: dict[str, Any] = {}  # noqa: RUF012

    num_documents = num_tokens // DOCUMENT_TOKENS
    with (folder / "web.bin").open("wb") as file:
        file.truncate(num_tokens * TOKEN_BYTES)
    lengths = np.full(num_documents, DOCUMENT_TOKENS, np.int32)
    with _IndexWriter(str(folder / "web.idx"), np.uint16) as writer:
        writer.write(lengths, None, np.arange(num_documents + 1, dtype=np.int64))
    began = time.perf_counter()
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LEN,
        blend=([str(folder / "web")], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=Tokenizer(),
    )
    sizes = [num_tokens // SEQ_LEN - 1, 0, 0]
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    for row in range(ROWS):
        dataset[row]
    return time.perf_counter() - began


CONTENDERS: dict[str, Callable[[Path, int], float]] = {
    "corpus-server, by path": by_path,
    "Megatron-Core, indexes built": by_index,
}


def measure(name: str, num_tokens: int, parent: str | None) -> float:
    """Return the seconds of a contender in a process of its own."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "scripts.first_batch",
            "--one",
            name,
            str(num_tokens),
            str(folder),
        ]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return float(said.stdout.split()[-1])
    finally:
        shutil.rmtree(folder)


def shown(seconds: Sequence[float]) -> str:
    """Return the median, the lowest and the highest."""
    return f"{statistics.median(seconds):.3g} ({min(seconds):.3g} - {max(seconds):.3g})"


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=13, help="10^MOST tokens are the largest corpus")
    parser.add_argument("--most-indexed", type=int, default=10, help="the same for Megatron-Core")
    parser.add_argument("--folder", help="of the sparse files")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, num_tokens, folder = given.one
        print(CONTENDERS[name](Path(folder), int(num_tokens)))
        return
    names = list(CONTENDERS)[: 2 if importlib.util.find_spec("megatron") else 1]
    print(f"# First batch by the size of the corpus, {time.strftime('%Y-%m-%d')}\n")
    print(f"    python -m scripts.first_batch --rounds {given.rounds} --most {given.most}\n")
    processor = platform.processor() or platform.machine()
    print(f"- cpu: {os.cpu_count()} x {processor}, load {os.getloadavg()[0]:.1f}")
    print(f"- python: {platform.python_version()}, numpy: {np.__version__}\n")
    print(f"### Seconds until the first batch: median (lowest - highest) of {given.rounds} rounds\n")
    powers = range(9, given.most + 1)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(given.rounds):  # sizes take turns, so that other work of the machine falls on all
        for name, power in itertools.product(names, powers):
            if name == names[0] or power <= given.most_indexed:
                found.setdefault((name, power), []).append(measure(name, 10**power, given.folder))
    print(f"| tokens | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for power in powers:
        cells = [shown(found[name, power]) if (name, power) in found else "" for name in names]
        print(f"| 10^{power} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
