"""Plans from GPT-NeoX's configurations, those of Pythia among them."""

from __future__ import annotations

from typing import Any

import pytest

from corpus_server.tools.importing import Imported
from tests.server.tools.importing.configurations import (
    OWN_ORDER,
    PYTHIA,
    document,
    imported,
)

OTHER_PARTS = [f"{name}_data_paths: make a plan of its own for it" for name in ("valid", "test")]
RANKS = "which rank and micro batch has which row: each step has the same rows in all"


def test_pythias_configuration_in_its_own_order() -> None:
    name = "pile_20B_tokenizer"
    order = {"num_samples": 143_000 * 1024, "weights": [1.0], "split": [1.0], "blend": [name]}
    assert imported("neox", PYTHIA, order="neox", batch_size=1024) == Imported(
        document=document({name: 1.0}, 1024, seq_len=2048, stride=2048, seed=1234, order={"neox": order}),
        corpora={name: f"/fsx/pile/{name}_text_document"},
        left_out=[*OTHER_PARTS, RANKS],
    )
    shuffled = imported("neox", PYTHIA, batch_size=1024)
    assert shuffled.document == document({name: 1.0}, 1024, seq_len=2048, stride=2048, seed=1234)
    assert shuffled.left_out == [
        *OTHER_PARTS,
        "samples across document and file ends: a window lies inside one file, in file order",
        OWN_ORDER,
    ]


@pytest.mark.parametrize(
    ("text", "order"),
    [
        pytest.param(
            "{data_path: /d/web, train_batch_size: 4, train_iters: 10}",
            {"num_samples": 40, "split": [969.0, 30.0, 1.0], "blend": ["web"]},
            id="a path, split",
        ),
        pytest.param(
            "{data-path: /d/web, split: 9/1, train_batch_size: 4, train_iters: 10}",
            {"num_samples": 40, "split": [9.0, 1.0], "blend": ["web"]},
            id="another split",
        ),
        pytest.param(
            "{train-data-paths: [/d/web, /d/code], train-data-weights: [2, 1.5], train_batch_size: 4, "
            "train_iters: 10, split: 9/1}",
            {"num_samples": 40, "weights": [2.0, 1.5], "split": [1.0], "blend": ["web", "code"]},
            id="paths",
        ),
    ],
)
def test_neox_paths_and_their_splits(text: str, order: dict[str, Any]) -> None:
    found = imported("neox", text, order="neox", seq_len=8, seed=3)
    assert (found.document["order"], found.document["seed"]) == ({"neox": order}, 3)
