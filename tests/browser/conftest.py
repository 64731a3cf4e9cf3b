"""A browser and servers for tests of the page; skipped where Chromium is not installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, sync_playwright

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.index import index
from corpus_server.tools.viewing.make import make_view
from tests.browser.tab import PLAN, RUN, Opened
from tests.corpora import spec, write_raw
from tests.metadata import write_metadata
from tests.recorded import Record, write_part
from tests.serving import ROOT, RunningServer, run_here

CHROMIUM = shutil.which("chromium")

HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "</div></main><h1>Forged</h1>",
    "\u202eturned around\u202c and \u2066isolated\u2069 \u200bzero\ufeff",
    "\x01\x02\x1b[31m\x7f control",
    "{{ 7 * 7 }} ${7 * 7} javascript:window.pwned=1",
    "&lt;b&gt; &amp; \"quoted\" 'single' `ticks`",
]

SAMPLED = np.full(1_500_000, ord("-"), np.uint8)  # more than a search reads
HASH = -(2**63) + 1  # a number of JavaScript would round it


def write_documents(path: Path, texts: list[str]) -> str:
    """Write texts as bytes with an index of documents; return what `serve` is given."""
    data = b"".join(text.replace("\0", "").encode() + b"\0" for text in texts)
    write_raw(path, np.frombuffer(data, np.uint8), dtype="uint8")
    index(spec(path, dtype="uint8", eot=0))
    return f"{path},dtype=uint8"


@pytest.fixture(scope="session")
def chromium() -> str:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    return CHROMIUM


@pytest.fixture(scope="module")  # Playwright runs an event loop in this thread, in which others could not run
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """What all files show; a test may add plans and runs, and counts only what is its own or in `plans`."""
    folder = tmp_path_factory.mktemp("page")
    pages = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    names = [f"doc {number}" for number in range(len(pages))]
    write_metadata(
        folder / "documents.docs.bin",
        {"id": names, "license": ["Apache-2.0"] * len(names), "hash": [HASH] * len(names)},
    )
    hostile = [*HOSTILE[:5], "x" * 5000, HOSTILE[6]] * 40
    write_metadata(folder / "documents.hostile.bin", {"id": hostile, "source": hostile, HOSTILE[1]: hostile})
    corpora: dict[str, Path | str] = {
        "docs": write_documents(folder / "docs.bin", pages),
        "hostile": write_documents(folder / "hostile.bin", HOSTILE * 40),
        "sampled": f"{write_raw(folder / 'sampled.bin', SAMPLED, dtype='uint8')},dtype=uint8",
    }
    masked = write_raw(
        folder / "masked.bin", np.frombuffer(b"asked: answered" * 200, np.uint8), dtype="uint8"
    )
    np.save(folder / "masked.bin.mask.npy", np.tile(np.arange(15) > 6, 200))
    corpora["masked"] = f"{masked},dtype=uint8"
    first = write_raw(folder / "first.bin", np.frombuffer(b"\0one\0two\0three", np.uint8), dtype="uint8")
    index(spec(first, dtype="uint8", eot=0, eot_at="first"))
    corpora["first"] = f"{first},dtype=uint8"
    view = folder / "chosen.view"
    with Corpus.open(spec(folder / "hostile.bin", dtype="uint8")) as corpus:
        make_view(corpus, np.arange(len(hostile), dtype=np.uint16) % 2, view, made={"where": HOSTILE[0]})
    corpora["chosen"] = f"{corpora['hostile']},view={view}"
    arguments = ["--record-dir", str(folder / "losses"), "--report-dir", str(folder / "reports")]
    with RunningServer(corpora, folder, arguments=arguments) as server:
        yield server


@pytest.fixture(scope="session")
def plans(server: RunningServer) -> dict[str, str]:
    """Plans of a run and of a tool, which have read a step of each; a recorded loss of step 17 jumps."""
    ids = {}
    for name, document in {"plan": PLAN, "other": {**PLAN, "skip_steps": [[10, 12]]}}.items():
        for run in (RUN, "bench"):
            named = {"Corpus-Run": run}
            posted = server.get("/v1/plans", method="POST", body=json.dumps(document).encode(), headers=named)
            ids[name] = posted.json()["id"]
            server.get("/v1/batches", plan=ids[name], step=1, headers=named)
    for name, source in {
        "whole": "hostile",
        "viewed": "chosen",
        "sampled": "sampled",
        "masked": "masked",
    }.items():
        stage = {"from_step": 0, "global_batch_size": 8, "mixture": {source: 1}}
        body = json.dumps({"seq_len": 64, "seed": 3, "stages": [stage]}).encode()
        posted = server.get("/v1/plans", method="POST", body=body, headers={"Corpus-Run": "bench"})
        ids[name] = posted.json()["id"]
    left_out = {**PLAN["stages"][0], "exclude": {"hostile": [[0, 400]]}}
    ids["left_out"] = server.post_plan({**PLAN, "stages": [left_out]}).json()["id"]
    records = []
    for step in range(30):
        for row in server.get(f"/v1/plans/{ids['plan']}/rows", step=step, count=8).json()["rows"]:
            loss = 2 + (row["corpus"] == "hostile") + (step + row["row"]) % 5 / 20
            records.append(
                Record(step, row["row"], row["corpus"], 9 if (step, row["row"]) == (17, 3) else loss)
            )
    write_part(server.folder / "losses" / "run 1", records, plan=ids["plan"])
    items = server.folder / "hostile.jsonl"
    items.write_text("".join(json.dumps({"text": f"{each} and what is nowhere"}) + "\n" for each in HOSTILE))
    corpus = f"hostile={server.folder / 'hostile.bin'},dtype=uint8,tokenizer=bytes"
    asked = ("--items", items, "--plan", ids["plan"], "--before-step", "30", "--server", server.url)
    done = run_here(
        "find",
        corpus,
        *asked,
        "-n",
        "13",
        "--places",
        "5",
        "--out",
        server.folder / "reports" / "<b>bench mark",
    )
    assert done.returncode == 0, done.stderr
    return ids


@pytest.fixture(scope="module")
def tab(browser: Browser, server: RunningServer) -> Iterator[Opened]:
    tab = Opened(browser, server)
    yield tab
    tab.context.close()


@pytest.fixture
def opened(tab: Opened) -> Iterator[Opened]:
    """The tab of the file, without a view; nothing may go wrong there."""
    yield tab
    problems = [*tab.problems]
    tab.reset()
    assert problems == []
