"""Take the pictures of the page in docs/images: each view, light and dark, and on a phone.

    .venv/bin/python -m scripts.page_images [VIEW ...]

Needs Debian's chromium. The corpus is the quick start's. For two minutes before the pictures are taken, four
ranks read a plan and somebody asks for what is refused, so that the live view has something to show. The
recorded losses are made up.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from corpus_client import CorpusLoader
from scripts.processes import HOST, ROOT, claim_port, connect, is_ready, running
from scripts.quickstart_lib import text

IMAGES = ROOT / "docs" / "images"
CORPUS_MB = 12
TRAFFIC_SECONDS = 120.0
WORLD_SIZE = 4
RUN, AHEAD = "gpt2-124m-a", 40  # name of the training run, steps that it prefetches
QUALITY = 60
"""Of WebP: letters are still sharp, and all pictures together stay below a megabyte."""

FORMS = {"light": (1280, 860, "light"), "dark": (1280, 860, "dark"), "phone": (390, 844, "dark")}
"""Width, height and colours."""

STAGES = [
    {"from_step": 0, "global_batch_size": 16, "mixture": {"library": 0.85, "held-out": 0.15}},
    {"from_step": 600, "global_batch_size": 32, "mixture": {"library": 0.6, "held-out": 0.4}},
]
PLAN: dict[str, Any] = {"seq_len": 256, "seed": 1337, "stages": STAGES}


def main() -> None:
    """Serve, make traffic, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("view", nargs="*", help="all, if none is named")
    chosen = parser.parse_args().view
    corpus = text.build(ROOT / ".cache" / "quickstart" / "corpus", corpus_mb=CORPUS_MB, report=print)
    names = dict(zip(("library", "held-out"), text.SPLITS, strict=True))
    port = claim_port()
    url = f"http://{HOST}:{port}"
    with tempfile.TemporaryDirectory() as state:
        served = [f"{name}={corpus / split}" for name, split in names.items()]
        command = [sys.executable, "-m", "corpus_server", "serve", *served, "--port", str(port)]
        command += ["--workers", "2", "--state-dir", state, "--log-level", "warning", "--record-dir", state]
        command += ["--report-dir", state]
        with running(command, ready=partial(is_ready, url)), sync_playwright() as playwright:
            plans = [post(url, each, run) for each, run in variants()]
            record(url, Path(state, "run-17"))
            report(url, corpus, plans[0], Path(state, "benchmark"))
            chromium = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            with training(url, plans[0]):
                if not chosen or "live" in chosen:
                    time.sleep(TRAFFIC_SECONDS)
                for view, address in addresses(plans).items():
                    if not chosen or view in chosen:
                        take(browser, url, view, address)
            browser.close()
    print(f"{sum(path.stat().st_size for path in IMAGES.glob('*.webp')) / 1e3:.0f} kB in {IMAGES}")


def variants() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the plans that the list shows and the runs that have them, the one of the training run first."""
    yield PLAN, RUN
    yield {**PLAN, "skip_steps": [[120, 124]]}, RUN
    yield {**PLAN, "order": {"shuffle": {"block_windows": 64, "group_blocks": 8}}}, "bounded"
    held_out = {"global_batch_size": 8, "mixture": {"held-out": 1}}
    yield {"seq_len": 128, "order": "sequential", "stages": [held_out]}, "doctor"


def addresses(plans: list[str]) -> dict[str, str]:
    """Return the address of each view."""
    return {
        "corpora": "/",
        "corpus": "/page/corpora/library?document=3",
        "plans": "/page/plans",
        "plan": f"/page/plans/{plans[0]}",
        "new": "/page/plans/new",
        "step": f"/page/plans/{plans[0]}/steps/125",
        "spike": f"/page/plans/{plans[0]}/steps/125",
        "diff": f"/page/plans/{plans[0]}/diff/{plans[1]}",
        "lookup": f"/page/lookup?plan={plans[0]}&corpus=library&document=3&epochs=2",
        "recording": "/page/recordings/run-17",
        "report": "/page/reports/benchmark",
        "live": "/page/live",
    }


def take(browser: Browser, url: str, view: str, address: str) -> None:
    """Take the pictures of a view."""
    for form, (width, height, colours) in FORMS.items():
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if colours == "dark" else "light"
        )
        page = context.new_page()
        page.goto(url + address)
        page.locator(".request, #verdict table").first.wait_for()  # the form of a plan asks only later
        if view == "spike":
            page.get_by_text("Find spikes of a loss curve").click()
            page.get_by_label("Lines of step,loss").fill(losses())
            page.locator("#curve button").first.click()
        if view == "report":
            page.get_by_role("button", name="Show the text").first.click()
        page.evaluate("scrollTo(0, 0)")  # a click scrolls to its button
        page.wait_for_timeout(1500)  # charts are drawn, and the first event has come
        is_whole = (form != "phone" and view == "live") or (view, form) == ("recording", "light")
        picture = Image.open(io.BytesIO(page.screenshot(full_page=is_whole))).convert("RGB")
        IMAGES.mkdir(exist_ok=True)
        picture.save(IMAGES / f"{view}-{form}.webp", quality=QUALITY, method=6)
        context.close()


def losses() -> str:
    """Return a loss curve with a spike at step 125."""
    noise = itertools.cycle((0.03, -0.05, 0.01, 0.06, -0.02, -0.04, 0.02))
    return "\n".join(
        f"{step},{2.1 + 5 * 0.99**step + next(noise) + (1.9 if step == 125 else 0):.3f}"
        for step in range(300)
    )


def record(url: str, folder: Path) -> None:
    """Record losses of 900 steps: the sources differ, and a row of some steps loses much."""
    draw = torch.Generator().manual_seed(1)
    with CorpusLoader(
        url, plan=PLAN, num_steps=900, sources=True, record_dir=folder, device="cpu", dtype=None
    ) as loader:
        for batch in loader:
            level = torch.tensor([2.1, 2.6])[batch.sources] + 5 * 0.99**batch.step
            found = level + 0.2 * torch.randn(len(level), generator=draw)
            if batch.step % 200 == 125:
                found[batch.step % 16] += 3
            loader.record(batch.step, found)


def report(url: str, corpus: Path, plan: str, folder: Path) -> None:
    """Look for items of which some stand in the corpus, and for the steps that saw them."""
    documents = list(text.documents(CORPUS_MB * 1_000_000))
    items = folder.with_suffix(".jsonl")
    with items.open("w") as file:
        for number, document in enumerate(documents[20:400:40]):
            copied = document[len(document) // 2 :][: 320 - 25 * number]
            file.write(
                json.dumps({"text": f"Go on with this text: {copied} What comes next, and why?"}) + "\n"
            )
    command = [sys.executable, "-m", "corpus_server", "find", f"library={corpus / text.SPLITS[0]}"]
    command += ["--items", items.name, "--out", str(folder), "--plan", plan, "--before-step", "700"]
    command += ["--server", url]
    subprocess.run(command, cwd=folder.parent, check=True, stdout=subprocess.DEVNULL)


def post(url: str, document: dict[str, Any], run: str) -> str:
    """Post a plan; return its id."""
    with closing(connect(url)) as connection:
        connection.request("POST", "/v1/plans", json.dumps(document).encode(), {"Corpus-Run": run})
        return str(json.loads(connection.getresponse().read())["id"])


@contextmanager
def training(url: str, plan: str) -> Iterator[None]:
    """Read a plan as `WORLD_SIZE` ranks do, until the block ends."""
    ends = threading.Barrier(WORLD_SIZE)
    ranks = [threading.Thread(target=train, args=(url, plan, rank, ends)) for rank in range(WORLD_SIZE)]
    for rank in ranks:
        rank.start()
    try:
        yield
    finally:
        ends.abort()
        for rank in ranks:
            rank.join()


def train(url: str, plan: str, rank: int, ranks: threading.Barrier) -> None:
    """Ask for one step after another, now quickly and now slowly; the ranks wait for each other at each."""
    with closing(connect(url)) as connection:
        for step in itertools.count(100):
            query = {"plan": plan, "step": step, "rank": rank, "world_size": WORLD_SIZE}
            if step % 97 == 50 and rank == 0:
                query["count"] = 9999
            said = {"Corpus-Run": RUN, "Corpus-Trained-Step": str(step - AHEAD)}
            connection.request("GET", f"/v1/batches?{urlencode(query)}", headers=said)
            connection.getresponse().read()
            time.sleep(0.02 + 0.015 * (time.time() // 20 % 3))
            try:
                ranks.wait()
            except threading.BrokenBarrierError:
                return


if __name__ == "__main__":
    main()
