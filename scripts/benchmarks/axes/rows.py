"""Measure the rows that join documents beside windows: tokens per second and their CPU, warm and cold.

With `--before`, warm, windows and rows of documents of that commit's server are beside them. The limits are
the strongest bare TCP server of each round, see `peers/bare.py`, of windows and of as many equal pieces as
packed rows have.

One corpus holds documents of web-like lengths (median 400 tokens, mean 1,000). A loader for each kind of rows
takes batches from it, so that only where the tokens lie differs; warm, also from a view of half of it. Cold,
the file is taken out of the page cache before every turn, and the server starts anew; it builds its tables
before the clock runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.tools.viewing.make import make_view
from scripts.benchmarks import corpus, disk
from scripts.benchmarks.axes.packing import lognormal
from scripts.benchmarks.contender import Contender, Shape, check
from scripts.benchmarks.contest import BEFORE, shapes_of
from scripts.benchmarks.corpus import NAME, VOCABULARY
from scripts.benchmarks.measure import DELIVERY, SPEED, Rounds, measure_once
from scripts.benchmarks.ours import IN_FLIGHT, Ours, steps_per_request
from scripts.benchmarks.peers import bare
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import checked_out, serving, spawn_peer
from tests.corpora import megatron_index

HELP = "rows of documents beside windows, Megatron's rows and those of a view, warm and cold"

NUM_TOKENS, QUICK_TOKENS = 5 * 10**8, 400_000
MEAN = 1000  # tokens of a document
EOS = 0
NUM_SAMPLES = 12_000_000  # of a run in Megatron's order: more than a loader takes in the time
WINDOWS, DOCUMENTS, MEGATRON = "windows", "rows of documents", "Megatron's rows"
OF_VIEW, DOCUMENTS_OF_VIEW = "windows of a view", "rows of documents of a view"
EARLIER = f", {BEFORE}"
IN_BLOCKS = "rows of documents, sequential, blocks of 4,096"
LIMIT, LIMIT_OF_PIECES = "strongest bare TCP", "strongest bare TCP, pieces"
OF_WINDOWS = 0.6  # of the tokens/s of windows, wanted of other rows


def measure(options: Options) -> Report:
    """Measure both shapes, warm and cold."""
    path = documents(options.cache, QUICK_TOKENS if options.quick else NUM_TOKENS)
    report = Report(data={}, tables=[])
    for shape in shapes_of(options)[: 1 if options.quick else 2]:  # each starts six servers
        for title, measured in (("warm", _warm), ("cold", _cold)):
            rounds = Rounds(f"{title}, {shape} uint16", DELIVERY)
            measured(rounds, path, shape, options)
            report.data[rounds.title] = rounds.summary()
            before = [(name, name + EARLIER) for name in _plans(options) if name + EARLIER in rounds.values]
            kinds = (*_plans(options), OF_VIEW, DOCUMENTS_OF_VIEW, IN_BLOCKS)
            others = [(name, WINDOWS) for name in kinds if name in rounds.values and name != WINDOWS]
            limits = [(WINDOWS, LIMIT), (DOCUMENTS, LIMIT_OF_PIECES)] if measured is _warm else []
            before += [(name, WINDOWS + EARLIER) for name, _ in others if before]
            report.tables.extend([rounds.table(), rounds.ratio_table(others + before + limits)])
            if measured is _warm:
                for name in (DOCUMENTS, MEGATRON, OF_VIEW, DOCUMENTS_OF_VIEW):
                    report.targets.append(rounds.target(name, SPEED, "at least", OF_WINDOWS, to=WINDOWS))
    return report


def _plans(options: Options) -> dict[str, dict[str, Any]]:
    num_samples = NUM_SAMPLES // 12 if options.quick else NUM_SAMPLES
    return {
        WINDOWS: {},
        DOCUMENTS: {"rows": {"documents": {}}},
        MEGATRON: {"order": {"megatron": {"num_samples": num_samples}}},
    }


def _warm(rounds: Rounds, path: Path, shape: Shape, options: Options) -> None:
    with serving({NAME: served(path)}) as server, serving({NAME: view(path)}) as viewed, ExitStack() as stack:
        plans = [(name, server, plan) for name, plan in _plans(options).items()]
        plans += [(OF_VIEW, viewed, {}), (DOCUMENTS_OF_VIEW, viewed, _plans(options)[DOCUMENTS])]
        if options.before is not None:
            tree = stack.enter_context(checked_out(options.before))
            earlier = stack.enter_context(serving({NAME: served(path)}, tree=tree))
            plans += [(name + EARLIER, earlier, plan) for name, plan in _plans(options).items()]
        everybody: dict[str, tuple[Contender, Shape]] = {}
        for name, its, plan in plans:
            everybody[name] = stack.enter_context(closing(Ours(name, its, shape, path, **plan))), shape
        peer = stack.enter_context(spawn_peer("bare", path))
        limits: dict[str, list[str]] = {LIMIT: [], LIMIT_OF_PIECES: []}
        for limit, ranges in ((LIMIT, shape), (LIMIT_OF_PIECES, _pieces_of(shape))):
            for make in bare.makers(peer, ranges, steps_per_request(shape), IN_FLIGHT, ("join", "sendmsg")):
                contender = stack.enter_context(closing(make()))
                check(contender, path, ranges)
                limits[limit].append(f"{contender.name}, {ranges}")
                everybody[limits[limit][-1]] = contender, ranges
        corpus.warm(path)
        for number in range(options.rounds):
            for name in everybody if number % 2 == 0 else reversed(everybody):
                rounds.add(name, measure_once(*everybody[name], options.seconds))
        for limit, names in limits.items():
            rounds.add_strongest(limit, names)


def _pieces_of(shape: Shape) -> Shape:
    """Return as many equal pieces as packed rows of a shape have, and nearly as many tokens."""
    pieces = shape.rows + shape.num_tokens // MEAN  # a row begins one, and each document in it
    return Shape(rows=pieces, length=shape.num_tokens // pieces)


def _cold(rounds: Rounds, path: Path, shape: Shape, options: Options) -> None:
    in_blocks = {"rows": {"documents": {"block_documents": 4096}}, "order": "sequential"}
    for _ in range(options.rounds):
        for name, plan in {**_plans(options), IN_BLOCKS: in_blocks}.items():
            disk.drop(path)
            with (
                serving({NAME: served(path)}) as server,
                closing(Ours(name, server, shape, path, **plan)) as loader,
            ):
                rounds.add(name, measure_once(loader, shape, options.seconds))


def served(path: Path) -> Path:
    """Return how the corpus of a file of `documents` is served."""
    return Path(f"{path},eot={EOS}")


def view(path: Path) -> Path:
    """Return how a view of half of the documents is served; make it if it does not exist."""
    file = path.with_suffix(".view")
    if not file.exists():
        with Corpus.open(CorpusSpec.parse(f"{NAME}={served(path)}")) as opened:
            counts = np.random.default_rng(2).integers(0, 2, opened.num_documents).astype(np.uint16)
            make_view(opened, counts, file, made={})
    return Path(f"{served(path)},view={file}")


def documents(folder: Path, num_tokens: int) -> Path:
    """Return a Megatron pair of documents with web-like lengths, each of which ends with `EOS`."""
    path = folder / f"documents_{num_tokens}.bin"
    if path.with_suffix(".idx").exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    lengths = np.maximum(2, lognormal(num_tokens // MEAN))
    with path.open("wb") as file:
        for part in _tokens(np.random.default_rng(1), lengths.cumsum()):
            file.write(part.tobytes())
    path.with_suffix(".idx").write_bytes(megatron_index(lengths.tolist()))
    return path


def _tokens(rng: np.random.Generator, ends: np.ndarray) -> Iterator[np.ndarray]:
    size = 1 << 24
    for first in range(0, int(ends[-1]), size):
        tokens = rng.integers(1, VOCABULARY, min(size, int(ends[-1]) - first), dtype=np.uint16)
        here = ends[(ends > first) & (ends <= first + len(tokens))]
        tokens[here - 1 - first] = EOS
        yield tokens
