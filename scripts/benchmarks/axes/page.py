"""Measure the page: how long the server works for the first look at each view, and what that costs batches.

A browser opens each view once over a sparse corpus of 10^12 tokens, and says what it asked for. The same
requests are then timed one after another, without the browser. For the second figure the server answers one
request of 64 x 1,025 at a time, alone and while one person opens a view every five seconds and another one
follows `Live`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from scripts.benchmarks import corpus
from scripts.benchmarks.contest import NOW, contest, resident_corpus, shapes_of
from scripts.benchmarks.measure import P50, P99, SPEED, Rounds
from scripts.benchmarks.ours import OneAtATime
from scripts.benchmarks.report import Options, Report, Target
from scripts.benchmarks.servers import Server, serving
from scripts.benchmarks.visiting import FOLLOWED, ask
from scripts.processes import running

if TYPE_CHECKING:
    from playwright.sync_api import Request

HELP = "server time of the page's views on 10^12 tokens, and p99 of batches while it is used"

NUM_TOKENS, QUICK_TOKENS = 10**12, 10**7
HUGE = "huge"
VISITED = "ours, page in use"
MOST_MS, MOST_RATIO = 300.0, 1.1
VISIT_SECONDS = 5.0
"""Between two views that one person opens."""

TURN_SECONDS = 10.0
"""Of a turn: at least two views are opened in each."""

Asked = tuple[str, str | None]
"""Path and body of a request."""

TIME = "server_ms"
COLUMNS = {SPEED: ("10^6 tokens/s", ".1f"), P50: ("p50 ms", ".3f"), P99: ("p99 ms", ".3f")}


class Visited(OneAtATime):
    """One request at a time, while the page is used."""

    def __init__(self, *asked: Any, visitor: subprocess.Popen[bytes]) -> None:
        super().__init__(*asked)
        self._visitor = visitor
        self._visited_at = 0.0

    def next(self) -> torch.Tensor:
        # Only in turns of this contender: otherwise the other would pay for it, too.
        if time.monotonic() - self._visited_at > VISIT_SECONDS:
            self._visited_at = time.monotonic()
            if self._visitor.poll() is not None or self._visitor.stdin is None:
                raise RuntimeError("whoever uses the page must not end before the measurement")
            self._visitor.stdin.write(b"\n")
            self._visitor.stdin.flush()
        return super().next()


def measure(options: Options) -> Report:
    """Measure every view, then batches with the page in use and without, in turn."""
    if (chromium := shutil.which("chromium")) is None:
        raise SystemExit("the axis page needs a browser (Debian: apt-get install chromium)")
    seconds = options.seconds if options.quick else max(options.seconds, TURN_SECONDS)
    options = options.in_force()
    num_tokens = QUICK_TOKENS if options.quick else NUM_TOKENS
    small, huge = resident_corpus(options), corpus.sparse(options.cache, num_tokens)
    shape = shapes_of(options)[0]
    times = Rounds(f"one look at a view, {num_tokens:.0e} tokens", {TIME: ("server ms", ".1f")})
    batches = Rounds(f"one request of {shape} at a time", COLUMNS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-page-")))
        plain = stack.enter_context(serving({corpus.NAME: small, HUGE: huge}))
        used = stack.enter_context(serving({corpus.NAME: small, HUGE: huge}))
        views = opened(used, chromium)
        for _ in range(options.rounds):
            for view, asked in views.items():
                times.add(view, {TIME: sum(_milliseconds(used, *each) for each in asked)})
        (folder / "views.json").write_text(json.dumps(list(views.values())))
        command = [sys.executable, "-m", "scripts.benchmarks.visiting", used.url, str(folder / "views.json")]
        visitor = stack.enter_context(running(command, stdin=subprocess.PIPE))
        makers = [
            lambda: OneAtATime(NOW, plain, shape, small),
            lambda: Visited(VISITED, used, shape, small, visitor=visitor),
        ]
        if not options.quick:
            options = replace(options, seconds=seconds)
        contest(batches, shape, small, options, makers)
    targets = [
        Target(figure=f"{view}, median ms", reached=found, bound="at most", wanted=MOST_MS)
        for view, found in ((view, times.spread(view, TIME)["median"]) for view in views)
    ]
    return Report(
        data={"views": times.summary(), "batches": batches.summary(), "requests": views},
        tables=[times.table(), batches.table(), batches.ratio_table([(VISITED, NOW)])],
        targets=[*targets, batches.target(VISITED, P99, "at most", MOST_RATIO, to=NOW)],
        notes=[
            "Server time is the sum over all requests of a view: HTML, scripts, styles, and what they ask.",
            "The sparse corpus has no index of documents and no tokenizer: lengths of documents and a search "
            "are not part of its views.",
        ],
    )


def opened(server: Server, chromium: str) -> dict[str, list[Asked]]:
    """Open each view in a browser; return what it asked the server for."""
    from playwright.sync_api import sync_playwright

    mixture = {HUGE: 0.75, corpus.NAME: 0.25}
    plan = {"seq_len": 128, "stages": [{"global_batch_size": 64, "mixture": mixture}]}
    ids = [server.post_plan({**plan, "seed": seed}) for seed in (1, 2)]
    addresses = {
        "corpora": "/",
        "corpus": f"/page/corpora/{HUGE}?start={10**6}",
        "plans": "/page/plans",
        "plan": f"/page/plans/{ids[0]}",
        "new plan": "/page/plans/new",
        "step": f"/page/plans/{ids[0]}/steps/{10**6}",
        "skimmed": f"/page/plans/{ids[0]}/steps/5?until=12",
        "difference": f"/page/plans/{ids[0]}/diff/{ids[1]}",
        "look-up": f"/page/lookup?plan={ids[0]}&corpus={HUGE}&token={10**6}",
        "live": "/page/live",
    }
    found: dict[str, list[Asked]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for view, address in addresses.items():
            asked: list[Asked] = []
            page = browser.new_page()
            page.on("request", partial(_note, asked))
            page.goto(server.url + address)
            page.locator(".request, #verdict table").first.wait_for()
            page.wait_for_timeout(500)
            # The whole hour stands for the stream, which has no end.
            found[view] = [
                (path.removeprefix(server.url).replace(FOLLOWED, "/v1/live"), body) for path, body in asked
            ]
            page.close()
        browser.close()
    return found


def _note(asked: list[Asked], request: Request) -> None:
    asked.append((request.url, request.post_data))


def _milliseconds(server: Server, path: str, body: str | None) -> float:
    began = time.perf_counter()
    ask(server.url, path, body)
    return (time.perf_counter() - began) * 1e3
