"""Plans from other trainers' configurations: what they come to, what is not carried over, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corpus_server.errors import InvalidParameter
from corpus_server.plan import Plan
from corpus_server.plan.importing import Imported, Trainer, import_plan

ARGUMENTS = """
    --num-layers 24 --bf16 --data-path 0.7 /data/web_text_document 3e-1 /data/code_text_document
    --seq-length=2048 --global-batch-size 512 --seed 42 --split 99,1,0 --train-iters 1000
"""
OLMO: dict[str, Any] = {
    "dataset": {
        "_CLASS_": "olmo_core.data.NumpyFSLDatasetConfig",
        "paths": ["/d/a.npy", "/d/b.npy"],
        "sequence_length": 2048,
        "mix": None,
    },
    "data_loader": {"global_batch_size": 2048 * 64, "seed": 34521, "num_workers": 4},
}
MIXED: dict[str, Any] = {
    **OLMO,
    "dataset": {
        "sequence_length": 1024,
        "source_mixture_config": {
            "source_configs": [
                {"source_name": "web", "target_ratio": 0.8, "paths": ["/d/w0.npy", "/d/w1.npy"]},
                {"source_name": "math", "target_ratio": 0.2, "paths": ["/d/m.npy"]},
            ]
        },
    },
}
STREAMS: dict[str, Any] = {
    "global_train_batch_size": 256,
    "max_seq_len": 4096,
    "train_loader": {
        "dataset": {
            "shuffle": True,
            "shuffle_seed": 17,
            "shuffle_algo": "py1e",
            "streams": {
                "web": {"remote": "s3://b/web", "local": "/tmp/web", "split": "train", "proportion": 3},
                "code": {"remote": "s3://b/code", "proportion": 1, "download_retry": 2},
            },
        }
    },
}


def imported(trainer: Trainer, text: str, **fields: Any) -> Imported:
    found = import_plan(trainer, text, **fields)
    Plan.from_json(found.document)
    return found


def document(mixture: dict[str, float], size: int, **fields: Any) -> dict[str, Any]:
    stage = {"from_step": 0, "global_batch_size": size, "mixture": mixture}
    return {"order": "shuffle", **fields, "stages": [stage]}


def test_megatrons_arguments() -> None:
    found = imported("megatron", ARGUMENTS)
    mixture = {"web": 0.7, "code": 0.3}
    assert found.document == document(mixture, 512, seq_len=2048, stride=2048, seed=42)
    assert found.corpora == {"web": "/data/web_text_document", "code": "/data/code_text_document"}
    told = "; ".join(found.left_out)
    for name in ("--split: serve", "--train-iters: a plan", "not read: --num-layers, --bf16", "the order"):
        assert name in told


def test_a_blend_alone_takes_length_and_size_from_options_and_names_stay_apart() -> None:
    found = imported("megatron", "0.5 /a/part.1 0.5 /b/part.1", seq_len=8, batch_size=4, seed=3)
    assert found.corpora == {"part.1": "/a/part.1", "part.1-1": "/b/part.1"}
    assert found.document["seed"] == 3
    assert imported("megatron", "/a/web", seq_len=8, batch_size=4).corpora == {"web": "/a/web"}


@pytest.mark.parametrize(
    ("text", "order"),
    [
        (
            ARGUMENTS.replace("--train-iters 1000", "--train-iters 10"),
            {"num_samples": 5120, "weights": [0.7, 0.3], "split": [99, 1, 0], "blend": ["web", "code"]},
        ),
        (
            "--data-path /d/web --seq-length 8 --global-batch-size 4 --train-samples 77",
            {"num_samples": 77, "split": [969, 30, 1], "blend": ["web"]},
        ),
        (
            "--train-data-path 1.0 /d/web --seq-length 8 --global-batch-size 4 --train-iters 3",
            {"num_samples": 12, "split": [1], "blend": ["web"]},
        ),
        (
            "--data-path 1.0 /d/web --seq-length 8 --global-batch-size 4 --train-iters 3 --split 1",
            {"num_samples": 12, "weights": [1.0], "split": [1], "blend": ["web"]},
        ),
    ],
)
def test_megatrons_own_order_is_kept_where_it_is_asked_for(text: str, order: dict[str, Any]) -> None:
    found = imported("megatron", text, order="megatron")
    assert found.document["order"] == {"megatron": order}
    assert "order" not in "; ".join(found.left_out)


def test_an_olmo_run_keeps_its_instances() -> None:
    """An instance of 2,048 tokens is a row of 2,047 inputs; batches are counted in tokens."""
    found = imported("olmo", json.dumps(OLMO))
    assert found.document == document({"olmo": 1.0}, 64, seq_len=2047, stride=2048, seed=34521)
    assert found.corpora == {"olmo": "/d/a.npy,/d/b.npy"}
    assert "data_loader: num_workers" in found.left_out
    mixed = imported("olmo", json.dumps(MIXED))
    assert mixed.document["stages"][0]["mixture"] == {"web": 0.8, "math": 0.2}
    assert mixed.corpora == {"web": "/d/w0.npy,/d/w1.npy", "math": "/d/m.npy"}


def test_mosaicml_streams_keep_their_samples() -> None:
    found = imported("mosaicml", json.dumps(STREAMS))
    assert found.document == document({"web": 3.0, "code": 1.0}, 256, seq_len=4095, stride=4096, seed=17)
    assert found.corpora == {"web": "s3://b/web/train", "code": "s3://b/code"}
    assert {"dataset: shuffle_algo", "streams.code: download_retry"} <= set(found.left_out)
    alone = {"remote": "s3://b/web", "max_seq_len": 128, "shuffle": False}
    assert imported("mosaicml", json.dumps(alone), batch_size=8).document["order"] == "sequential"


@pytest.mark.parametrize(
    ("trainer", "text", "message"),
    [
        ("megatron", "/a /b", "--data-path must be a weight before each path"),
        ("megatron", "0.5 /a 0.5", "--data-path must be a weight before each path"),
        ("megatron", "--seq-length 8", "data must be the paths of tokens"),
        ("megatron", "--data-path /a --seq-length many", "--seq-length must be an integer, got 'many'"),
        ("megatron", "/a", "the configuration does not say seq_len"),
        ("olmo", "a: 1", "the configuration must be JSON"),
        ("olmo", "[]", "must be a JSON object"),
        (
            "olmo",
            '{"dataset": {"source_mixture_config": {"source_configs": [{}]}}}',
            "no data configuration of",
        ),
        ("olmo", '{"dataset": {"mix": "OLMoE-mix-0824"}}', "a named mix is a list inside OLMo-core"),
        ("mosaicml", '{"streams": {"a": {"repeat": 2}, "b": {}}}', "streams.a must be a proportion"),
    ],
)
def test_what_cannot_be_a_plan_is_refused_by_name(trainer: Trainer, text: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        import_plan(trainer, text)
    assert message in f"{caught.value.detail}"


@pytest.mark.parametrize(
    ("trainer", "text", "message"),
    [
        ("olmo", "{}", "order must be shuffle for olmo"),
        ("megatron", "--data-path /a --seq-length 8", "does not say how many samples the run has"),
        ("megatron", "/a --mid-level-dataset-surplus 0.1", "--mid-level-dataset-surplus must be 0.005"),
    ],
)
def test_megatrons_order_takes_what_decides_it(trainer: Trainer, text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        import_plan(trainer, text, order="megatron")
