"""The one list of formats."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import fields
from pathlib import Path

import pytest

from corpus_server.corpus import formats
from corpus_server.corpus.formats import raw
from corpus_server.corpus.formats.registry import FORMATS, is_side_file, side_file
from corpus_server.errors import UnreadableCorpus
from tests.corpora import open_files, recognise, write_megatron


def test_every_file_that_exports_a_format_is_listed_and_raw_comes_last() -> None:
    """Without its line in the registry a format would be read as raw tokens."""
    modules = [
        importlib.import_module(f"{formats.__name__}.{module.name}")
        for module in pkgutil.iter_modules(formats.__path__)
    ]
    exported = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    assert len(exported) == len(FORMATS)
    assert all(each in FORMATS for each in exported)
    assert FORMATS[-1] is raw.FORMAT


def test_the_guide_for_a_new_format_names_the_fields_that_there_are() -> None:
    guide = (Path(__file__).parents[4] / "CONTRIBUTING.md").read_text()
    (shown,) = re.findall(r"FORMAT: Final = Format\((.*?)\n +\)", guide, re.DOTALL)
    named = re.findall(r"^ +(\w+)=", shown, re.MULTILINE)
    assert named == [each.name for each in fields(formats.layout.Format)]


def test_side_files_are_told_by_their_formats() -> None:
    assert side_file(Path("x.idx")) == "a Megatron index"
    assert side_file(Path("tokenizer.json")) is None
    assert is_side_file(Path("tokenizer.json"))
    assert not is_side_file(Path("train.bin"))


def test_nothing_stays_open_after_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(3))
    path = write_megatron(tmp_path / "y", [[1, 2]])
    before = open_files()
    for dtype, target in [(None, tmp_path / "x.bin"), ("int32", path), (None, tmp_path)]:
        with pytest.raises(UnreadableCorpus) as caught:
            recognise(target, dtype=dtype)
        assert not open_files() - before
        assert caught.tb is not None  # it would keep a file open that nobody has closed
