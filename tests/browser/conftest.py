"""A browser and servers for tests of the page; skipped where Chromium is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, sync_playwright

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.index import index
from corpus_server.tools.viewing.make import make_view
from tests.corpora import spec, write_raw
from tests.metadata import write_metadata
from tests.serving import ROOT, RunningServer

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


@pytest.fixture(scope="module")  # Playwright runs an event loop in this thread, in which others could not run
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
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
