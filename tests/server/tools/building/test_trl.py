"""Rows for fine-tuning, compared with those that TRL's own packing makes of the same documents and labels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import open_corpus
from tests.server.tools.building.sources import build_here
from tests.serving import RunningServer

datasets = pytest.importorskip("datasets")
data_utils = pytest.importorskip("trl.data_utils")

END, LENGTH = 1, 64  # TRL's rows have LENGTH tokens, so do ours: seq_len + 1
NO_TARGET = -100

Prediction = tuple[int, int, bool]  # token, next token, whether training counts it


def some_rows(longest: int, *, count: int = 400, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return documents whose tokens all differ, but the last one, and labels of what follows a prompt."""
    draw, next_token = np.random.default_rng(seed), 2
    rows: list[dict[str, list[int]]] = []
    for size in draw.integers(2, longest + 1, count).tolist():
        ids = [*range(next_token, next_token + size - 1), END]
        next_token += size - 1
        prompt = int(draw.integers(0, size))
        rows.append({"input_ids": ids, "labels": [NO_TARGET] * prompt + ids[prompt:]})
    return rows


def trl_packed(rows: Sequence[dict[str, list[int]]], strategy: str) -> Any:
    return data_utils.pack_dataset(datasets.Dataset.from_list(list(rows)), LENGTH, strategy)


def predictions(ids: Sequence[int], is_target: Sequence[bool]) -> Iterator[Prediction]:
    return ((a, b, counts) for (a, b), counts in zip(pairwise(ids), is_target[1:], strict=True))


def of_trl(packed: Any) -> list[Prediction]:
    """Return what a model learns of TRL's rows: nothing across the documents in them."""
    found: list[Prediction] = []
    for row in packed:
        start = 0
        for length in row["seq_lengths"]:
            piece = slice(start, start + length)
            labels = [label != NO_TARGET for label in row["labels"][piece]]
            found += predictions(row["input_ids"][piece], labels)
            start += length
    return found


def served(out: Path, folder: Path, query: str) -> list[tuple[list[int], list[int]]]:
    """Return the rows of an epoch with their loss masks."""
    with RunningServer({"sft": out}, folder) as server:
        asked = f"corpus=sft&seq_len={LENGTH - 1}&batch_size=1&format=json&with=loss_mask&{query}"
        first = server.get(f"/v1/batches?{asked}&step=0")
        plan = json.loads(server.get(f"/v1/plans/{first.headers['Corpus-Plan']}").body)
        rows = []
        for step in range(plan["sources"]["sft"]["num_windows"]):
            body = json.loads(server.get(f"/v1/batches?{asked}&step={step}").body)
            rows.append((np.ravel(body["tokens"]).tolist(), np.ravel(body["loss_mask"]).tolist()))
        return rows


def ours(out: Path, folder: Path) -> tuple[list[Prediction], int]:
    """Return what a model learns of rows of documents, and the number of rows."""
    rows = served(out, folder, "rows=documents")
    # The token that ends a document predicts nothing, nor does the unused end of a row.
    return [each for ids, mask in rows for each in predictions(ids, mask) if each[0] != END], len(rows)


def built(rows: Sequence[dict[str, list[int]]], folder: Path) -> Path:
    datasets.Dataset.from_list(list(rows)).to_parquet(str(folder / "sft.parquet"))
    build_here([folder / "sft.parquet"], folder / "out", column="input_ids", eot=END, mask=("labels",))
    return folder / "out"


def test_documents_that_fit_into_a_row_give_the_predictions_and_masks_of_trl(tmp_path: Path) -> None:
    rows = some_rows(LENGTH)
    found, num_rows = ours(built(rows, tmp_path), tmp_path)
    packed = trl_packed(rows, "bfd")
    assert sorted(found) == sorted(of_trl(packed))
    assert any(counts for *_, counts in found)
    assert not all(counts for *_, counts in found)
    # Both leave little unused; ours deals the documents anew in each epoch, TRL's once.
    assert num_rows <= len(packed) * 1.02 + 1


def test_of_longer_documents_trl_loses_tokens_and_rows_of_documents_do_not(tmp_path: Path) -> None:
    rows = some_rows(3 * LENGTH)
    found, _ = ours(built(rows, tmp_path), tmp_path)
    lengths = [len(row["input_ids"]) for row in rows]
    every = [
        each
        for row in rows
        for each in predictions(row["input_ids"], [label != NO_TARGET for label in row["labels"]])
    ]
    assert sorted(found) == sorted(every)
    truncated, split = (of_trl(trl_packed(rows, strategy)) for strategy in ("bfd", "bfd_split"))
    assert set(truncated) < set(found)
    assert len(found) - len(truncated) == sum(max(0, length - LENGTH) for length in lengths)
    assert set(split) < set(found)
    assert len(found) - len(split) == sum((length - 1) // LENGTH for length in lengths)  # one a cut


def test_wrapped_rows_are_windows_and_packed_rows_are_their_text(tmp_path: Path) -> None:
    rows = some_rows(2 * LENGTH)
    packed = trl_packed(rows, "wrapped")
    windows = served(built(rows, tmp_path), tmp_path, f"order=sequential&stride={LENGTH}")
    wrapped = [
        (row["input_ids"], [int(label != NO_TARGET) for label in row["labels"]])
        for row in packed
        if len(row["input_ids"]) == LENGTH
    ]
    assert windows == wrapped
    packed.save_to_disk(str(tmp_path / "wrapped"))
    options = {"column": "input_ids", "eot": END, "mask": ("labels",), "rows": "packed"}
    build_here([tmp_path / "wrapped"], tmp_path / "again", **options)
    with open_corpus(tmp_path / "out") as first, open_corpus(tmp_path / "again") as second:
        # Of the same tokens, masks and shards; a manifest says what each was made from.
        assert first.fingerprint == second.fingerprint
        assert first.num_documents == second.num_documents == len(rows)
