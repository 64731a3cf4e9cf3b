"""A configuration of GPT-NeoX, such as Pythia's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from corpus_server.errors import InvalidParameter
from corpus_server.tools.importing.plan import (
    ACROSS,
    DEFAULT_SPLIT,
    Imported,
    imported,
    too_little_said,
    with_samples,
)
from corpus_server.tools.importing.texts import read_object

_ROWS: Final[Mapping[str, object]] = {
    "pack_impl": "packed",
    "dataset_impl": "gpt2",
    "allow_chopped": True,
    "train_epochs": None,
    "weight_by_num_documents": False,
    **dict.fromkeys(
        (
            "train_label_data_paths",
            "train_reward_data_paths",
            "pos_train_data_paths",
            "neg_train_data_paths",
            "precompute_model_name",
        )
    ),
}
"""GPT-NeoX's settings of other rows than those that are known, and of weights that follow from the files."""

_LEFT_OUT: Final = {
    "valid_data_paths": "make a plan of its own for it",
    "test_data_paths": "make a plan of its own for it",
    "eod_mask_loss": "the loader takes ignore_index",
    "reset_position_ids": "batches have positions",
    "reset_attention_mask": "batches have document_ids and cu_seqlens",
}


def read(text: str, given: Mapping[str, int], keeps_order: bool) -> Imported:
    """Return the plan; see `import_plan`."""
    config = {name.replace("-", "_"): value for name, value in read_object(text).items() if value is not None}
    for name, accepted in _ROWS.items():
        if (value := config.get(name, accepted)) not in (accepted, []):
            raise InvalidParameter.expected(name, f"left out or {accepted!r}, as its rows are known", value)
    if (config.get("curriculum_learning") or {}).get("enabled"):
        raise InvalidParameter.expected("curriculum_learning", "left out: it cuts rows", True)
    paths, is_blend = config.get("train_data_paths"), bool(config.get("train_data_paths"))
    if not paths:
        paths = [config["data_path"]] if config.get("data_path") else []
    weights = [float(each) for each in config.get("train_data_weights") or [1.0] * len(paths)]
    if len(weights) != len(paths):
        raise InvalidParameter.expected("train_data_weights", "a weight for each path", weights)
    said = {"seed": config.get("seed", 1234)}
    if "seq_length" in config:
        said["seq_len"] = config["seq_length"]
    if "train_batch_size" in config:
        said["batch_size"] = config["train_batch_size"]
    said |= given
    if "batch_size" not in said and (each := config.get("train_micro_batch_size_per_gpu")):
        steps = config.get("gradient_accumulation_steps", config.get("gas", 1))
        raise InvalidParameter(
            "the configuration does not say batch_size: it has rows of a GPU",
            parameter="batch_size",
            remedy=f"give --batch-size, {each} x {steps} x GPUs that have other rows; Pythia has 1024",
        )
    left_out = [f"{name}: {remedy}" for name, remedy in _LEFT_OUT.items() if config.get(name)]
    sources = [([path], weight) for path, weight in zip(paths, weights, strict=True)]
    if not keeps_order:
        left_out.append(ACROSS)
        left_out += ["split: serve the training part of the corpus, with token_range="] * (not is_blend)
        return imported(sources, said, left_out)
    if "num_samples" not in said and not ("train_iters" in config and "batch_size" in said):
        raise too_little_said("GPT-NeoX", "train_iters and train_batch_size")
    split = "1" if is_blend else str(config.get("split", DEFAULT_SPLIT))
    return with_samples(
        sources,
        said,
        left_out,
        trainer="neox",
        num_samples=said.get("num_samples") or config["train_iters"] * said["batch_size"],
        split=[float(share) for share in re.split("[,/]", split)][:3],
        is_blend=is_blend,
    )
