"""Plans from other trainers' configurations: what they come to, what is not carried over, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from corpus_server.errors import InvalidParameter
from corpus_server.plan import Plan
from corpus_server.tools.importing import Imported, Trainer, import_plan

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


OWN_ORDER = "the order: a plan shuffles by a permutation of its own"
OF_DISJOINT = "a sample's last token is a target only: samples of L tokens are rows of seq_len L - 1"


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


def test_mosaicml_streams_keep_their_samples() -> None:
    assert imported("mosaicml", json.dumps(STREAMS)) == Imported(
        document=document({"web": 3.0, "code": 1.0}, 256, seq_len=4095, stride=4096, seed=17),
        corpora={"web": "s3://b/web/train", "code": "s3://b/code"},
        left_out=["streams.code: download_retry", "dataset: shuffle_algo", OWN_ORDER, OF_DISJOINT],
    )


@pytest.mark.parametrize(
    ("dataset", "corpora"),
    [
        ({"remote": "s3://b/web", "split": "train"}, {"train": "s3://b/web/train"}),
        ({"local": "/tmp/web", "shuffle": False}, {"train": "/tmp/web"}),
        ({"remote": "s3://b/web", "local": "/tmp/web"}, {"train": "s3://b/web"}),
        ({"remote": "s3://b", "streams": {"a": {"split": "x"}}}, {"a": "s3://b/x"}),
    ],
)
def test_a_mosaicml_dataset_may_be_one_stream(dataset: dict[str, Any], corpora: dict[str, str]) -> None:
    """Of the length, that of the dataset counts before that of the model."""
    said = {**dataset, "max_seq_len": 128}
    outer = {"max_seq_len": 64, "global_train_batch_size": 8, "train_loader": {"dataset": said}}
    (name,) = corpora
    expected = Imported(
        document=document({name: 1.0}, 8, seq_len=127, stride=128, seed=9176, order="sequential"),
        corpora=corpora,
        left_out=[OF_DISJOINT],
    )
    assert imported("mosaicml", json.dumps(outer)) == expected
    assert imported("mosaicml", json.dumps({"dataset": said}), batch_size=8) == expected
    assert imported("mosaicml", json.dumps({"train_loader": said}), batch_size=8) == expected
    assert imported("mosaicml", json.dumps(said), batch_size=8) == expected


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


PYTHIA = """
{
  "pipe-parallel-size": 1,
  "seq-length": 2048,
  "max-position-embeddings": 2048,
  "attention-config": [[["flash"], 6]],

  # batch size (trained on 32 gpus)
  "train_micro_batch_size_per_gpu": 32,
  "gas": 1,
  "data-impl": "mmap",
  "train-iters": 143000,
  "train-data-paths": ["/fsx/pile/pile_20B_tokenizer_text_document"],
  "valid-data-paths": ["/fsx/pile/pile_20B_tokenizer_text_document"],
  "test-data-paths": ["/fsx/pile/pile_20B_tokenizer_text_document"],
  "deepspeed_slurm": true,
}
"""
"""What is of data in `models/70M/pythia-70m.yml` of EleutherAI/pythia, and some more."""
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


RUN_OF_CORE: dict[str, Any] = {
    "dataset": {
        "_CLASS_": "olmo_core.data.numpy_dataset.NumpyFSLDatasetConfig",
        "paths": ["/d/b/part-0.npy", "/d/a/part-10.npy", "/d/a/part-9.npy", "/d/b/part-0.npy"],
        "sequence_length": 4096,
        "max_target_sequence_length": 8192,
        "generate_doc_lengths": True,
        "instance_filter_config": {"repetition_max_period": 13},
        "tokenizer": {"vocab_size": 100278, "eos_token_id": 100257, "pad_token_id": 100277},
    },
    "data_loader": {"global_batch_size": 4096 * 256, "seed": 34521, "work_dir": "/tmp/work"},
    "trainer": {"max_duration": {"value": 2, "unit": "epochs"}, "callbacks": {"lm": {"_CLASS_": "a.B"}}},
}
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


FIRST_OLMO = """
seed: 6198
model:
  max_sequence_length: 2048
  vocab_size: 50280
  eos_token_id: 50279
global_train_batch_size: 2048
max_duration: 2ep
data:
  drop_last: true
  generate_attention_mask: true
  paths:
    - s3://ai2-llm/preprocessed/part-0.npy
    - s3://ai2-llm/preprocessed/part-1.npy
"""


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


def test_a_key_that_overrides_a_merged_one_is_given_once() -> None:
    text = (
        yaml.safe_dump(RUN_OF_CORE)
        + "base: &base {seed: 1}\nother: &other {<<: *base, seed: 2}\nlast: {<<: *other}\n"
    )
    assert imported("olmo", text, order="olmo") == imported("olmo", json.dumps(RUN_OF_CORE), order="olmo")
