"""Ask `corpus-server find` about the quick start's corpus, and compare all that it says with brute force.

    python -m scripts.contamination_case --folder DIR [--mb 12] [--items 200] [--steps 2000] [--stop 700]

Half of the items are pieces of the corpus, the others of Python files that are not in it. A run of `steps`
steps was stopped at `stop`. Brute force reads the tokens of the corpus and of all batches, looks up each
n-gram of them, and extends what it finds token by token; it knows neither plans nor seeds nor indexes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus_spec import CorpusSpec
from scripts.quickstart_lib import text
from tests.serving import RunningServer

N, PLACES, ROWS, SEQ_LEN = 13, 100_000, 16, 256

Span = tuple[int, int, int, int]
"""Item, first token there, first token in the corpus, tokens."""


def make_items(path: Path, corpus_mb: int, num_items: int) -> list[str]:
    """Write the items: pieces of documents of the corpus, and of such that come behind its last one."""
    known = list(text.documents(corpus_mb * 1_000_000))
    beyond = list(text.documents(corpus_mb * 1_000_000 + 2_000_000))[len(known) :]
    draw, items = np.random.default_rng(0), []
    for number in range(num_items):
        documents = known if number % 2 else beyond
        document = documents[int(draw.integers(len(documents)))]
        start = int(draw.integers(max(1, len(document) - 400)))
        items.append(f"Question {number}: {document[start : start + int(draw.integers(60, 400))]} Answer?")
    path.write_text("".join(f"{json.dumps({'text': each})}\n" for each in items))
    return items


def grams_of(items: list[list[int]]) -> dict[bytes, list[tuple[int, int]]]:
    """Return the places of each n-gram in the items."""
    found = defaultdict(list)
    for item, tokens in enumerate(items):
        for at in range(len(tokens) - N + 1):
            found[np.array(tokens[at : at + N], np.uint16).tobytes()].append((item, at))
    return found


def hits(tokens: NDArray[np.uint16], grams: dict[bytes, list[tuple[int, int]]]) -> list[tuple[int, bytes]]:
    """Return where n-grams of items stand in some tokens, by looking at every place."""
    data = tokens.astype("<u2").tobytes()
    pieces = ((at, data[2 * at : 2 * (at + N)]) for at in range(tokens.size - N + 1))
    return [(at, piece) for at, piece in pieces if piece in grams]


def brute_spans(tokens: NDArray[np.uint16], items: list[list[int]]) -> set[Span]:
    """Return all maximal spans that the corpus and the items have in common."""
    grams, found = grams_of(items), set()
    for start, piece in hits(tokens, grams):
        for item, at in grams[piece]:
            its = items[item]
            if at and start and its[at - 1] == tokens[start - 1]:
                continue  # it begins before
            length = N
            while at + length < len(its) and start + length < tokens.size:
                if its[at + length] != tokens[start + length]:
                    break
                length += 1
            found.add((item, at, start, length))
    return found


def brute_steps(server: RunningServer, plan: str, steps: int, items: list[list[int]]) -> dict[int, list[int]]:
    """Return the steps whose batch holds an n-gram of each item in one row, by reading all batches."""
    grams, found = grams_of(items), defaultdict[int, list[int]](list)
    for step in range(steps):
        body = server.get("/v1/batches", plan=plan, step=step).body
        for row in np.frombuffer(body, np.uint16).reshape(ROWS, SEQ_LEN + 1):
            for _, piece in hits(row, grams):
                for item, _ in grams[piece]:
                    if not found[item] or found[item][-1] != step:
                        found[item].append(step)
    return found


def run_case(folder: Path, *, corpus_mb: int, num_items: int, steps: int, stop: int) -> dict[str, Any]:
    """Compare, and return figures; `wrong` names what differs."""
    corpus = text.build(folder, corpus_mb=corpus_mb, report=lambda _: None) / "train"
    source = folder / "items.jsonl"
    tokenizer = Tokenizer.from_file(str(next(corpus.glob("tokenizer.json"))))
    items = [tokenizer.encode(each).ids for each in make_items(source, corpus_mb, num_items)]
    with Corpus.open(CorpusSpec.parse(str(corpus))) as opened:
        shards = [
            np.fromfile(each.file.path, np.uint16, each.num_tokens, offset=each.data_offset)
            for each in opened.shards
        ]
    tokens = np.concatenate(shards)
    began = time.process_time()
    spans = brute_spans(tokens, items)
    seconds = {"brute force over the corpus": time.process_time() - began}
    stage = {"from_step": 0, "global_batch_size": ROWS, "mixture": {"train": 1}}
    with RunningServer({"train": corpus}, folder) as server:
        plan = server.post_plan({"seq_len": SEQ_LEN, "seed": 1, "stages": [stage]}).json()["id"]
        began = time.process_time()
        seen = brute_steps(server, plan, steps, items)
        seconds["brute force over the batches"] = time.process_time() - began
        reports = {}
        for before in (stop, steps):
            out = folder / f"report-{before}"
            command = [
                sys.executable,
                "-m",
                "corpus_server",
                "find",
                f"train={corpus}",
                "--items",
                str(source),
            ]
            command += ["--places", str(PLACES), "--plan", plan, "--server", server.url, "--out", str(out)]
            subprocess.run([*command, "--before-step", str(before)], check=True, stdout=subprocess.DEVNULL)
            reports[before] = json.loads((out / "report.json").read_text())
    wrong = [
        f"{before}: {each}" for before in reports for each in _wrong(reports[before], before, spans, seen)
    ]
    first = {before: {n for n, its in seen.items() if its and its[0] < before} for before in reports}
    return {
        "tokens": int(tokens.size),
        "items": num_items,
        "items of the corpus": num_items // 2,
        "items found": len({span[0] for span in spans}),
        "of them not taken from the corpus": len({span[0] for span in spans if span[0] % 2 == 0}),
        "spans": len(spans),
        f"items seen before step {stop}": len(first[stop]),
        f"items seen before step {steps}": len(first[steps]),
        "CPU seconds": {name: round(each, 1) for name, each in seconds.items()},
        "wrong": wrong,
    }


def _wrong(report: dict[str, Any], before: int, spans: set[Span], seen: dict[int, list[int]]) -> list[str]:
    found, wrong = set(), []
    for item in report["items"]:
        number = item["item"]
        its = {(number, each["item_start"], each["start"], each["num_tokens"]) for each in item["spans"]}
        found |= its
        covered = {at + k for _, at, _, length in its for k in range(length)}
        steps = [step for step in seen.get(number, []) if step < before]
        told = sorted({step for each in item["spans"] for step in each["seen"]["steps"]})
        wrong += [f"item {number}: not complete"] if not item["is_complete"] else []
        wrong += (
            [f"item {number}: {item['num_covered']} tokens"] if item["num_covered"] != len(covered) else []
        )
        wrong += [f"item {number}: first step"] if item["first_step"] != next(iter(steps), None) else []
        # Of one span a report names the first 20 steps.
        is_whole = all(len(each["seen"]["steps"]) < 20 for each in item["spans"])
        wrong += [f"item {number}: steps {told} {steps}"] if is_whole and told != steps else []
    missing, more = spans - found, found - spans
    return [*wrong, *(f"{what} {each}" for what, each in (("missing", missing), ("too many", more)) if each)]


def main() -> None:
    """Compare, and print what a dated result says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    for name, default in (("mb", 12), ("items", 200), ("steps", 2000), ("stop", 700)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    found = run_case(
        options.folder,
        corpus_mb=options.mb,
        num_items=options.items,
        steps=options.steps,
        stop=options.stop,
    )
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
