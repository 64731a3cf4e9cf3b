"""Measure `corpus-server find`: speed, memory, and whether it finds what was planted and nothing else.

    python -m scripts.find_cost --folder DIR [--tokens 1000000000] [--items 100000] [--processes 2]

The corpus is synthetic text of a real tokenizer: a byte-level BPE of 32,768 tokens, trained on the Python
files of this installation. A chain copies their tokens, and every fifth token or so goes on at another place
where the same token stands, so that phrases are as frequent as in text. The first shard is made so; the
others are its blocks of 4,096 tokens, drawn anew. Half of the items are pieces of files that the chain never
copies; of the others 10,000 spans are planted, at ends of documents and shards, too.

CPU is that of all processes of the command: reading the items, making the table, the pass, the report. On a
machine with other work it says more than the clock.

A plain scan in Python, of a set of tuples and of one of bytes, is measured on the first tokens of the corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from corpus_server.corpus.index import index
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.tools.finding.ngrams import NGrams
from corpus_server.tools.finding.scan import STRETCH_TOKENS, scan_stretch

N, VOCABULARY, EOT = 13, 32_768, 0
NUM_PLANTED, NUM_CHAINS, SHARD_TOKENS = 10_000, 1 << 16, 100_000_000
TEXT_BYTES, PLAIN_TOKENS, BLOCK = 24 << 20, 2_000_000, 4096
MIB = 2**20


def real_text() -> list[str]:
    """Return the Python files of this installation, without those that are no UTF-8."""
    found, size = [], 0
    roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    for path in sorted(path for root in roots for path in Path(root).rglob("*.py")):
        try:
            found.append(path.read_text())
        except (OSError, UnicodeDecodeError):
            continue
        size += len(found[-1])
        if size > TEXT_BYTES:
            break
    return found


def encoded(texts: list[str], tokenizer: Path) -> list[NDArray[np.uint16]]:
    """Return the tokens of texts, by a tokenizer that is trained on them if it is not there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not tokenizer.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
        )
        bpe.train_from_iterator(texts, trainer)
        bpe.save(str(tokenizer))
    bpe = Tokenizer.from_file(str(tokenizer))
    return [np.array(each.ids, dtype=np.uint16) for each in bpe.encode_batch_fast(texts)]


def synthetic(source: NDArray[np.uint16], num_tokens: int, draw: np.random.Generator) -> NDArray[np.uint16]:
    """Return tokens of the chain that copies `source` and jumps between equal tokens."""
    order = np.argsort(source[:-1], kind="stable")
    first = np.searchsorted(source[:-1][order], np.arange(VOCABULARY + 1))
    counts = np.diff(first)
    steps = -(-num_tokens // NUM_CHAINS)
    made = np.empty((NUM_CHAINS, steps), dtype=np.uint16)
    at = draw.integers(0, source.size - 1, NUM_CHAINS)
    for step in range(steps):
        jumps = np.flatnonzero(draw.random(NUM_CHAINS, dtype=np.float32) < 0.2)
        tokens = source[at[jumps]]
        at[jumps] = order[first[tokens] + draw.integers(0, np.maximum(counts[tokens], 1))]
        at = (at + 1) % (source.size - 1)
        made[:, step] = source[at]
    return made.reshape(-1)[:num_tokens]


def make(folder: Path, num_tokens: int, num_items: int) -> None:
    """Write the corpus, the items as token ids, and what was planted."""
    draw = np.random.default_rng(0)
    web = folder / "web"
    web.mkdir(parents=True, exist_ok=True)
    texts = real_text()
    pieces = encoded(texts, web / "tokenizer.json")
    kept = len(pieces) * 3 // 4
    ended = [np.append(each, np.uint16(EOT)) for each in pieces]
    source, held_out = np.concatenate(ended[:kept]), np.concatenate(pieces[kept:])
    lengths = draw.integers(30, 171, num_items)  # 100 tokens of an item in the mean
    starts = draw.integers(0, held_out.size - 200, num_items)
    items = [held_out[s : s + n].copy() for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    for number in range(num_items // 2):  # these stand nowhere by themselves
        items[number] = draw.integers(1, VOCABULARY, items[number].size).astype(np.uint16)
    planted = []
    for first in range(0, num_tokens, SHARD_TOKENS):
        if not first:
            whole = synthetic(source, min(SHARD_TOKENS, num_tokens), draw)
            tokens = whole.copy()
        else:
            blocks = whole[: whole.size // BLOCK * BLOCK].reshape(-1, BLOCK)
            tokens = blocks[draw.integers(0, len(blocks), -(-SHARD_TOKENS // BLOCK))].reshape(-1)
            tokens = tokens[: min(SHARD_TOKENS, num_tokens - first)]
        ends = np.flatnonzero(tokens == EOT)
        for number in range(NUM_PLANTED * tokens.size // num_tokens):
            item = int(draw.integers(num_items // 2))
            size = items[item].size
            at = int(draw.integers(0, size - N + 1))
            length = int(draw.integers(N, size - at + 1))
            start = int(draw.integers(0, tokens.size - length))
            if number % 3 == 0:
                end = int(ends[draw.integers(ends.size)])
                start = min(max(0, (end + 1, end - length)[number % 2]), tokens.size - length)
            if number < 2:  # the first and the last tokens of the shard
                start = (0, tokens.size - length)[number]
            tokens[start : start + length] = items[item][at : at + length]
            planted.append((item, at, first + start, length))
        tokens.tofile(web / f"{first // SHARD_TOKENS:04}.bin")
    (folder / "items.jsonl").write_text("".join(f"{json.dumps({'ids': each.tolist()})}\n" for each in items))
    np.save(folder / "planted.npy", np.array(planted))
    index(CorpusSpec.parse(f"{web},eot={EOT}"))


def run(folder: Path, num_processes: int) -> tuple[float, float, float, dict[str, object]]:
    """Return seconds and seconds of CPU of `find`, the most MiB of its processes, and its report."""
    command = [
        sys.executable,
        "-m",
        "corpus_server",
        "find",
        str(folder / "web"),
        "--json",
        "--column",
        "ids",
    ]
    command += ["--items", str(folder / "items.jsonl"), "--processes", str(num_processes)]
    with (folder / "report.json").open("wb") as out:
        began, before = time.monotonic(), os.times()
        process = subprocess.Popen(command, stdout=out)
        most = 0.0

        def watch() -> None:
            nonlocal most
            while process.poll() is None:
                try:
                    parent = psutil.Process(process.pid)
                    its = [parent, *parent.children(recursive=True)]
                    most = max(most, sum(each.memory_full_info().pss for each in its) / MIB)
                except psutil.Error:
                    pass
                time.sleep(0.2)

        watching = threading.Thread(target=watch)
        watching.start()
        if process.wait():
            raise SystemExit(f"find ended with {process.returncode}")
        seconds, after = time.monotonic() - began, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        watching.join()
    return seconds, cpu, most, json.loads((folder / "report.json").read_text())


def check(folder: Path, report: dict[str, object]) -> tuple[int, int, int]:
    """Return how many planted spans there are whole, how many of them were found, and how many are wrong."""
    paths = sorted((folder / "web").glob("*.bin"))
    tokens = np.concatenate([np.memmap(path, np.uint16, "r") for path in paths])
    items = [np.array(json.loads(line)["ids"]) for line in (folder / "items.jsonl").open()]
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    num_wrong = 0
    for item in report["items"]:  # type: ignore[attr-defined]
        for span in item["spans"]:
            start, stop, at = span["start"], span["stop"], span["item_start"]
            text = items[item["item"]][at : at + stop - start]
            num_wrong += not np.array_equal(tokens[start:stop], text)
            found.setdefault((item["item"], start - at), []).append((start, stop))
    num_whole = num_found = 0
    for item, at, start, length in np.load(folder / "planted.npy").tolist():
        if np.array_equal(tokens[start : start + length], items[item][at : at + length]):
            num_whole += 1
            spans = found.get((item, start - at), [])
            num_found += any(begin <= start and start + length <= end for begin, end in spans)
    return num_whole, num_found, num_wrong


def plain(folder: Path) -> dict[str, float]:
    """Return million tokens per second of CPU of two scans in Python, each n-gram looked up in a set."""
    items = [json.loads(line)["ids"] for line in (folder / "items.jsonl").open()]
    tokens = np.fromfile(folder / "web" / "0000.bin", np.uint16, PLAIN_TOKENS)
    tuples = {tuple(each[i : i + N]) for each in items for i in range(len(each) - N + 1)}
    ids, rates = tokens.tolist(), {}
    began = time.process_time()
    sum(tuple(ids[i : i + N]) in tuples for i in range(len(ids) - N + 1))
    rates["set of tuples"] = len(ids) / (time.process_time() - began) / 1e6
    del tuples
    grams = {
        data[2 * i : 2 * (i + N)]
        for data in (np.array(each, np.uint16).tobytes() for each in items)
        for i in range(len(data) // 2 - N + 1)
    }
    data = tokens.tobytes()
    began = time.process_time()
    sum(data[i : i + 2 * N] in grams for i in range(0, len(data) - 2 * N + 1, 2))
    rates["set of bytes"] = len(ids) / (time.process_time() - began) / 1e6
    return rates


def per_cpu_second(folder: Path) -> list[float]:
    """Return million tokens per second of CPU of the pass, by stretch, without the first one."""
    items = [np.array(json.loads(line)["ids"], np.uint32) for line in (folder / "items.jsonl").open()]
    ends = np.cumsum([each.size for each in items])
    spec, rates = CorpusSpec.parse(str(folder / "web")), []
    with tempfile.TemporaryDirectory(dir=folder) as saved:
        NGrams.make(Path(saved), np.concatenate(items), ends, N)
        for number in range(5):
            began = time.process_time()
            scan_stretch(spec, Path(saved), N, False, number)
            rates.append(STRETCH_TOKENS / (time.process_time() - began) / 1e6)
    return rates[1:]


def main() -> None:
    """Measure, and print what a dated result says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--items", type=int, default=10**5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not (options.folder / "planted.npy").exists():
        make(options.folder, options.tokens, options.items)
    for path in sorted(
        (options.folder / "web").glob("*.bin")
    ):  # from the page cache, or the disk is measured
        path.read_bytes()
    for _ in range(options.rounds):
        seconds, cpu, memory, report = run(options.folder, options.processes)
        scan = report["corpora"][0]["scan_seconds"]  # type: ignore[index]
        rate = options.tokens / scan / 1e6
        told = f"{seconds:.1f} s in all, {cpu:.1f} s of CPU, pass {scan} s ({rate:.0f} M tokens/s)"
        print(f"{told}, {memory:,.0f} MiB", flush=True)
    print(report["corpora"])
    print("planted whole, found, wrong spans:", check(options.folder, report))
    if options.tokens >= 5 * STRETCH_TOKENS:
        rates = [round(each) for each in per_cpu_second(options.folder)]
        print("the pass, M tokens per second of CPU:", rates)
    plainly = {name: round(rate, 2) for name, rate in plain(options.folder).items()}
    print("in plain Python, M tokens per second of CPU:", plainly)


if __name__ == "__main__":
    main()
