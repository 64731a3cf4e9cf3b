"""Loss masks beside token files, from the server to `batch.loss_mask`, by every way that a batch comes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import ArrayLoader, CorpusIterableDataset, CorpusLoader, RemoteCorpus, errors
from corpus_client.integrations.causal_lm import causal_lm
from examples.for_llmc import DistributedDataLoader
from examples.for_nanogpt import GetBatch
from tests.corpora import some_tokens, write_megatron, write_raw
from tests.loaders import grouped, open_loader
from tests.reference import ReferencePlan
from tests.serving import RunningServer

EOT = 7
SIZES = {"chat": (700, 400), "web": (900,)}
PLAN: dict[str, Any] = {
    "seq_len": 16,
    "seed": 3,
    "stages": [{"global_batch_size": 6, "from_step": 0, "mixture": {"chat": 0.5, "web": 0.5}}],
}
UNMASKED = {**PLAN, "stages": [{**PLAN["stages"][0], "mixture": {"web": 1}}]}
MEGATRON = {
    "seq_len": 16,
    "order": {"megatron": {"num_samples": 60}},
    "stages": [{"global_batch_size": 6, "from_step": 0, "mixture": {"docs": 1}}],
}
NUM_STEPS = 10
Rows = Callable[[int], tuple[np.ndarray, np.ndarray]]


def tokens_of(name: str, number: int) -> np.ndarray:
    return some_tokens(SIZES[name][number], seed=number, vocabulary=20)


def mask_of(name: str, number: int) -> np.ndarray:
    """Only the first shard of `chat` has one."""
    size = SIZES[name][number]
    if (name, number) != ("chat", 0):
        return np.ones(size, bool)
    return np.random.default_rng(1).integers(0, 2, size).astype(bool)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    for name, sizes in SIZES.items():
        (folder / name).mkdir()
        for number in range(len(sizes)):
            write_raw(folder / name / f"{number}.bin", tokens_of(name, number))
    np.save(folder / "chat" / "0.bin.mask.npy", mask_of("chat", 0))
    documents = [part.tolist() for part in np.split(np.arange(600), range(0, 600, 47)[1:])]
    data = write_megatron(folder / "docs", documents)
    np.save(data.with_name(f"{data.name}.mask.npy"), np.arange(600) % 3 > 0)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    paths = {**{name: folder / name for name in SIZES}, "docs": folder / "docs.bin"}
    with RunningServer(paths, tmp_path_factory.mktemp("server")) as server:
        yield server.url


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Return the tokens and the mask of a step's rows, `(6, 17)` each, by the slow reference."""
    plan = ReferencePlan(PLAN, {name: list(sizes) for name, sizes in SIZES.items()})

    def of_step(step: int) -> tuple[np.ndarray, np.ndarray]:
        places = [plan.window(step, row) for row in range(6)]
        tokens = [tokens_of(name, shard)[start : start + 17] for name, shard, start in places]
        masks = [mask_of(name, shard)[start : start + 17] for name, shard, start in places]
        return np.stack(tokens), np.stack(masks)

    return of_step


def of_plan(url: str, plan: dict[str, Any] = PLAN, **options: Any) -> CorpusLoader:
    return open_loader(
        url, **{"plan": plan, "device": "cpu", "rank": 0, "world_size": 1, "num_steps": NUM_STEPS, **options}
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": None}, {"sources": True}, {"local_root": True}, {"local_root": True, "sources": True}],
    ids=str,
)
def test_the_mask_of_the_targets_is_combined_with_the_rule_of_documents(
    url: str, folder: Path, rows: Rows, options: dict[str, Any]
) -> None:
    """It comes without being asked for, since training on masked tokens would show in nothing."""
    if "local_root" in options:
        options = {**options, "local_root": {name: folder / name for name in SIZES}}
    with of_plan(url, eot_id=EOT, **options) as loader:
        for batch in loader:
            tokens, mask = rows(batch.step)
            assert batch.tokens.tolist() == tokens.tolist()
            assert batch.corpus_mask is not None
            assert batch.corpus_mask.tolist() == mask[:, 1:].tolist()
            assert batch.loss_mask.tolist() == (mask[:, 1:] & (tokens[:, :-1] != EOT)).tolist()
        assert loader.peek(4).corpus_mask.tolist() == rows(4)[1][:, 1:].tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_a_context_rank_has_the_mask_of_its_part(url: str, rows: Rows, order: str) -> None:
    columns = {
        "contiguous": [[*range(8)], [*range(8, 16)]],
        "zigzag": [[*range(4), *range(12, 16)], [*range(4, 12)]],
    }
    for rank, own in enumerate(columns[order]):
        with of_plan(url, context_parallel=(rank, 2), context_order=order) as loader:
            inputs, targets = torch.empty(2, 6, 8, dtype=torch.int64)
            for batch in (loader.next_into(inputs, targets), next(loader)):
                assert batch.loss_mask.tolist() == rows(batch.step)[1][:, 1:][:, own].tolist()


def test_masked_targets_are_ignored_without_an_end_of_text_too(url: str, rows: Rows) -> None:
    with of_plan(url, ignore_index=-100) as loader:
        for batch in loader:
            tokens, mask = rows(batch.step)
            assert batch.targets.tolist() == np.where(mask, tokens.astype(np.int64), -100)[:, 1:].tolist()


def test_masks_are_left_out_or_asked_for_in_so_many_words(url: str) -> None:
    with of_plan(url, loss_mask=False) as plain, of_plan(url) as masked, of_plan(url, UNMASKED) as bare:
        for loader in (plain, masked, bare):
            next(loader)
        assert next(plain).corpus_mask is None
        assert next(bare).corpus_mask is None
        assert plain.prepared.sizes.batch_bytes == bare.prepared.sizes.batch_bytes
        assert masked.prepared.sizes.batch_bytes == 6 * 17 * 2 + 4 + 6 * 17 + 2  # each at a multiple of 8
        with pytest.raises(errors.InvalidArgument, match="pass eot_id="):
            _ = next(plain).loss_mask
    with pytest.raises(errors.InvalidArgument, match="ignore_index needs eot_id="):
        of_plan(url, loss_mask=False, ignore_index=-100)
    with of_plan(url, UNMASKED, loss_mask=True) as asked:
        assert asked.peek(0).loss_mask.all()


def test_a_stage_that_brings_masks_has_them_from_its_first_step_on(url: str) -> None:
    with of_plan(url, UNMASKED) as loader:
        assert next(loader).corpus_mask is None
        loader.extend({"mixture": {"chat": 1}})
        assert not next(loader).loss_mask.all()


@pytest.mark.parametrize("local", [False, True])
def test_rows_that_join_documents_have_the_masks_of_their_pieces(url: str, folder: Path, local: bool) -> None:
    """Token n of the corpus is n, and masked where 3 divides it."""
    options = {"local_root": {"docs": folder / "docs.bin"}} if local else {}
    with of_plan(url, MEGATRON, sources=True, **options) as loader, of_plan(url, MEGATRON) as plain:
        for batch, other in zip(loader, plain, strict=True):
            assert batch.tokens.tolist() == other.tokens.tolist()
            assert batch.sources.tolist() == [0] * 6
            assert batch.loss_mask.tolist() == (batch.targets % 3 > 0).tolist()


def test_arrays_and_datasets_have_the_masks_too(url: str, rows: Rows) -> None:
    part = {"rank": 0, "world_size": 1}
    with ArrayLoader(url, plan=PLAN, num_steps=NUM_STEPS, **part) as loader:
        for batch in loader:
            assert batch.loss_mask is not None
            assert batch.loss_mask.dtype == np.bool_
            assert batch.loss_mask.tolist() == rows(batch.step)[1][:, 1:].tolist()
    with ArrayLoader(url, plan=PLAN, loss_mask=False, **part) as loader:
        assert next(loader).loss_mask is None
    dataset = CorpusIterableDataset(url, num_steps=2, **grouped({"plan": PLAN, **part}))
    for each in dataset:
        assert each.loss_mask.tolist() == rows(each.step)[1][:, 1:].tolist()


def test_frameworks_that_take_no_mask_get_targets_that_their_loss_leaves_out(url: str, rows: Rows) -> None:
    """Whole corpora in file order: row r of step s is window 6 s + r of the first shard."""
    starts = [16 * row for row in range(6)]
    tokens = np.stack([tokens_of("chat", 0)[start : start + 17] for start in starts]).astype(np.int64)
    mask = np.stack([mask_of("chat", 0)[start : start + 17] for start in starts])
    with (
        GetBatch(url, {"train": "chat"}, 6, 16, order="sequential", device="cpu") as get_batch,
        DistributedDataLoader(f"{url}/chat", 6, 16, 0, 1) as llmc,
    ):
        for inputs, targets in (get_batch("train"), llmc.next_batch()):
            assert inputs.tolist() == tokens[:, :-1].tolist()
            assert targets.tolist() == np.where(mask, tokens, -1)[:, 1:].tolist()
    with of_plan(url) as loader:
        tokens, mask = rows(0)
        labels = causal_lm(next(loader))["labels"]
        assert labels[:, 1:].tolist() == np.where(mask, tokens.astype(np.int64), -100)[:, 1:].tolist()


def test_what_would_lose_masks_refuses_corpora_that_have_them(url: str, tmp_path: Path) -> None:
    with pytest.raises(
        errors.InvalidArgument, match="get_batch returns no loss mask, and corpus 'chat' has one"
    ):
        RemoteCorpus(url, "chat")
    RemoteCorpus(url, "web").close()
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    command = ["export", url, "--plan", "plan.json", "--out", "out.npy", "--stop", "1"]
    said = subprocess.run(
        [sys.executable, "-m", "corpus_client", *command], cwd=tmp_path, capture_output=True, text=True
    )
    assert said.returncode != 0
    assert "an export holds no loss masks" in " ".join(said.stderr.split())


@pytest.mark.parametrize("seq_len", [16, 300], ids=["of one write", "of several"])
@pytest.mark.parametrize("checksum", ["true", "tail", "false"])
def test_a_mask_that_changed_is_a_problem_and_no_cut_connection(
    tmp_path: Path, checksum: str, seq_len: int
) -> None:
    size = 400_000
    write_raw(tmp_path / "chat.bin", some_tokens(size, vocabulary=20))
    mask = tmp_path / "chat.bin.mask.npy"
    np.save(mask, np.ones(size, bool))
    asked: dict[str, Any] = {"corpus": "chat", "seq_len": seq_len, "batch_size": 1000, "step": 0}
    with RunningServer({"chat": tmp_path / "chat.bin"}, tmp_path) as server:
        with mask.open("r+b") as file:
            file.truncate(200_000)
        response = server.get("/v1/batches", **asked, checksum=checksum, **{"with": "loss_mask"})
        assert response.status == 503
        assert response.json()["type"] == "corpus-changed"
        assert server.get("/v1/batches", **asked, checksum=checksum).status == 200
