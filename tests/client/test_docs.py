"""docs/architecture.md says what the client's code does."""

from __future__ import annotations

import re
from collections.abc import Callable

from corpus_client import CorpusLoader
from tests import layers
from tests.client.test_imports import LEVELS, PACKAGE
from tests.serving import ROOT

CHAPTER = layers.chapter((ROOT / "docs" / "architecture.md").read_text(), "The client")


def test_the_layers_are_drawn_in_the_order_of_the_imports() -> None:
    block = re.findall(r"(?:^    .*\n)+", CHAPTER, re.MULTILINE)[0]
    drawn = [set(line[4:39].split()) for line in block.splitlines()]  # then what each layer is for
    assert [level for level in reversed(LEVELS) if level != {"__init__"}] == drawn


def test_a_batch_passes_the_files_that_the_chapter_names(make_loader: Callable[..., CorpusLoader]) -> None:
    with layers.entered_files(PACKAGE) as (files, on):
        loader = make_loader(prefetch_bytes=1 << 14)
        next(loader)  # binds the plan and opens connections; the way of all others is what the chapter shows
        on.recording = True
        for _ in range(50):
            next(loader)
        on.recording = False
        loader.close()
    numbered = re.findall(r"^ +(\d+)  ([\w/]+\.py) ", CHAPTER, re.MULTILINE)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    helpers = re.findall(r"`([\w/]+\.py)`", "".join(re.findall(r"^- .*\n(?:  .*\n)*", CHAPTER, re.MULTILINE)))
    waited = {"observe/attribution.py"}  # entered only where a batch had to be waited for
    assert files | waited == {name for _, name in numbered} | set(helpers)
