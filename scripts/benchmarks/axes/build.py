"""Measure `corpus-server build` beside its tokenizer's own batch call on the same text.

The library encodes the texts on all cores, in a process that has read them before, and its ids are counted
but not taken. Ours reads JSON lines, encodes them in one process per core, and writes tokens; its time runs
from starting the processes until the last part is on the disk.
"""

from __future__ import annotations

import json
import shutil
from itertools import cycle, islice
from pathlib import Path

from scripts.benchmarks.measure import SPEED, Rounds
from scripts.benchmarks.report import Options, Report
from scripts.processes import ServerFailed, output_of
from scripts.quickstart_lib import text

HELP = "tokenizing by corpus-server build beside the tokenizer library's own batch call"

TEXT_MB, QUICK_MB = 30, 1
TIMES = 4  # the text is repeated, so that starting processes does not decide
OF_LIBRARY = 0.9
LIBRARY, TOKENIZING, WHOLE = "the library's batch call", "ours, tokenizing", "ours, the whole build"

ENCODE = """
import json, sys, time
from tokenizers import Tokenizer
source, path = sys.argv[1:]
tokenizer = Tokenizer.from_file(path)
tokenizer.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(source)]
num_tokens, began = 0, time.perf_counter()
for first in range(0, len(texts), 1000):
    encoded = tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
    num_tokens += sum(map(len, encoded))
print(num_tokens, len(texts), time.perf_counter() - began)
"""
BUILD = """
import os, sys, time
from functools import partial
from pathlib import Path
from corpus_server.tools.building.driver import build, choose_options
from corpus_server.tools.building.running import in_processes
source, path, out = sys.argv[1:]
options = choose_options(tokenizer=path, eot=None)
began = time.perf_counter()
tokenized = 0.0
def report(what, *_):
    global tokenized
    if what == "tokenizing":
        tokenized = time.perf_counter() - began
run_parts = partial(in_processes, num_processes=len(os.sched_getaffinity(0)))
(built,) = build([source], Path(out), options, run_parts, report).values()
print(built.num_tokens, built.num_documents, tokenized, time.perf_counter() - began)
"""


def measure(options: Options) -> Report:
    """Measure the library and ours in turn."""
    num_mb, times = (QUICK_MB, 1) if options.quick else (TEXT_MB, TIMES)
    source, tokenizer = _make(options.cache / f"text-{num_mb}mb-{times}", num_mb, times)
    out = options.cache / "built"
    rounds = Rounds("build, JSON lines with a tokenizer.json", {SPEED: ("M tokens/s", ".2f")})
    for _ in range(options.rounds):
        num_tokens, num_texts, seconds = _figures(ENCODE, source, tokenizer)
        rounds.add(LIBRARY, {SPEED: num_tokens / seconds / 1e6})
        shutil.rmtree(out, ignore_errors=True)
        with_eot, num_documents, tokenized, whole = _figures(BUILD, source, tokenizer, out)
        if (with_eot - num_documents, num_documents) != (num_tokens, num_texts):
            raise ServerFailed(f"build made {with_eot:,.0f} tokens, the library {num_tokens:,.0f}")
        rounds.add(TOKENIZING, {SPEED: num_tokens / tokenized / 1e6})
        rounds.add(WHOLE, {SPEED: num_tokens / whole / 1e6})
    shutil.rmtree(out)
    pairs = [(TOKENIZING, LIBRARY), (WHOLE, LIBRARY)]
    return Report(
        data=rounds.summary(),
        tables=[rounds.table(), rounds.ratio_table(pairs)],
        targets=[rounds.target(TOKENIZING, SPEED, "at least", OF_LIBRARY, to=LIBRARY)],
    )


def _figures(script: str, *arguments: Path) -> list[float]:
    return [float(figure) for figure in output_of(["-c", script, *map(str, arguments)]).split()]


def _make(folder: Path, num_mb: int, times: int) -> tuple[Path, Path]:
    """Return JSON lines of real text and a tokenizer that was trained on it, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    source, tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
    if not tokenizer.exists():
        texts = [document for document in text.documents(num_mb * 1_000_000) if document]
        with source.open("w") as file:
            for each in islice(cycle(texts), times * len(texts)):
                file.write(json.dumps({"text": each}) + "\n")
        text.train_tokenizer(texts).save(str(tokenizer))
    return source, tokenizer
