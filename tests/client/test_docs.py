"""docs/architecture.md and the client's README say what the client's code does."""

from __future__ import annotations

import re
from collections.abc import Callable

from corpus_client import CorpusLoader
from tests import layers
from tests.client.test_imports import LEVELS, PACKAGE
from tests.serving import ROOT

CHAPTER = layers.chapter((ROOT / "docs" / "architecture.md").read_text(), "The client")
README = (ROOT / "client" / "README.md").read_text()


def test_the_layers_are_drawn_in_the_order_of_the_imports() -> None:
    block = re.findall(r"(?:^    .*\n)+", CHAPTER, re.MULTILINE)[0]
    drawn = [set(line[4:39].split()) for line in block.splitlines()]  # then what each layer is for
    assert [level for level in reversed(LEVELS) if level != {"__init__"}] == drawn


def test_the_readme_lists_every_file_from_the_ground_up() -> None:
    folder, listed = "", []
    for indent, name in re.findall(
        r"^    ( *)([\w/]+(?:\.py|/)) ", layers.chapter(README, "Inside"), re.MULTILINE
    ):
        if name.endswith("/"):
            folder = name
        else:
            listed.append(f"{folder if indent else ''}{name}")
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for name in files if not name.endswith("__init__.py")}
    levels = [layers.level(layers.module_of(name), LEVELS) for name in listed]
    assert levels == sorted(levels)


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
