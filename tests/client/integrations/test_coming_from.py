"""The loops of docs/start/coming-from.md run as they stand there, and have the rows that the page says.

Each needs the package that wrote the files; the memmap needs none.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import CorpusLoader, make_plan
from tests.layers import chapter
from tests.serving import ROOT

PAGE = (ROOT / "docs" / "start" / "coming-from.md").read_text()
SEQ_LEN, ROWS = 128, 8
NUM_STEPS = 60
NAMES = {
    "np": np,
    "torch": torch,
    "DataLoader": DataLoader,
    "CorpusLoader": CorpusLoader,
    "make_plan": make_plan,
}


class Enough(Exception):
    """The loop has run long enough."""


def rows_of(code: str, names: dict[str, Any], num_steps: int = NUM_STEPS) -> npt.NDArray[np.int64]:
    """Run a loop of the page; return the rows that its model saw, `(steps, rows, seq_len + 1)`."""
    seen = []

    def model(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (ROWS, SEQ_LEN)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen.append(torch.cat((inputs, targets[:, -1:]), dim=1).numpy().copy())
        if len(seen) == num_steps:
            raise Enough

    found = {**NAMES, **names, "model": model}
    with warnings.catch_warnings(action="ignore"), pytest.raises(Enough):
        exec(compile(code, "coming-from.md", "exec"), found)
    return np.array(seen, np.int64)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where the files lie; the loader's server keeps its own files there, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    program = tmp_path / "bin" / "corpus-server"  # .venv-integrations sees the package, and has no program
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m corpus_server "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def loops(heading: str) -> tuple[str, str]:
    """Return the two loops of a chapter."""
    blocks = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", chapter(PAGE, heading), re.MULTILINE)
    before, after = (re.sub("^    ", "", each, flags=re.MULTILINE) for each in blocks)
    return before, after


def tokens_of(num_tokens: int, dtype: str) -> npt.NDArray[Any]:
    return np.random.default_rng(5).integers(0, 50_000, num_tokens).astype(dtype)


def package(name: str) -> Any:
    """Return a package; skip where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed here")


def test_a_memmap() -> None:
    np.arange(40_000, dtype=np.uint16).tofile("train.bin")  # a token is its place
    before, after = loops("A memmap")
    by_itself = rows_of(before, {})
    shuffled = rows_of(after, {}, num_steps=39)  # of 312 windows of an epoch
    drawn = rows_of(after.replace("global_batch_size=8", 'global_batch_size=8, order="random"'), {})
    for rows in (by_itself, shuffled, drawn):
        assert (np.diff(rows) == 1).all(), "a row is a window of the file"
    starts = shuffled[:, :, 0].ravel()
    assert sorted(starts) == list(range(0, 312 * SEQ_LEN, SEQ_LEN)), "each window once"
    assert len(set(drawn[:, :, 0].ravel() % SEQ_LEN)) > 64, "windows begin anywhere"


def write_mds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        # Streaming imports it for its pictures, and its wheel must fit the build of torch.
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            module = ModuleType(f"torchvision{name}")
            module.__spec__ = ModuleSpec(module.__name__, None)
            vars(module).update(VisionDataset=object, to_tensor=None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
    streaming = package("streaming")
    columns = {"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}
    with streaming.MDSWriter(out="mds", columns=columns, size_limit=1 << 15) as writer:
        for row in tokens_of(600 * (SEQ_LEN + 1), "uint16").reshape(600, -1):
            writer.write({"tokens": row})
    assert len(list(Path("mds").glob("*.mds"))) > 1
    return {"StreamingDataset": streaming.StreamingDataset}


def write_litdata(_: pytest.MonkeyPatch) -> dict[str, Any]:
    litdata = package("litdata")
    loader = package("litdata.streaming.item_loader").TokensLoader
    make = package("litdata.streaming.writer").BinaryWriter
    writer = make("lit", chunk_bytes=1 << 15, item_loader=loader())
    for number, document in enumerate(np.split(tokens_of(80_000, "int32"), range(300, 80_000, 300))):
        writer[number] = torch.from_numpy(document)
    writer.done()
    writer.merge()
    return {"litdata": litdata, "TokensLoader": loader}


def write_megatron(_: pytest.MonkeyPatch) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package("megatron.core.datasets.gpt_dataset")
        from megatron.core.datasets import blended_megatron_dataset_builder as builders
        from megatron.core.datasets import gpt_dataset, indexed_dataset

    class Tokenizer:
        vocab_size, eod, pad, special_tokens_dict = 50_001, 50_000, -1, {"eod": 50_000}
        unique_identifiers: dict[str, Any] = {}  # noqa: RUF012

    builder = indexed_dataset.IndexedDatasetBuilder("web.bin", dtype=np.int32)
    for document in np.split(tokens_of(60_000, "int32"), range(211, 60_000, 211)):
        builder.add_document(document, [document.size])
    builder.finalize("web.idx")
    return {**vars(builders), **vars(gpt_dataset), "tokenizer": Tokenizer()}


def write_arrow(_: pytest.MonkeyPatch) -> dict[str, Any]:
    datasets = package("datasets")
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    rows = tokens_of(600 * (SEQ_LEN + 1), "int32").reshape(600, -1)
    datasets.Dataset.from_dict({"input_ids": rows.tolist()}, features=features).save_to_disk("ids")
    return {"load_from_disk": datasets.load_from_disk}


@pytest.mark.parametrize(
    ("heading", "write"),
    [
        pytest.param("MosaicML Streaming", write_mds, id="streaming"),
        pytest.param("litData", write_litdata, id="litdata"),
        pytest.param("Megatron's datasets", write_megatron, id="megatron"),
        pytest.param("Hugging Face `IterableDataset`", write_arrow, id="datasets"),
    ],
)
def test_both_loops_have_the_same_rows(
    heading: str, write: Callable[[pytest.MonkeyPatch], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = write(monkeypatch)
    before, after = loops(heading)
    assert np.array_equal(rows_of(before, names), rows_of(after, names))


def test_every_chapter_is_run() -> None:
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert len(headings) == 5, "a chapter has a test here"
