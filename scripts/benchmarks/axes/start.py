"""How long until the first batch, and until a server is ready.

A loader's first batch is timed in a fresh process, where everything happens for the first time, with a
plan that the server has not seen; imports are shown beside it. A server's time is from starting the
process to `/readyz` saying yes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from scripts.benchmarks import corpus
from scripts.benchmarks.measure import spread
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import serving
from scripts.benchmarks.start_parts import loader_parts, server_parts

HELP = "time from CorpusLoader(...) to the first batch, and from starting a server to ready"

SIZES = [10**6, 10**9, 10**12]
ROWS, SEQ_LEN = 64, 1024
SHARDS = [1, 1000]
SHARD_TOKENS = 10_000
FIRST_BATCH_TARGET_MS = 50.0
READY_TARGET_SECONDS = 1.5
IMPORTS = ["interpreter", "import torch", "import the client"]
FIRST = ["CorpusLoader(...)", "first batch"]
AGAIN = [f"{name}, again" for name in FIRST]


def measure(options: Options) -> Report:
    """Loaders first, then servers; sizes take turns in every round."""
    loaders, servers = _loaders(options), _servers(options)
    return Report(
        data={"loader": loaders, "server": servers},
        tables=[_loader_table(loaders, options), _server_table(servers, options)],
        targets=[*map(_loader_target, loaders), *map(_server_target, servers)],
        plots=[Plot(name="start", draw=lambda figure: _draw(figure, loaders, servers))],
    )


def _loaders(options: Options) -> list[dict[str, Any]]:
    sizes = SIZES[::2] if options.smoke else SIZES
    corpora = {f"tokens-{size}": corpus.sparse(options.cache, size) for size in sizes}
    seeds = itertools.count(step=2)
    with serving(corpora) as server:

        def start(size: int) -> dict[str, float]:
            return loader_parts(
                server.url,
                corpus=f"tokens-{size}",
                seq_len=SEQ_LEN,
                global_batch_size=ROWS,
                seed=next(seeds),
            )

        runs = _in_turns(sizes, start, options)
        plans = server.num_requests("/v1/plans")
        if plans < 2 * len(sizes) * options.rounds:
            raise SystemExit(f"the server was asked for {plans} plans, fewer than there were loaders")
    return [
        {
            "num_tokens": size,
            "seconds": spread([sum(each[name] for name in FIRST) for each in its]),
            "again_seconds": spread([sum(each[name] for name in AGAIN) for each in its]),
            "parts": _medians(its),
        }
        for size, its in runs.items()
    ]


def _servers(options: Options) -> list[dict[str, Any]]:
    paths = {number: _shards(options.cache, number) for number in (SHARDS[:1] if options.smoke else SHARDS)}

    def start(number: int) -> dict[str, float]:
        with serving({corpus.NAME: paths[number]}) as server:
            ready_seconds = server.ready_seconds
        return {**server_parts(paths[number]), "ready": ready_seconds}

    runs = _in_turns(list(paths), start, options)
    found = []
    for number, its in runs.items():
        parts = _medians(its)
        ready = parts.pop("ready")
        parts["listen and answer"] = ready - sum(parts.values())
        found.append(
            {"num_shards": number, "seconds": spread([each["ready"] for each in its]), "parts": parts}
        )
    return found


def _in_turns(
    cases: list[int], start: Callable[[int], dict[str, float]], options: Options
) -> dict[int, list[dict[str, float]]]:
    if not options.smoke:
        start(cases[0])  # programs and libraries come into the page cache
    runs: dict[int, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            runs[case].append(start(case))
    return runs


def _shards(cache: Path, number: int) -> Path:
    """A folder of raw shards of different tokens, made once."""
    folder = cache / f"shards_{number}x{SHARD_TOKENS}"
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(number):
        path = folder / f"train_{shard:06}.bin"
        if not path.exists():
            draw = np.random.default_rng(shard)
            path.write_bytes(draw.integers(0, corpus.VOCABULARY, SHARD_TOKENS, dtype=np.uint16).tobytes())
    return folder


def _shards_name(each: dict[str, Any]) -> str:
    return f"{each['num_shards']:,} shard{'s' if each['num_shards'] > 1 else ''}"


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


def _cell(summary: dict[str, float], scale: float) -> str:
    median, low, high = (summary[name] * scale for name in ("median", "lowest", "highest"))
    return f"{median:.3g} ({low:.3g} - {high:.3g})"


def _loader_table(loaders: list[dict[str, Any]], options: Options) -> Table:
    title = (
        f"from CorpusLoader(...) to the first batch of {ROWS} x {SEQ_LEN + 1}, median of {options.rounds}, ms"
    )
    return Table(
        title=title,
        columns=["tokens", "together", *FIRST, "again, another plan", *(f"({name})" for name in IMPORTS)],
        rows=[
            [
                f"{each['num_tokens']:.0e}",
                _cell(each["seconds"], 1e3),
                *(f"{each['parts'][name] * 1e3:.1f}" for name in FIRST),
                _cell(each["again_seconds"], 1e3),
                *(f"{each['parts'][name] * 1e3:.0f}" for name in IMPORTS),
            ]
            for each in loaders
        ],
    )


def _server_table(servers: list[dict[str, Any]], options: Options) -> Table:
    return Table(
        title=f"from starting a server to ready, median of {options.rounds}, s",
        columns=["shards", "together", *servers[0]["parts"]],
        rows=[
            [
                f"{each['num_shards']:,}",
                _cell(each["seconds"], 1),
                *(f"{seconds:.3f}" for seconds in each["parts"].values()),
            ]
            for each in servers
        ],
    )


def _loader_target(each: dict[str, Any]) -> Target:
    return Target(
        figure=f"CorpusLoader(...) to first batch, {each['num_tokens']:.0e} tokens",
        reached=each["seconds"]["median"] * 1e3,
        bound="at most",
        wanted=FIRST_BATCH_TARGET_MS,
        unit="ms",
    )


def _server_target(each: dict[str, Any]) -> Target:
    return Target(
        figure=f"server start to ready, {_shards_name(each)}",
        reached=each["seconds"]["median"],
        bound="at most",
        wanted=READY_TARGET_SECONDS,
        unit="s",
    )


def _draw(figure: Figure, loaders: list[dict[str, Any]], servers: list[dict[str, Any]]) -> None:
    upper, lower = figure.subplots(2, 1)
    for axes, cases, names, scale in (
        (
            upper,
            {f"$10^{{{len(str(each['num_tokens'])) - 1}}}$ tokens": each for each in loaders},
            FIRST,
            1e3,
        ),
        (lower, {_shards_name(each): each for each in servers}, [*servers[0]["parts"]], 1.0),
    ):
        for number, (label, each) in enumerate(cases.items()):
            left = 0.0
            for colour, name in enumerate(names):
                width = max(0.0, each["parts"][name] * scale)
                legend = name if number == 0 else None
                axes.barh(label, width, left=left, color=f"C{colour}", label=legend)
                left += width
        axes.invert_yaxis()
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    upper.axvline(FIRST_BATCH_TARGET_MS, color="grey", linestyle=":")
    upper.set_xlabel("ms to the first batch")
    lower.axvline(READY_TARGET_SECONDS, color="grey", linestyle=":")
    lower.set_xlabel("s to a ready server (dotted: at most)")
