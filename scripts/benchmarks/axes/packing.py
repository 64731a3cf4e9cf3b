"""Measure rows of documents: how full they are, what the table costs, and how fast a step's rows are located.

Lengths are lognormal (median 400, mean 1,000, as web pages have) or those of the quick start's corpus, the
sources of Python. A row *begins* with a document if its first token is the document's first. Neighbours in a
row *meet again* if the next epoch has them in one row, too. Times are CPU times, but those of a build by
copies, which share the blocks as in a server, are times of a clock. `--only 1e8` packs 10^8 documents, which
takes 8 GiB and some minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from corpus_server.plan.packing import Packing, build
from corpus_server.plan.packing.spread import Class, Pattern, merge, spread
from corpus_server.read.apart import map_in_copies, run_apart
from scripts.benchmarks import packers
from scripts.benchmarks.measure import Columns, Rounds
from scripts.benchmarks.packers import Lengths, Packed
from scripts.benchmarks.report import Options, Report, Table, Target
from scripts.quickstart_lib import text

HELP = "rows of documents: fill, table, build time and locating rows, beside other rules of packing"

Figures = dict[str, float]

SEQ_LENS = (1024, 2048, 8192, 32_768, 131_072)
SIZES = {"1e6": 10**6, "1e7": 10**7, "1e8": 10**8}
DEFAULT_SIZES = ("1e6", "1e7")
BLOCK_DOCUMENTS = 2**18
ROWS = 512
TEXT_MB = 30
QUICK_DOCUMENTS, QUICK_SEQ_LENS, QUICK_MB = 3000, (1024, 32_768), 1

RULES = {
    "fill %": ".2f",
    "rows that begin with a document %": ".1f",
    "documents cut that fit %": ".1f",
    "tokens lost %": ".1f",
    "neighbours that meet again %": ".2f",
    "patterns": ",.0f",
    "microseconds a document": ".2f",
}
"""The figures of a rule, and their formats."""
BUILD, COPIES, LOCATE = "build_cpu_seconds_per_1e8", "build_seconds_per_1e8", "locate_ms"
BYTES, FILL = "bytes_per_document", "fill"
TABLES: Columns = {
    BUILD: ("build, CPU s for 10^8 documents", ".2f"),
    COPIES: ("build by copies, s for 10^8 documents", ".2f"),
    LOCATE: (f"{ROWS} rows located, CPU ms", ".2f"),
    BYTES: ("bytes a document", ".2f"),
    FILL: ("fill %", ".3f"),
}
OTHERS: dict[str, Callable[[Lengths, int], Packed]] = {
    "first-fit": packers.first_fit,
    "best-fit decreasing, as OLMo-core": packers.best_fit_documents,
    "crop, as nanochat": packers.crop,
    "concatenate and cut": packers.concatenate_and_cut,
}
SPREAD, BEST_FIT = "spread", "best-fit decreasing by counts"
WANTED_FILL, MOST_BYTES, MOST_MS = 99.9, 8.0, 1.0
MOST_SECONDS = {2048: 3.0, 32_768: 30.0}
LOCATED_SEQ_LEN = 2048


def measure(options: Options) -> Report:
    """Compare the rules on one block, then build and use tables of growing size."""
    options = options.in_force()
    documents = QUICK_DOCUMENTS if options.quick else BLOCK_DOCUMENTS
    seq_lens = QUICK_SEQ_LENS if options.quick else SEQ_LENS
    report = Report(data={}, tables=[])
    web, python = lognormal(documents), of_python(options.cache, QUICK_MB if options.quick else TEXT_MB)
    for name, lengths in (("lognormal", web), ("the sources of Python", python)):
        title = f"{name}, a block of {lengths.size:,} documents"
        figures = {
            (seq_len, rule): its for seq_len in seq_lens for rule, its in compare(lengths, seq_len).items()
        }
        report.data[title] = {f"{rule}, {_name(seq_len)}": its for (seq_len, rule), its in figures.items()}
        cells = [
            [
                f"{seq_len:,}",
                rule,
                *(format(its[key], form) if key in its else "" for key, form in RULES.items()),
            ]
            for (seq_len, rule), its in figures.items()
        ]
        report.tables.append(Table(title=title, columns=["seq_len", "rule", *RULES], rows=cells))
    sizes = (documents,) if options.quick else tuple(SIZES[name] for name in options.only or DEFAULT_SIZES)
    for documents in sizes:
        rounds = Rounds(f"tables of {documents:,} documents", TABLES)
        lengths = lognormal(documents)
        for seq_len in seq_lens:
            measure_table(rounds, lengths, seq_len, options.rounds if documents <= SIZES["1e7"] else 1)
        report.data[rounds.title] = rounds.summary()
        report.tables.append(rounds.table())
        report.targets.extend(_targets(rounds, seq_lens))
    return report


def compare(lengths: Lengths, seq_len: int) -> dict[str, Figures]:
    """Return the figures of all rules on one block."""
    found = {
        name: _by_counts(lengths, seq_len, rule)
        for name, rule in ((SPREAD, spread), (BEST_FIT, packers.best_fit_counts))
    }
    for name, pack in OTHERS.items():
        began = time.process_time()
        packed = pack(lengths, seq_len)
        seconds = time.process_time() - began
        fill, begin = packed.used / (packed.rows * packed.row_tokens), packed.begin / packed.rows
        shares = (fill, begin, packed.cut / lengths.size, packed.lost / int(lengths.sum()))
        found[name] = dict(zip(RULES, (100 * share for share in shares), strict=False))
        found[name]["microseconds a document"] = 1e6 * seconds / lengths.size
    return found


def _by_counts(lengths: Lengths, seq_len: int, rule: Callable[[list[Class], int], list[Pattern]]) -> Figures:
    """Return the figures of a rule over counts, of all rows of a block."""
    began = time.process_time()
    full, rest = np.divmod(np.maximum(lengths - 1, 0), seq_len)
    tails = np.bincount(rest[rest > 0] + 1)
    sizes = np.flatnonzero(tails)
    classes = merge(list(zip(sizes.tolist(), tails[sizes].tolist(), strict=True)))
    patterns = rule(classes, seq_len + 1)
    seconds = time.process_time() - began
    rows = sum(each.rows for each in patterns) + int(full.sum())
    used = int(full.sum()) * (seq_len + 1) + int(rest.sum()) + np.count_nonzero(rest)
    # A turned row begins with any of its pieces; of the tails in it, each is as likely a whole document.
    whole = np.bincount(rest[(rest > 0) & (full == 0)] + 1, minlength=tails.size)
    borders = [0, *(each.tokens for each in classes)]
    whole_of = [
        int(whole[low + 1 : high + 1].sum()) / int(tails[low + 1 : high + 1].sum())
        for low, high in pairwise(borders)
    ]
    begin = sum(
        each.rows * float(np.mean([whole_of[number] for number in each.classes])) for each in patterns
    )
    meets = packers.meeting_again(classes, patterns)
    shares = (used / (rows * (seq_len + 1)), (begin + np.count_nonzero(full)) / rows, 0.0, 0.0, meets)
    figures = (*(100 * float(share) for share in shares), len(patterns), 1e6 * seconds / lengths.size)
    return dict(zip(RULES, figures, strict=True))


def measure_table(rounds: Rounds, lengths: Lengths, seq_len: int, num_rounds: int) -> None:
    """Build the table of a source some times, and locate the rows of steps in it."""
    starts, shard_ends = lengths.cumsum() - lengths, np.array([lengths.sum()])
    random = np.random.default_rng(0)
    predictions = np.maximum(lengths - 1, 0)
    used = int(predictions.sum() - (-predictions // seq_len).sum())
    for epoch in range(num_rounds):
        began = time.process_time()
        table = build(starts, lengths, shard_ends, seq_len=seq_len, block_documents=BLOCK_DOCUMENTS)
        seconds = time.process_time() - began
        packing = Packing(table, seq_len=seq_len, key=7)
        epochs = np.array([epoch], dtype=np.uint64)
        milliseconds = []
        for _ in range(15):
            rows = random.integers(0, packing.num_rows, ROWS).astype(np.uint64)
            began = time.process_time()
            slots, _ = packing.slots(rows, epochs)
            classes = packing.classes(slots)
            packing.tokens(packing.pieces_at(slots, epochs, classes), classes)
            milliseconds.append(1e3 * (time.process_time() - began))
        figures = {
            BUILD: seconds * 1e8 / lengths.size,
            COPIES: run_apart("the build", build_by_copies, lengths.size, seq_len) * 1e8 / lengths.size,
            LOCATE: float(np.median(milliseconds)),
            BYTES: packing.num_bytes / lengths.size,
            FILL: 100 * used / (packing.num_rows * (seq_len + 1)),
        }
        rounds.add(_name(seq_len), figures)


def build_by_copies(num_documents: int, seq_len: int) -> float:
    """Return how long copies of this process, which may have one thread only, take to build a table."""
    lengths = lognormal(num_documents)
    starts, shard_ends = lengths.cumsum() - lengths, np.array([lengths.sum()])
    shape = {"seq_len": seq_len, "block_documents": BLOCK_DOCUMENTS}
    began = time.perf_counter()
    build(starts, lengths, shard_ends, **shape, run=map_in_copies)
    return time.perf_counter() - began


def lognormal(number: int) -> Lengths:
    """Return lengths with median 400 and mean 1,000."""
    drawn = np.random.default_rng(26).lognormal(np.log(400), np.sqrt(2 * np.log(2.5)), number)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def of_python(cache: Path, num_mb: int) -> Lengths:
    """Return the tokens of the documents of the quick start's corpus, end-of-text included."""
    path = cache / f"python_lengths_{num_mb}mb.npy"
    if not path.exists():
        texts = [document.text for document in text.documents(num_mb * 1_000_000)]
        encoded = text.train_tokenizer(texts).encode_batch_fast(texts, add_special_tokens=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.array([len(each) + 1 for each in encoded], dtype=np.int64))
    lengths: Any = np.load(path)
    return lengths  # type: ignore[no-any-return]


def _name(seq_len: int) -> str:
    return f"seq_len {seq_len:,}"


def _targets(rounds: Rounds, seq_lens: tuple[int, ...]) -> list[Target]:
    found = []
    for seq_len in seq_lens:
        found.append(rounds.target(_name(seq_len), FILL, "at least", WANTED_FILL))
        found.append(rounds.target(_name(seq_len), BYTES, "at most", MOST_BYTES))
        if seq_len in MOST_SECONDS:
            found.append(rounds.target(_name(seq_len), COPIES, "at most", MOST_SECONDS[seq_len]))
        if seq_len == LOCATED_SEQ_LEN:
            found.append(rounds.target(_name(seq_len), LOCATE, "at most", MOST_MS))
    return found
