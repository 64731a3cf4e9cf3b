"""Configurations of which no plan can be made are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from corpus_server.errors import InvalidParameter
from corpus_server.tools.importing import Trainer, import_plan
from tests.server.tools.importing.configurations import (
    PYTHIA,
    RUN_OF_CORE,
)

REMEDIES = {
    "the configuration does not say seq_len": "give it with --seq-len",
    "the configuration does not say batch_size": "give it with --batch-size",
    "dataset must be paths or a source_mixture_config (a named mix is a list inside OLMo-core), "
    "got 'OLMoE-mix-0824'": "write the paths of the mix into the configuration, as docs/start/replay.md does",
}
BLEND = "--data-path must be a weight before each path (Megatron would weigh by samples), got "


@pytest.mark.parametrize(
    ("trainer", "text", "parameter", "message"),
    [
        ("megatron", "/a /b", "--data-path", BLEND + "['/a', '/b']"),
        ("megatron", "0.5 /a 0.5", "--data-path", BLEND + "['0.5', '/a', '0.5']"),
        ("megatron", "0.5 /a -1 /b", "--data-path", BLEND + "['0.5', '/a', '-1', '/b']"),
        ("megatron", "1 /a inf /b", "--data-path", BLEND + "['1', '/a', 'inf', '/b']"),
        ("megatron", "--seq-length 8", "data", "data must be the paths of tokens, got None"),
        (
            "megatron",
            "--data-path /a --seq-length many",
            "--seq-length",
            "--seq-length must be an integer, got 'many'",
        ),
        ("megatron", "/a", "seq_len", "the configuration does not say seq_len"),
        ("megatron", "/a --seq-length 8", "batch_size", "the configuration does not say batch_size"),
        (
            "megatron",
            "'/a",
            "file",
            "the text is no data configuration of megatron: ValueError No closing quotation",
        ),
        (
            "olmo",
            "a: [1",
            "file",
            'the configuration must be JSON or YAML: while parsing a flow sequence in "<unicode string>", '
            "line 1, column 4: a: [1 ^ expected ',' or ']', but got '<stream end>' in \"<unicode string>\", "
            "line 1, column 6: a: [1 ^",
        ),
        ("olmo", "[]", "file", "file must be an object of JSON or YAML, got []"),
        ("neox", "seq_length", "file", "file must be an object of JSON or YAML, got 'seq_length'"),
        (
            "olmo",
            '{"dataset": {"source_mixture_config": {"source_configs": [{}]}}}',
            "file",
            "the text is no data configuration of olmo: KeyError 'paths'",
        ),
        (
            "olmo",
            '{"dataset": {"mix": "OLMoE-mix-0824"}}',
            "dataset",
            "dataset must be paths or a source_mixture_config (a named mix is a list inside OLMo-core), "
            "got 'OLMoE-mix-0824'",
        ),
        (
            "mosaicml",
            '{"streams": {"a": {"repeat": 2}, "b": {}}}',
            "streams.a",
            "streams.a must be a proportion for each stream, got {'repeat': 2}",
        ),
    ],
)
def test_what_cannot_be_a_plan_is_refused_by_name(
    trainer: Trainer, text: str, parameter: str, message: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        import_plan(trainer, text)
    assert (caught.value.detail, caught.value.parameter) == (message, parameter)
    assert caught.value.remedy == REMEDIES.get(message.partition(":")[0])


OF_CORE = "NumpyFSLDatasetConfig with order olmo, whose instances are known"


@pytest.mark.parametrize(
    ("trainer", "change", "parameter", "message"),
    [
        ("neox", {"pack-impl": "unpacked"}, "pack_impl", "left out or 'packed', as its rows are known"),
        ("neox", {"dataset_impl": "pairwise"}, "dataset_impl", "left out or 'gpt2', as its rows are known"),
        ("neox", {"train_epochs": 2}, "train_epochs", "left out or None, as its rows are known"),
        (
            "neox",
            {"weight_by_num_documents": True},
            "weight_by_num_documents",
            "left out or False, as its rows are known",
        ),
        (
            "neox",
            {"train_label_data_paths": ["/d/labels"]},
            "train_label_data_paths",
            "left out or None, as its rows are known",
        ),
        ("neox", {"curriculum_learning": {"enabled": True}}, "curriculum_learning", "left out: it cuts rows"),
        ("neox", {"train_data_weights": [1, 2]}, "train_data_weights", "a weight for each path"),
        ("olmo", {"dataset": {"_CLASS_": "x.NumpyPackedFSLDatasetConfig"}}, "dataset", OF_CORE),
        ("olmo", {"dataset": {"name": "padded_fsl"}}, "dataset", OF_CORE),
        (
            "olmo",
            {"data_loader": {"_CLASS_": "x.ComposableDataLoaderConfig"}},
            "data_loader",
            "NumpyDataLoaderConfig with order olmo",
        ),
        (
            "olmo",
            {"dataset": {"paths": ["/d/*.npy"]}},
            "paths",
            "paths without patterns with order olmo, whose rows follow from the order of the files",
        ),
        (
            "olmo",
            {"dataset": {"source_mixture_config": {"source_configs": []}}},
            "dataset.source_mixture_config",
            "paths with order olmo: how much a mixture takes of a file follows from all files' sizes",
        ),
        (
            "olmo",
            {"trainer": {"callbacks": {"batch_size_scheduler": {"batch_sizes": [1]}}}},
            "trainer.callbacks.batch_size_scheduler",
            "left out with order olmo: it changes the batches of a run",
        ),
        (
            "olmo",
            {"trainer": {"callbacks": {"x": {"_CLASS_": "olmo_core.SequenceLengthSchedulerCallback"}}}},
            "trainer.callbacks.x",
            "left out with order olmo: it changes the batches of a run",
        ),
    ],
)
def test_runs_whose_rows_are_not_known_are_refused_by_name(
    trainer: Trainer, change: dict[str, Any], parameter: str, message: str
) -> None:
    base = RUN_OF_CORE if trainer == "olmo" else yaml.safe_load(PYTHIA)
    text = json.dumps(
        {
            **base,
            **{
                name: {**base.get(name, {}), **value} if name in RUN_OF_CORE else value
                for name, value in change.items()
            },
        }
    )
    with pytest.raises(InvalidParameter) as caught:
        import_plan(trainer, text, order=trainer, batch_size=1024)  # type: ignore[arg-type]
    assert caught.value.parameter == parameter
    assert caught.value.detail.startswith(f"{parameter} must be {message}, got ")


@pytest.mark.parametrize(
    "text",
    [
        '{"seed": 1, "seed": 2}',
        "seed: 1\nseed: 2\n",
        "data:\n  paths: [a]\n  'paths': [b]\n",
        "runs: [{seed: 1, seed: 1}]\n",
    ],
)
def test_a_configuration_that_gives_a_name_twice_is_refused(text: str) -> None:
    """Parsers of JSON and YAML take the last value, and say nothing."""
    with pytest.raises(InvalidParameter, match=r"the configuration: '(seed|paths)' is given twice"):
        import_plan("olmo", text, order="olmo")
