"""Plans from configurations of OLMo-core and of the first OLMo."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from corpus_server.tools.importing import Imported
from tests.server.tools.importing.configurations import (
    FIRST_OLMO,
    OF_DISJOINT,
    OWN_ORDER,
    RUN_OF_CORE,
    document,
    imported,
)

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


def test_an_olmo_run_keeps_its_instances() -> None:
    """An instance of 2,048 tokens is a row of 2,047 inputs; batches are counted in tokens."""
    assert imported("olmo", json.dumps(OLMO)) == Imported(
        document=document({"olmo": 1.0}, 64, seq_len=2047, stride=2048, seed=34521),
        corpora={"olmo": "/d/a.npy,/d/b.npy"},
        left_out=["dataset: _CLASS_", "data_loader: num_workers", OWN_ORDER, OF_DISJOINT],
    )
    mixed = Imported(
        document=document({"web": 0.8, "math": 0.2}, 128, seq_len=1023, stride=1024, seed=34521),
        corpora={"web": "/d/w0.npy,/d/w1.npy", "math": "/d/m.npy"},
        left_out=["data_loader: num_workers", OWN_ORDER, OF_DISJOINT],
    )
    assert imported("olmo", json.dumps(MIXED)) == mixed
    config = MIXED["dataset"]["source_mixture_config"]
    newer = {"source_list": {"sources": config["source_configs"]}, "sequence_length": 1024}
    text = json.dumps({**MIXED, "dataset": {"source_mixture_config": newer}})
    assert imported("olmo", text) == mixed


def test_an_olmo_run_without_length_takes_it_from_options() -> None:
    text = json.dumps({"dataset": {"paths": ["/a"]}, "data_loader": {"global_batch_size": 4096}})
    expected = document({"olmo": 1.0}, 3, seq_len=8, stride=9, seed=0)
    assert imported("olmo", text, seq_len=8, batch_size=3).document == expected


FILTERED = "OLMo leaves the instances that it filters out of the loss; here they count"
DOCUMENTS = "batches have document_ids and cu_seqlens"
STRIDED = "which rank has which row of a step: rank k of W has rows k, k + W, ... in OLMo"


def test_an_olmo_run_in_its_own_order() -> None:
    """Shards are ordered by their names, and the plan says in which order the run had them."""
    order = {"max_target_sequence_length": 8192, "num_epochs": 2, "shards": [2, 1, 0, 2]}
    expected = Imported(
        document=document({"olmo": 1.0}, 256, seq_len=4095, stride=4096, seed=34521, order={"olmo": order}),
        corpora={"olmo": "/d/a/part-9.npy,/d/a/part-10.npy,/d/b/part-0.npy,dtype=uint32,eot=100257"},
        left_out=[
            f"dataset.instance_filter_config: {FILTERED}",
            f"dataset.generate_doc_lengths: {DOCUMENTS}",
            STRIDED,
            OF_DISJOINT,
        ],
    )
    assert imported("olmo", json.dumps(RUN_OF_CORE), order="olmo") == expected
    assert imported("olmo", yaml.safe_dump(RUN_OF_CORE), order="olmo") == expected


def test_the_paths_of_an_olmo_run_are_shuffled_as_olmo_core_shuffles_them() -> None:
    paths = [f"/d/part-{number}.npy" for number in range(9)]
    dataset = {"paths": paths, "sequence_length": 8, "source_permutation_seed": 5}
    text = json.dumps({"dataset": dataset, "data_loader": {"global_batch_size": 64}})
    shards = imported("olmo", text, order="olmo").document["order"]["olmo"]["shards"]
    assert shards == [2, 3, 1, 0, 8, 7, 6, 5, 4]  # of OLMo-core 3.0.0


@pytest.mark.parametrize(
    ("duration", "options", "order", "told"),
    [
        ({"value": 5000, "unit": "steps"}, {}, {}, "5000 steps; the plan ends after an epoch"),
        ({"value": 5000, "unit": "steps"}, {"num_epochs": 3}, {"num_epochs": 3}, None),
        ({"value": 2, "unit": "epochs"}, {"num_epochs": 3}, {"num_epochs": 3}, None),
        ({"value": 2, "unit": "epochs"}, {}, {"num_epochs": 2}, None),
    ],
)
def test_how_long_an_olmo_run_is(
    duration: dict[str, Any], options: dict[str, int], order: dict[str, int], told: str | None
) -> None:
    dataset = {"paths": ["/d/a.npy"], "sequence_length": 8}
    config = {
        "dataset": dataset,
        "data_loader": {"global_batch_size": 64},
        "trainer": {"max_duration": duration},
    }
    found = imported("olmo", json.dumps(config), order="olmo", **options)
    assert found.document["order"] == {"olmo": order}
    assert [each for each in found.left_out if "max_duration" in each] == (
        []
        if told is None
        else [
            f"trainer.max_duration: {told}, or as many as --num-epochs says, and the loader takes num_steps"
        ]
    )


def test_a_run_of_the_first_olmo_counts_epochs_from_zero() -> None:
    order = {"first_epoch": 0, "num_epochs": 2}
    paths = "s3://ai2-llm/preprocessed/part-0.npy,s3://ai2-llm/preprocessed/part-1.npy"
    assert imported("olmo", FIRST_OLMO, order="olmo") == Imported(
        document=document({"olmo": 1.0}, 2048, seq_len=2047, stride=2048, seed=6198, order={"olmo": order}),
        corpora={"olmo": f"{paths},dtype=uint16,eot=50279"},
        left_out=[STRIDED, OF_DISJOINT],
    )
    shuffled = imported("olmo", FIRST_OLMO)
    assert shuffled.document == document({"olmo": 1.0}, 2048, seq_len=2047, stride=2048, seed=6198)
    assert "data: drop_last, generate_attention_mask" in shuffled.left_out


def test_groups_of_the_first_olmo_come_by_their_labels() -> None:
    groups = "datasets: {web: [/d/1.npy], books: [/d/3.npy, /d/2.npy]}, seed: 7, drop_last: true"
    text = f"{{model: {{max_sequence_length: 8}}, global_train_batch_size: 4, data: {{{groups}}}}}"
    found = imported("olmo", text, order="olmo")
    assert found.document["order"] == {"olmo": {"first_epoch": 0, "shards": [2, 1, 0]}}
    assert found.document["seed"] == 7


def test_a_key_that_overrides_a_merged_one_is_given_once() -> None:
    text = (
        yaml.safe_dump(RUN_OF_CORE)
        + "base: &base {seed: 1}\nother: &other {<<: *base, seed: 2}\nlast: {<<: *other}\n"
    )
    assert imported("olmo", text, order="olmo") == imported("olmo", json.dumps(RUN_OF_CORE), order="olmo")
