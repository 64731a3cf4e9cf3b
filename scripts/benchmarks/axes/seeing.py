"""Measure what it costs to ask for tokens, to be scraped and to log every request.

One request at a time over one connection, as `latency` asks. Metrics are scraped as often as
`docker/prometheus` does. Two server processes of the same kind differ by some 5 %, by where their memory
happens to lie; so each round starts its own, and a second one without anything shows what chance does.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from corpus_client import Network
from corpus_server.admission.access import make_token
from corpus_server.admission.request import Limits
from scripts.benchmarks import corpus
from scripts.benchmarks.contest import NOW, Maker, contest, resident_corpus, shapes_of
from scripts.benchmarks.measure import CPU, P50, SPEED, Rounds
from scripts.benchmarks.ours import OneAtATime
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import Server, serving
from scripts.processes import get

HELP = "cost of tokens, metrics that are scraped, and a log of every request"

AGAIN = "ours, a second server"
SCRAPED = "ours, with tokens, scraped"
LOGGED = "ours, every request logged"
AT_LEAST = 0.97
SCRAPE_SECONDS = 15.0
COLUMNS = {SPEED: ("10^6 tokens/s", ".1f"), P50: ("p50 ms", ".3f"), CPU: ("CPU s / 10^9", ".2f")}


class Scraped(OneAtATime):
    """One request at a time, while somebody else scrapes the server's metrics.

    Args:
        scraped_at: the second of the last scrape, alone in a list; rounds share it.
    """

    def __init__(self, *asked: Any, token: str, url: str, scraped_at: list[float]) -> None:
        super().__init__(*asked, network=Network(auth=token))
        self._scraping = (url, {"Authorization": f"Bearer {token}"})
        self._scraped_at = scraped_at

    def next(self) -> torch.Tensor:
        # Only in turns of this contender: otherwise the others would pay for it, too.
        if time.monotonic() - self._scraped_at[0] > SCRAPE_SECONDS:
            self._scraped_at[0] = time.monotonic()
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
    token, table = make_token("bench", ["read:*", "plans", "metrics"], None, Limits())
    tables, targets, data = [], [], {}
    with TemporaryDirectory(prefix="bench-tokens-") as folder:
        tokens = Path(folder) / "tokens.toml"
        tokens.write_text(table)
        for shape in shapes_of(options):
            rounds = Rounds(f"one request of {shape} at a time", COLUMNS)
            scraped_at = [0.0]
            for number in range(options.rounds):
                with ExitStack() as stack:

                    def serve(*arguments: str, stack: ExitStack = stack) -> Server:
                        return stack.enter_context(serving({corpus.NAME: path}, arguments=arguments))

                    plain, again, scraped = serve(), serve(), serve("--tokens", str(tokens))
                    logged = serve("--access-log", "all", "--log-level", "info")
                    makers: list[Maker] = [
                        partial(OneAtATime, NOW, plain, shape, path),
                        partial(OneAtATime, AGAIN, again, shape, path),
                        partial(
                            Scraped,
                            *(SCRAPED, scraped, shape, path),
                            token=token,
                            url=scraped.url,
                            scraped_at=scraped_at,
                        ),
                        partial(OneAtATime, LOGGED, logged, shape, path),
                    ]
                    order = makers if number % 2 == 0 else makers[::-1]
                    contest(rounds, shape, path, replace(options, rounds=1), order)
            tables += [rounds.table(), rounds.ratio_table([(name, NOW) for name in (AGAIN, SCRAPED, LOGGED)])]
            targets.append(rounds.target(SCRAPED, SPEED, "at least", AT_LEAST, to=NOW))
            data[str(shape)] = rounds.summary()
    return Report(data=data, tables=tables, targets=targets)
