"""Corpora whose documents begin with end of text, in shards that are cut anywhere, as llm.c writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_client import CorpusLoader
from corpus_server.corpus.index import index
from tests.contract.conftest import make_loader, take
from tests.corpora import spec, write_llmc
from tests.serving import RunningServer

SEQ_LEN, EOT = 32, 50_256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One corpus of three shards; each token but end of text is there once."""
    folder, draw = tmp_path_factory.mktemp("corpora") / "fineweb", np.random.default_rng(1)
    folder.mkdir()
    stream: list[int] = []
    while len(stream) < 12_000:
        stream += [EOT, *range(len(stream), len(stream) + int(draw.lognormal(2.6, 1.1)) + 1)]
    for number, (start, stop) in enumerate([(0, 4_001), (4_001, 8_123), (8_123, len(stream) - 7)]):
        write_llmc(folder / f"fineweb_train_{number:06}.bin", stream[start:stop])
    indexed = index(spec(folder, eot=EOT))
    assert indexed.eot_first
    assert indexed.is_sure
    return folder


@pytest.fixture(scope="module")
def shards(folder: Path) -> list[list[int]]:
    found = [np.fromfile(path, "<u2", offset=1024).tolist() for path in sorted(folder.glob("*.bin"))]
    assert all(shard[-1] != EOT for shard in found)
    assert found[1][0] != EOT
    return found


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer({"fineweb": folder}, tmp_path_factory.mktemp("server")) as server:
        yield server


def loader(server: RunningServer, **changes: Any) -> CorpusLoader:
    asked = {"corpus": "fineweb", "seq_len": SEQ_LEN, "global_batch_size": 1, "seed": 3}
    return make_loader(server.url, **{**asked, "num_steps": "epoch", **changes})


def predictions(shards: list[list[int]]) -> Counter[tuple[int, int]]:
    """Every token and the one that follows it; behind the last one of a shard is end of text."""
    pairs = (zip(shard, [*shard[1:], EOT], strict=True) for shard in shards)
    return Counter(pair for its in pairs for pair in its)


@pytest.mark.parametrize("begin", [False, True])
def test_an_epoch_has_each_prediction_once(
    running: RunningServer, shards: list[list[int]], *, begin: bool
) -> None:
    """By the batch's own mask; and no document sees another one, by the batch's own borders."""
    rows = {"documents": {"block_documents": 100, "begin": begin}}
    seen, follows = Counter[tuple[int, int]](), {pair for shard in shards for pair in pairwise(shard)}
    with loader(running, rows=rows) as batches:
        for batch in batches:
            inputs, targets = batch.inputs[0].tolist(), batch.targets[0].tolist()
            mask, documents = batch.loss_mask[0].tolist(), batch.document_ids[0].tolist()
            positions = batch.position_ids[0].tolist()
            if begin:
                assert inputs[0] == EOT
            pairs = zip(inputs, targets, strict=True)
            seen.update(pair for pair, is_kept in zip(pairs, mask, strict=True) if is_kept)
            for column in range(1, SEQ_LEN):
                pair = inputs[column - 1], inputs[column]
                if documents[column] == documents[column - 1] and pair != (EOT, EOT):
                    assert pair in follows
                    assert positions[column] == positions[column - 1] + 1
                elif documents[column] != documents[column - 1]:
                    assert positions[column] == 0
    expected = predictions(shards)
    if not begin:
        assert seen == expected
    else:  # what finds no document to begin its row is left out, and stated
        assert not seen - expected
        described = running.get("/v1/plans/" + batches.plan_id).json()["sources"]["fineweb"]
        assert (expected - seen).total() == round(described["left_out"] * expected.total())


def test_windows_have_the_rule_of_the_documents_too(running: RunningServer) -> None:
    """The token that begins a document belongs to it, and everything is a target."""
    with loader(running, num_steps=20) as batches:
        for batch in batches:
            begins = batch.inputs == EOT
            assert (batch.position_ids[begins] == 0).all()
            assert batch.loss_mask.all()
            assert (batch.document_ids.diff(dim=1) == begins[:, 1:]).all()


def test_context_ranks_share_each_document(running: RunningServer) -> None:
    """Each input is at one of two ranks, and of a document they have as many but for one."""
    rows = {"documents": {"block_documents": 100, "begin": True}}
    parts = [{"context_parallel": (rank, 2), "context_order": "documents"} for rank in range(2)]
    with (
        loader(running, rows=rows, num_steps=20) as whole,
        loader(running, rows=rows, num_steps=20, **parts[0]) as one,
        loader(running, rows=rows, num_steps=20, **parts[1]) as other,
    ):
        for batch, *halves in zip(whole, one, other, strict=True):
            both = [list(zip(*(each[0].tolist() for each in its), strict=True)) for its in halves]
            assert sorted(both[0] + both[1]) == sorted(
                zip(*(each[0].tolist() for each in batch), strict=True)
            )
            for document in batch.document_ids.unique():
                counts = [int((half.document_ids == document).sum()) for half in halves]
                assert abs(counts[0] - counts[1]) <= 2
            assert all(half.loss_mask.shape == half.inputs.shape == (1, SEQ_LEN // 2) for half in halves)


def test_a_local_copy_has_the_same_rows(running: RunningServer, folder: Path) -> None:
    """Also where end of text stands between the pieces of a row."""
    for begin in (False, True):
        rows = {"documents": {"block_documents": 100, "begin": begin}}
        with (
            loader(running, rows=rows, dtype=None, num_steps=60) as served,
            loader(running, rows=rows, dtype=None, num_steps=60, local_root=folder) as copied,
        ):
            for (step, tokens), (_, local) in zip(take(served, 60), take(copied, 60), strict=True):
                assert np.array_equal(tokens, local), (begin, step)


def test_look_ups_name_the_rows_that_hold_a_token(running: RunningServer, shards: list[list[int]]) -> None:
    plan = {
        "seq_len": SEQ_LEN,
        "rows": {"documents": {"block_documents": 100, "begin": True}},
        "stages": [{"global_batch_size": 4, "mixture": {"fineweb": 1}}],
    }
    plan_id = running.post_plan(plan).json()["id"]
    tokens = [token for shard in shards for token in shard]
    for place in (0, 1, 777, 4_001, 4_002, 8_200, len(tokens) - 1):
        found = running.get("/v1/lookup", plan=plan_id, corpus="fineweb", token=place).json()["rows"]
        assert found
        for row in found:
            batch = running.get("/v1/batches", plan=plan_id, step=row["step"], format="json").json()
            assert batch["tokens"][0][row["row"]][row["offset"]] == tokens[place]
