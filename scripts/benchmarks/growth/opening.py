"""What a corpus costs before and at its first batch, against its size."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from corpus_server.corpus import Corpus
from scripts.benchmarks import corpus
from scripts.benchmarks.measure import spread
from scripts.benchmarks.private import private_bytes
from scripts.benchmarks.report import Options, Plot, Report, Table
from scripts.benchmarks.servers import batches_path, serving, timed_gets

SIZES = (10**6, 10**9, 10**12)
ROWS, SEQ_LEN = 64, 1024
FIGURES = {
    "open": ("opening it", 1e3, "ms"),
    "first": ("a server's first batch", 1e3, "ms"),
    "private": ("private memory of that server", 1e-6, "MB"),
}
"""Title, factor and unit of each."""


def measure(options: Options) -> Report:
    """A new server over a sparse file of each size, sizes in turn in every round."""
    sizes = SIZES[::2] if options.smoke else SIZES
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(options.rounds):
        for size in sizes:
            runs[size].append(_open(corpus.sparse(options.cache, size)))
    found: list[dict[str, Any]] = [
        {"num_tokens": size, **{name: spread([each[name] for each in its]) for name in FIGURES}}
        for size, its in runs.items()
    ]
    return _report(found, options)


def _open(path: Path) -> dict[str, float]:
    began = time.perf_counter()
    Corpus.open(path, name=corpus.NAME, dtype="uint16").close()
    open_seconds = time.perf_counter() - began
    first = batches_path(corpus=corpus.NAME, seq_len=SEQ_LEN, batch_size=ROWS, step=0)
    with serving({corpus.NAME: path}) as server, closing(server.connect()) as connection:
        (first_seconds,) = timed_gets(connection, [first])
        private = private_bytes(server.pid, leaving_out=[path])
    return {"open": open_seconds, "first": first_seconds, "private": float(private)}


def _report(found: list[dict[str, Any]], options: Options) -> Report:
    rows = [
        [
            f"{each['num_tokens']:.0e}",
            *(_cell(each[name], scale) for name, (_, scale, _) in FIGURES.items()),
        ]
        for each in found
    ]
    batch = f"{ROWS} x {SEQ_LEN + 1}"
    title = f"a corpus of n tokens in a sparse file, batches of {batch}, median of {options.rounds}"
    columns = ["tokens", *(f"{what}, {unit}" for what, _, unit in FIGURES.values())]
    return Report(
        data={"opening": found},
        tables=[Table(title=title, columns=columns, rows=rows)],
        plots=[Plot(name="growth-opening", draw=lambda figure: _draw(figure, found))],
    )


def _cell(figures: dict[str, float], scale: float) -> str:
    median, low, high = (figures[name] * scale for name in ("median", "lowest", "highest"))
    return f"{median:.3g} ({low:.3g} - {high:.3g})"


def _draw(figure: Figure, found: list[dict[str, Any]]) -> None:
    figure.set_size_inches(12, 4)
    for panel, (name, (what, scale, unit)) in zip(
        figure.subplots(1, len(FIGURES)), FIGURES.items(), strict=True
    ):
        sizes = [each["num_tokens"] for each in found]
        panel.plot(sizes, [each[name]["median"] * scale for each in found], marker="o")
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.set_xlabel("tokens of the corpus")
        panel.set_ylabel(f"{what}, {unit}")
