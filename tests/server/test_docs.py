"""The docs say what the code does."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.http.connection import Connection
from corpus_server.plan import Plan
from corpus_server.responses.service import Service
from corpus_server.settings import Settings
from corpus_server.work import Budget
from tests.corpora import write_raw
from tests.layers import chapter, entered
from tests.server.test_imports import LEVELS, PACKAGE
from tests.serving import ROOT
from tests.tables import TABLES, renewed

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_of_a_page_are_those_of_the_code(page: str) -> None:
    """`python -m tests.tables` renews them."""
    text = (ROOT / "docs" / page).read_text()
    assert renewed(page, text) == text


def test_links_lead_to_files_of_the_checkout() -> None:
    """As somebody reads the pages who has no site: each link names a file, seen from the page's folder."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "client" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    broken = []
    for page in pages:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.partition("#")[0]
            if path and "://" not in target and not (page.parent / path).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_the_picture_of_a_bounded_shuffle_is_that_of_the_code(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", np.arange(11))
    order = {"shuffle": {"block_windows": 3, "group_blocks": 2}}
    stages = [{"global_batch_size": 10, "mixture": {"a": 1}}]
    with Catalog.open([CorpusSpec(name="a", path=path)]) as catalog:
        document = {"seq_len": 1, "seed": 0, "order": order, "stages": stages}
        plan = catalog.bind(Plan.from_json(document), budget=Budget())
        windows = plan.sampler.locate(0)[0][:, 1].tolist()
    drawn = chapter((ROOT / "docs" / "plans.md").read_text(), "Bounded shuffle")
    line = drawn.partition("\n    window ")[2].partition("\n")[0]
    assert [int(each) for each in re.findall(r"\d+", line)] == windows
    groups = drawn.partition("blocks of the group ")[2].partition("\n")[0].split("|")
    sizes = [len(part.split()) for part in line.split("|")]
    assert sum(sizes) == 10
    first, second = ({int(each) for each in re.findall(r"\d+", group)} for group in groups)
    assert {each // 3 for each in windows[: sizes[0]]} == first
    assert {each // 3 for each in windows[sizes[0] :]} == second


def test_the_layers_are_drawn_in_the_order_of_the_imports() -> None:
    block = re.findall(r"(?:^    .*\n)+", chapter(ARCHITECTURE, "Layers"), re.MULTILINE)[0]
    drawn = [set(re.split(" {3,}", line.strip())[0].split()) for line in block.splitlines()]
    assert [level - {"__init__"} for level in reversed(LEVELS)] == drawn


def test_a_request_passes_the_files_that_the_chapter_names(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", np.arange(6000))
    settings = Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path, read_ahead_bytes=0)

    async def ask_twice(service: Service, way: SimpleNamespace) -> None:
        shared = SimpleNamespace(connections=set(), default_headers=[])
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(service, None, shared), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        # The first request binds the plan; the way of all others is what the chapter shows.
        for way.recording in (False, True):
            target = "/v1/batches?corpus=web&seq_len=4&batch_size=2&step=3&checksum=tail"
            writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2 * 5 * 2 + 8)
            while service.admission.slots:
                await asyncio.sleep(0.01)
        way.recording = False
        writer.close()
        server.close()

    with entered(PACKAGE) as way, Service.open(settings) as service:
        asyncio.run(ask_twice(service, way))
    files = {file for file, _ in way.functions}
    page = chapter(ARCHITECTURE, "The way of a request")
    said = re.search(r"enters (\d+) functions of (\d+) files, at most (\d+) of\s+them deep", page)
    assert said is not None
    assert len(files) == int(said[2])
    assert len(way.functions) <= int(said[1])  # some are entered only where a thread had to wait
    assert way.depth <= int(said[3])
    numbered = re.findall(r"^ +(\d+)  ([\w/]+\.py) ", page, re.MULTILINE)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    assert len(numbered) <= 12
    helpers = "".join(re.findall(r"^- .*\n", page, re.MULTILINE))
    assert files == {name for _, name in numbered} | set(re.findall(r"`([\w/]+\.py)`", helpers))
