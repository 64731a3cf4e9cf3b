"""What options replace in a configuration, and what must be given by one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corpus_server.errors import InvalidParameter
from corpus_server.tools.importing import Trainer, import_plan
from tests.server.tools.importing.configurations import (
    FIRST_OLMO,
    PYTHIA,
    RUN_OF_CORE,
    imported,
)


@pytest.mark.parametrize(
    ("trainer", "text", "seed", "more"),
    [
        ("megatron", "/a --seq-length 8 --global-batch-size 2", 1234, 0),
        (
            "olmo",
            '{"dataset": {"paths": ["/a"], "sequence_length": 9}, "data_loader": {"global_batch_size": 26}}',
            0,
            1,
        ),
        ("mosaicml", '{"remote": "/a", "max_seq_len": 9, "global_train_batch_size": 2}', 9176, 1),
    ],
)
def test_options_replace_what_the_text_says_and_the_seed_is_the_trainers(
    trainer: Trainer, text: str, seed: int, more: int
) -> None:
    def decided(**fields: int | None) -> list[int]:
        found = imported(trainer, text, **fields).document
        return [found["seq_len"], found["stride"], found["stages"][0]["global_batch_size"], found["seed"]]

    assert decided() == decided(seq_len=None, batch_size=None, seed=None) == [8, 8 + more, 2, seed]
    assert decided(seq_len=32, batch_size=6, seed=0) == [32, 32 + more, 6, 0]


@pytest.mark.parametrize(
    ("trainer", "text", "options", "parameter", "remedy"),
    [
        (
            "neox",
            PYTHIA,
            {},
            "batch_size",
            "give --batch-size, 32 x 1 x GPUs that have other rows; Pythia has 1024",
        ),
        (
            "neox",
            "{data_path: /d/web, train_batch_size: 4}",
            {},
            "num_samples",
            "give train_iters and train_batch_size, or the option --num-samples",
        ),
        ("olmo", FIRST_OLMO.replace("drop_last: true", "drop_last: false"), {}, "data.drop_last", None),
        ("olmo", json.dumps(RUN_OF_CORE), {"rows": "documents"}, "rows", None),
    ],
)
def test_what_an_own_order_needs_is_said(
    trainer: Trainer, text: str, options: dict[str, Any], parameter: str, remedy: str | None
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        import_plan(trainer, text, order=trainer, **options)  # type: ignore[arg-type]
    assert (caught.value.parameter, caught.value.remedy) == (parameter, remedy)
