"""A loader that is given a path has the batches and the state of one that is given a URL."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import (
    ArrayLoader,
    CorpusIterableDataset,
    RemoteCorpus,
    errors,
    get_batch,
)
from tests.contract.by_path.processes import Corpora
from tests.contract.by_path.ranks import PLAN
from tests.contract.conftest import Replicas, make_loader, take
from tests.serving import RunningServer
from tests.views import write_corpus, write_view


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_the_same_batches_and_the_same_state_as_from_a_url(
    corpora: Corpora, replicas: Replicas, order: str
) -> None:
    with (
        make_loader(corpora["web"].path, corpus=None, order=order, num_steps=60) as here,
        make_loader(replicas["1 worker"], order=order, num_steps=60) as there,
    ):
        for (step, tokens), (expected_step, expected) in zip(take(here, 60), take(there, 60), strict=True):
            assert step == expected_step
            np.testing.assert_array_equal(tokens, expected)
        assert here.state_dict() == there.state_dict()
        # Tokens come from the files.
        assert 0 < here.stats().received_bytes < there.stats().received_bytes


def test_several_corpora_by_name(corpora: Corpora, replicas: Replicas, tmp_path: Path) -> None:
    """A mapping, or a configuration file, whose paths are relative to the file."""
    stage = {"from_step": 0, "global_batch_size": 24, "mixture": {"web": 0.5, "mixed": 0.5}}
    plan = {"seq_len": 16, "seed": 3, "order": "shuffle", "stages": [stage]}
    paths = {name: corpora[name].path for name in ("web", "mixed")}
    tables = [
        f'[corpora.{name}]\npath = "{os.path.relpath(path, tmp_path)}"\n' for name, path in paths.items()
    ]
    (tmp_path / "corpus.toml").write_text("".join(tables))
    options: dict[str, Any] = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0}
    with make_loader(replicas["1 worker"], plan=plan, **options) as there:
        expected = take(there, 40)
        for source in (paths, {name: str(path) for name, path in paths.items()}, tmp_path / "corpus.toml"):
            with make_loader(source, plan=plan, **options) as here:
                assert here.plan_id == there.plan_id
                for (_, ours), (_, theirs) in zip(take(here, 40), expected, strict=True):
                    np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(
        errors.InvalidArgument, match=r"corpus must be one of (web, mixed|mixed, web), or give weights"
    ):
        make_loader(paths, corpus=None)


def test_a_relative_path_a_pattern_and_a_name_with_special_characters(
    corpora: Corpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = corpora["web"].tokens
    (tmp_path / "in").mkdir()
    tokens.tofile(tmp_path / "in" / "a,b#1=[x].bin")
    monkeypatch.chdir(tmp_path)
    for source in (Path("in/a,b#1=[x].bin"), tmp_path / "in" / "a,b#1=[x].bin", "./in", "in/*.bin", "w=in"):
        with make_loader(source, corpus=None, order="sequential") as loader:
            np.testing.assert_array_equal(next(loader).tokens[0].numpy(), tokens[:17])


def test_rows_of_documents_and_options_of_a_corpus(corpora: Corpora) -> None:
    source = f"{corpora['docs'].path.with_suffix('')},eot=99"
    with make_loader(source, corpus=None, seq_len=4, global_batch_size=1, rows="documents") as loader:
        assert loader.sources == ("docs",)
        assert {10, 20, 30} & set(next(loader).inputs.flatten().tolist())


def test_a_view_is_read_through_the_server(tmp_path: Path) -> None:
    """Its rows lie in shards of its corpus, whose places the server resolves."""
    web = write_corpus(tmp_path / "web", [[30] * 50, [40] * 50])
    hq = write_view(web, [n % 3 for n in range(100)], tmp_path / "hq.view")
    source = {"web": f"{web},dtype=uint32", "hq": f"web?view={hq}"}
    with (
        RunningServer(source, tmp_path) as server,
        make_loader(server.url, corpus="hq") as there,
        make_loader(source, corpus="hq") as here,
    ):
        for (_, ours), (_, theirs) in zip(take(here, 10), take(there, 10), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_loaders_of_other_kinds_take_a_path(corpora: Corpora, replicas: Replicas) -> None:
    path = corpora["web"].path
    plan = {"seq_len": 16, "global_batch_size": 24, "seed": 7}
    with (
        ArrayLoader(path, **plan, rank=0, world_size=1) as here,
        ArrayLoader(replicas["1 worker"], corpus="web", **plan, rank=0, world_size=1) as there,
    ):
        for (ours, _), (theirs, _), _ in zip(here, there, range(20), strict=False):
            np.testing.assert_array_equal(ours, theirs)
    drawn = []
    for source in (path, replicas["1 worker"][0]):
        with contextlib.closing(RemoteCorpus(source, "web")) as remote:
            torch.manual_seed(3)
            drawn.append(get_batch(remote, 4, 16)[0])
    assert torch.equal(*drawn)


@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("spawn", 1)])
def test_under_a_dataloader(corpora: Corpora, replicas: Replicas, method: str, num_workers: int) -> None:
    dataset = CorpusIterableDataset(
        corpora["web"].path, **{**PLAN, "global_batch_size": 24}, dtype=None, num_steps=12
    )
    batches = DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=method)
    found = [(batch.step, batch.tokens.numpy().copy()) for batch in batches]
    del dataset, batches
    with make_loader(replicas["1 worker"], dtype=None, num_steps=12) as there:
        for (step, tokens), (expected_step, expected) in zip(found, take(there, 12), strict=True):
            assert step == expected_step
            np.testing.assert_array_equal(tokens, expected)
