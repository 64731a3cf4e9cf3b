"""Plans from Megatron's arguments: blends, splits, how many samples, and its own order."""

from __future__ import annotations

from typing import Any

import pytest

from corpus_server.errors import InvalidParameter
from corpus_server.tools.importing import Imported, Trainer, import_plan
from tests.server.tools.importing.configurations import (
    OWN_ORDER,
    document,
    imported,
)

ARGUMENTS = """
    --num-layers 24 --bf16 --data-path 0.7 /data/web_text_document 3e-1 /data/code_text_document
    --seq-length=2048 --global-batch-size 512 --seed 42 --split 99,1,0 --train-iters 1000
"""


def test_megatrons_arguments() -> None:
    assert imported("megatron", ARGUMENTS) == Imported(
        document=document({"web": 0.7, "code": 0.3}, 512, seq_len=2048, stride=2048, seed=42),
        corpora={"web": "/data/web_text_document", "code": "/data/code_text_document"},
        left_out=[
            "--split: serve the training part of each corpus, with token_range= or #train",
            "--train-iters: a plan has no end; the loader takes num_steps",
            "arguments that are not read: --num-layers, --bf16",
            "samples across document and file ends: a window lies inside one file, in file order",
            OWN_ORDER,
        ],
    )


@pytest.mark.parametrize(
    ("text", "mixture", "paths"),
    [
        pytest.param("/a/web", [("web", 1.0)], ["/a/web"], id="a path"),
        pytest.param("--train-data-path /a/web", [("web", 1.0)], ["/a/web"], id="of training"),
        pytest.param("/a/web # not /a/code", [("web", 1.0)], ["/a/web"], id="a comment"),
        pytest.param("--data-path /a --data-path /a/web", [("web", 1.0)], ["/a/web"], id="the last one"),
        pytest.param(
            "--train-data-path /a --bf16 --data-path /a/web", [("web", 1.0)], ["/a/web"], id="of all parts"
        ),
        pytest.param(
            ".5 /a/x 1.5E+1 '/b/y z' 2e0 /c/***",
            [("x", 0.5), ("y-z", 15.0), ("corpus", 2.0)],
            ["/a/x", "/b/y z", r"/c/\*\*\*"],
            id="weights",
        ),
        pytest.param(
            "0.5 /a/-part.1- 1 /b/part.1 0.5 /c/part.1_text_document",
            [("part.1", 0.5), ("part.1-1", 1.0), ("part.1-2", 0.5)],
            ["/a/-part.1-", "/b/part.1", "/c/part.1_text_document"],
            id="the same names",
        ),
        pytest.param(
            "1 /a/x 1 /a/x-2 1 /b/x 1 /c/x",
            [("x", 1.0), ("x-2", 1.0), ("x-1", 1.0), ("x-3", 1.0)],
            ["/a/x", "/a/x-2", "/b/x", "/c/x"],
            id="names that are taken",
        ),
    ],
)
def test_a_blend_has_a_name_for_each_path(
    text: str, mixture: list[tuple[str, float]], paths: list[str]
) -> None:
    found = imported("megatron", text, seq_len=8, batch_size=4)
    assert list(found.document["stages"][0]["mixture"].items()) == mixture
    assert list(found.corpora.items()) == [
        (name, path) for (name, _), path in zip(mixture, paths, strict=True)
    ]


RUN = "--seq-length 8 --global-batch-size 4"


@pytest.mark.parametrize(
    ("text", "options", "order"),
    [
        pytest.param(
            ARGUMENTS.replace("--train-iters 1000", "--train-iters 10"),
            {},
            {"num_samples": 5120, "weights": [0.7, 0.3], "split": [99, 1, 0], "blend": ["web", "code"]},
            id="a blend",
        ),
        pytest.param(
            f"--data-path /d/web {RUN} --train-samples 77",
            {},
            {"num_samples": 77, "split": [969, 30, 1], "blend": ["web"]},
            id="a path",
        ),
        pytest.param(
            f"--train-data-path 1 /d/web 3 /d/code {RUN} --train-iters 3",
            {},
            {"num_samples": 12, "weights": [1.0, 3.0], "split": [1], "blend": ["web", "code"]},
            id="a blend of training",
        ),
        pytest.param(
            f"/d/web {RUN} --train-iters 3 --train-samples 77 --split .9, 0.05, .05",
            {"batch_size": 7},
            {"num_samples": 77, "split": [0.9, 0.05, 0.05], "blend": ["web"]},
            id="samples before iterations",
        ),
        pytest.param(
            f"/d/web {RUN} --train-iters 3 --mid-level-dataset-surplus 0.005",
            {"batch_size": 7},
            {"num_samples": 21, "split": [969, 30, 1], "blend": ["web"]},
            id="another batch size",
        ),
        pytest.param(
            f"/d/web {RUN} --train-iters 3 --train-samples 77",
            {"num_samples": 5},
            {"num_samples": 5, "split": [969, 30, 1], "blend": ["web"]},
            id="an option before samples",
        ),
    ],
)
def test_megatrons_own_order_is_kept_where_it_is_asked_for(
    text: str, options: dict[str, int], order: dict[str, Any]
) -> None:
    found = imported("megatron", text, order="megatron", **options)
    assert found.document["order"] == {"megatron": order}
    unread = ["arguments that are not read: --num-layers, --bf16"] if "--bf16" in text else []
    ranks = "which rank and micro batch has which row: each step has the same rows in all"
    assert found.left_out == [*unread, ranks]


@pytest.mark.parametrize("iterations", ["--train-iters {}", "--train-iters 2 --train-samples {}"])
def test_of_several_values_of_an_argument_the_first_counts(iterations: str) -> None:
    text = f"/a --seq-length {{}} --global-batch-size {{}} --seed {{}} {iterations}"
    one, more = (imported("megatron", text.replace("{}", each), order="megatron") for each in ("8", "8 9"))
    assert more == one


def test_a_split_does_not_hold_for_a_path_of_training() -> None:
    text = f"--train-data-path /d/web {RUN} --train-samples 9 --split 99,1,0"
    found = imported("megatron", text, order="megatron")
    assert found.document["order"]["megatron"]["split"] == [1]
    assert found.left_out[0].startswith("--split: ")


@pytest.mark.parametrize(
    ("trainer", "text", "parameter", "message"),
    [
        (
            "olmo",
            "{}",
            "order",
            "order must be shuffle or olmo for a configuration of olmo, got 'megatron'",
        ),
        (
            "mosaicml",
            "{}",
            "order",
            "order must be shuffle for a configuration of mosaicml, got 'megatron'",
        ),
        *(
            (
                "megatron",
                f"--data-path /a --seq-length 8{more}",
                "num_samples",
                "the configuration does not say how many samples the run has, "
                "on which Megatron's order depends",
            )
            for more in ("", " --train-iters 3", " --global-batch-size 4", " --train-samples")
        ),
        (
            "megatron",
            "/a --global-batch-size 4 --train-iters -3",
            "--train-iters",
            "--train-iters must be an integer, got '-3'",
        ),
        (
            "megatron",
            "/a --mid-level-dataset-surplus 0.1",
            "--mid-level-dataset-surplus",
            "--mid-level-dataset-surplus must be 0.005, Megatron's default, with order megatron, got ['0.1']",
        ),
    ],
)
def test_megatrons_order_takes_what_decides_it(
    trainer: Trainer, text: str, parameter: str, message: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        import_plan(trainer, text, order="megatron")
    assert (caught.value.detail, caught.value.parameter) == (message, parameter)
    assert (caught.value.remedy is not None) == (parameter == "num_samples")
