"""Measure what it costs to ask for tokens, to be scraped and to log every request.

One request at a time over one connection, as `latency` asks, of three servers. Metrics are scraped as often
as `docker/prometheus` does.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from corpus_client import Network
from corpus_server.access import Limits, make_token
from scripts.benchmarks import corpus
from scripts.benchmarks.contest import NOW, contest, resident_corpus, shapes_of
from scripts.benchmarks.measure import CPU, P50, SPEED, Rounds
from scripts.benchmarks.ours import OneAtATime
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import Server, serving
from scripts.processes import get

HELP = "cost of tokens, metrics that are scraped, and a log of every request"

SCRAPED = "ours, with tokens, scraped"
LOGGED = "ours, every request logged"
AT_LEAST = 0.97
SCRAPE_SECONDS = 15.0
COLUMNS = {SPEED: ("10^6 tokens/s", ".1f"), P50: ("p50 ms", ".3f"), CPU: ("CPU s / 10^9", ".2f")}


class Scraped(OneAtATime):
    """One request at a time, while somebody else scrapes the server's metrics."""

    def __init__(self, *asked: Any, token: str, url: str) -> None:
        super().__init__(*asked, network=Network(auth=token))
        self._scraping = (url, {"Authorization": f"Bearer {token}"})
        self._scraped_at = 0.0

    def next(self) -> torch.Tensor:
        # Only in turns of this contender: otherwise the others would pay for it, too.
        if time.monotonic() - self._scraped_at > SCRAPE_SECONDS:
            self._scraped_at = time.monotonic()
            threading.Thread(target=self._scrape, daemon=True).start()
        return super().next()

    def _scrape(self) -> None:
        url, headers = self._scraping
        if b"corpus_requests_total" not in get(url, "/metrics", headers=headers):
            raise RuntimeError("/metrics must count requests")


def measure(options: Options) -> Report:
    """Measure the small and the large batch."""
    options = options.in_force()
    path = resident_corpus(options)
    tables, targets, data = [], [], {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-tokens-")))
        token, table = make_token("bench", ["read:*", "plans", "metrics"], None, Limits())
        (folder / "tokens.toml").write_text(table)

        def serve(*arguments: str) -> Server:
            return stack.enter_context(serving({corpus.NAME: path}, arguments=arguments))

        plain, scraped = serve(), serve("--tokens", str(folder / "tokens.toml"))
        logged = serve("--access-log", "all", "--log-level", "info")
        for shape in shapes_of(options):
            rounds = Rounds(f"one request of {shape} at a time", COLUMNS)
            makers = [
                lambda shape=shape: OneAtATime(NOW, plain, shape, path),
                lambda shape=shape: Scraped(SCRAPED, scraped, shape, path, token=token, url=scraped.url),
                lambda shape=shape: OneAtATime(LOGGED, logged, shape, path),
            ]
            contest(rounds, shape, path, options, makers)
            tables += [rounds.table(), rounds.ratio_table([(SCRAPED, NOW), (LOGGED, NOW)])]
            targets.append(rounds.target(SCRAPED, SPEED, "at least", AT_LEAST, to=NOW))
            data[str(shape)] = rounds.summary()
    return Report(data=data, tables=tables, targets=targets)
