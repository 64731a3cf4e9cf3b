"""Two servers over the same corpus: behind one client, and behind nginx with a cache.

How often a server was asked is its own count, from `/metrics`. Peers are connections that ask for the same
URLs in the same order, each at its own pace, as the processes of a tensor-parallel group do. On a machine
whose cores both servers and the client share, a second server adds no throughput: what is shown there is
that it costs none.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from corpus_client import CorpusLoader
from scripts.benchmarks import corpus
from scripts.benchmarks.drive import Load, drive
from scripts.benchmarks.expected import Expected, plan_of
from scripts.benchmarks.proxy import CONFIGURATION, caching_proxy, find_nginx
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import Server, batches_path, serving

HELP = "two replicas: one client uses both, and a cache in front asks them once for many peers"

ROUTE = "/v1/batches"
ROWS, SEQ_LEN = 512, 2048
COUNT = 4
"""Steps of one request: 8 MiB, as a loader asks."""

PEERS = 8
ANSWERS = 20
"""Of every peer in a round, times `seconds`."""

PREFETCH_BYTES = 64 << 20
LEAST_SHARE = 0.4
CASES = {
    "direct": "no cache: the peers ask both servers",
    "first": "through the cache, URLs that are new to it",
    "again": "through the cache, the same URLs again",
}


def measure(options: Options) -> Report:
    """One pair of servers for all."""
    path = corpus.make(options.cache, 10**6 if options.smoke else 10**9)
    corpus.warm(path)
    with serving({corpus.NAME: path}) as first, serving({corpus.NAME: path}) as second:
        spread = _spread((first, second), path, options)
        cached = _cached((first, second), path, options)
    tables, targets = [_spread_table(spread, options)], [_spread_target(spread)]
    if isinstance(cached, str):
        tables.append(Table(title="a cache in front of them", columns=["skipped"], rows=[[cached]]))
        shown = []
    else:
        tables.append(_cached_table(cached, options))
        targets += _cached_targets(cached)
        shown = cached
    return Report(
        data={"spread": spread, "cached": cached},
        tables=tables,
        targets=targets,
        plots=[Plot(name="replicas", draw=lambda figure: _draw(figure, spread, shown))],
    )


def _spread(servers: Sequence[Server], path: Path, options: Options) -> list[dict[str, Any]]:
    """One loader that knows one server, and one that knows both, in turns."""
    rows = 16 if options.smoke else ROWS
    expected = Expected(path, plan_of(rows, SEQ_LEN))
    cases = {"one server": servers[:1], "two servers": servers}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    asked: dict[str, list[int]] = {name: [0] * len(servers) for name in cases}
    for _ in range(options.rounds):
        for name, known in cases.items():
            before = [server.num_requests(ROUTE) for server in servers]
            rates[name].append(_consume([server.url for server in known], rows, expected, options))
            for number, server in enumerate(servers):
                asked[name][number] += server.num_requests(ROUTE) - before[number]
    return [{"case": name, **_rates(rates[name]), "requests": asked[name]} for name in cases]


def _consume(urls: list[str], rows: int, expected: Expected, options: Options) -> float:
    """Million tokens/s of a new loader, after what it fetched ahead has been consumed."""
    with CorpusLoader(
        urls,
        corpus=corpus.NAME,
        seq_len=SEQ_LEN,
        global_batch_size=rows,
        device="cpu",
        dtype=None,
        prefetch_bytes=(2 << 20) if options.smoke else PREFETCH_BYTES,
    ) as loader:
        batch = next(loader)
        if not torch.equal(batch.tokens, torch.from_numpy(expected.batches(0))):
            raise SystemExit("the first batch holds other tokens than the plan's")
        for _ in range(2 * PREFETCH_BYTES // (2 * rows * (SEQ_LEN + 1))):
            next(loader)
        began, num_tokens = time.perf_counter(), 0
        while (seconds := time.perf_counter() - began) < options.seconds:
            num_tokens += next(loader).tokens.numel()
    return num_tokens / seconds / 1e6


def _cached(servers: Sequence[Server], path: Path, options: Options) -> list[dict[str, Any]] | str:
    """Peers beside each other: asking the servers, a cache that does not know the answers, one that does.

    Returns:
        The cases, or why they were skipped.
    """
    nginx = find_nginx()
    if nginx is None:
        return "nginx is not installed here"
    if not CONFIGURATION.exists():
        return f"there is no {CONFIGURATION}"
    rows, answers = (16, 4) if options.smoke else (ROWS, max(2, int(ANSWERS * options.seconds)))
    expected = Expected(path, plan_of(rows, SEQ_LEN, seed=1))
    ids = {server.post_plan(json.dumps(expected.plan.to_json())) for server in servers}
    if len(ids) != 1:
        raise SystemExit(f"the servers made different plans of one: {ids}")
    # By its id: the name of a corpus may stand for another one tomorrow, so such answers are not kept.
    request = batches_path(plan=ids.pop(), count=COUNT, step="")
    rates: dict[str, list[float]] = {name: [] for name in CASES}
    asked: dict[str, list[int]] = {name: [] for name in CASES}
    with caching_proxy(nginx, [server.port for server in servers]) as port:
        ports = {"direct": [server.port for server in servers], "first": [port], "again": [port]}
        for number in range(options.rounds):
            for name in CASES:
                before = sum(server.num_requests(ROUTE) for server in servers)
                driven = drive(
                    Load(
                        ports=ports[name],
                        path=request,
                        connections=PEERS,
                        steps="same",
                        first_step=number * answers,
                        answers=answers,
                    )
                )
                expected.check(driven.digests, count=COUNT)
                rates[name].append(driven.num_bytes / 2 / driven.seconds / 1e6)
                asked[name].append(sum(server.num_requests(ROUTE) for server in servers) - before)
    return [
        {
            "case": name,
            "urls": answers,
            "peers": PEERS,
            **_rates(rates[name]),
            "requests_per_url": max(asked[name]) / answers,
        }
        for name in CASES
    ]


def _rates(rates: list[float]) -> dict[str, float]:
    return {
        "million_tokens_per_second": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
    }


def _cell(each: dict[str, Any]) -> str:
    return f"{each['million_tokens_per_second']:,.0f} ({each['lowest']:,.0f} - {each['highest']:,.0f})"


def _spread_table(spread: list[dict[str, Any]], options: Options) -> Table:
    return Table(
        title=f"one loader, batches of {ROWS} x {SEQ_LEN + 1}, median of {options.rounds}",
        columns=["it knows", "M tokens/s", "of one server", "requests to each"],
        rows=[
            [
                each["case"],
                _cell(each),
                f"{each['million_tokens_per_second'] / spread[0]['million_tokens_per_second']:.2f}",
                ", ".join(f"{number:,}" for number in each["requests"]),
            ]
            for each in spread
        ],
    )


def _cached_table(cached: list[dict[str, Any]], options: Options) -> Table:
    title = (
        f"{PEERS} peers that ask for the same {cached[0]['urls']} URLs of {COUNT} x {ROWS} x {SEQ_LEN + 1}, "
        f"two servers, median of {options.rounds}"
    )
    return Table(
        title=title,
        columns=["", "M tokens/s to all peers", "of direct", "requests to the servers for one URL"],
        rows=[
            [
                CASES[each["case"]],
                _cell(each),
                f"{each['million_tokens_per_second'] / cached[0]['million_tokens_per_second']:.2f}",
                f"{each['requests_per_url']:.2f}",
            ]
            for each in cached
        ],
    )


def _spread_target(spread: list[dict[str, Any]]) -> Target:
    asked = spread[1]["requests"]
    return Target(
        figure="of one loader's requests, share of the replica that is asked less",
        reached=min(asked) / sum(asked),
        bound="at least",
        wanted=LEAST_SHARE,
    )


def _cached_targets(cached: list[dict[str, Any]]) -> list[Target]:
    by_case = {each["case"]: each["requests_per_url"] for each in cached}
    return [
        Target(
            figure=f"requests to the servers for a URL of {PEERS} peers, {CASES[name]}",
            reached=by_case[name],
            bound="at most",
            wanted=wanted,
        )
        for name, wanted in (("first", 1.0), ("again", 0.0))
    ]


def _draw(figure: Figure, spread: list[dict[str, Any]], cached: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    bars = {f"one loader, {each['case']}": each for each in spread}
    bars |= {f"{PEERS} peers, {CASES[each['case']]}": each for each in cached}
    medians = [each["million_tokens_per_second"] for each in bars.values()]
    spreads = [
        [median - each["lowest"] for median, each in zip(medians, bars.values(), strict=True)],
        [each["highest"] - median for median, each in zip(medians, bars.values(), strict=True)],
    ]
    colours = ["C0"] * len(spread) + ["C1"] * len(cached)
    axes.barh(list(bars), medians, xerr=spreads, color=colours, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("million tokens/s, to all readers together")
