"""A blend of Megatron, `0.3 /data/web 0.7 /data/code`, or its command-line arguments."""

from __future__ import annotations

import re
import shlex
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
from corpus_server.tools.importing.texts import is_object

_BLEND: Final = ("--data-path", "--train-data-path")
_NUMBERS: Final = {"seq_len": "--seq-length", "batch_size": "--global-batch-size", "seed": "--seed"}
_WEIGHT: Final = re.compile(r"\d*\.?\d+([eE][+-]?\d+)?")
_SURPLUS: Final = "--mid-level-dataset-surplus"
_ARGUMENTS: Final = {
    "--split": "serve the training part of each corpus, with token_range= or #train",
    "--valid-data-path": "make a plan of its own for it",
    "--test-data-path": "make a plan of its own for it",
    "--rampup-batch-size": "add a stage for each batch size",
    "--train-iters": "a plan has no end; the loader takes num_steps",
    "--train-samples": "a plan has no end; the loader takes num_steps",
    "--eod-mask-loss": "the loader takes ignore_index",
    "--reset-position-ids": "batches have positions",
    "--reset-attention-mask": "batches have document_ids and cu_seqlens",
}
"""Megatron's arguments about data that a plan does not have, and what takes their place."""


def read(text: str, given: Mapping[str, int], keeps_order: bool) -> Imported:
    """Return the plan; see `import_plan`."""
    if is_object(text):
        accepted = "arguments or a blend of Megatron"
        remedy = "name another trainer, whose configuration it is"
        raise InvalidParameter.expected("file", accepted, "JSON or YAML", remedy=remedy)
    words, arguments = shlex.split(text, comments=True), dict[str, list[str]]()
    if words and not words[0].startswith("--"):
        words = ["--data-path", *words]
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            arguments.pop(name, None)  # said again: it counts anew, and the words that follow are its values
            arguments[name] = [value] if value else []
        elif arguments:
            arguments[next(reversed(arguments))].append(word)
    option = next((name for name in _BLEND if name in arguments), _BLEND[0])
    blend = arguments.pop(option, [])
    weights, paths = (blend[::2], blend[1::2]) if len(blend) > 1 else (["1"] * len(blend), blend)
    if len(weights) != len(paths) or not all(map(_WEIGHT.fullmatch, weights)):
        accepted = "a weight before each path (Megatron would weigh by samples)"
        raise InvalidParameter.expected("--data-path", accepted, blend)
    sources = [([path], float(weight)) for path, weight in zip(paths, weights, strict=True)]
    values = {name: arguments.pop(argument, []) for name, argument in _NUMBERS.items()}
    said: dict[str, int] = {
        name: _integer(_NUMBERS[name], value[0]) for name, value in values.items() if value
    }
    said = {"seed": 1234, **said, **given}
    # Of one path without a weight, and of one path of its own for training, Megatron makes no blend.
    is_blend = len(blend) > (2 if option == "--train-data-path" else 1)
    num_samples, split = 0, ["1"]
    if keeps_order:
        split = arguments.pop("--split", [DEFAULT_SPLIT]) if option == "--data-path" else split
        num_samples = _num_samples(arguments, said)
    left_out = [f"{name}: {_ARGUMENTS[name]}" for name in arguments if name in _ARGUMENTS]
    if others := [name for name in arguments if name not in _ARGUMENTS]:
        left_out.append(f"arguments that are not read: {', '.join(others)}")
    if not keeps_order:
        return imported(sources, said, [*left_out, ACROSS])
    shares = [float(share) for share in re.findall(r"[.0-9]+", "".join(split))]
    return with_samples(
        sources, said, left_out, trainer="megatron", num_samples=num_samples, split=shares, is_blend=is_blend
    )


def _num_samples(arguments: dict[str, list[str]], said: Mapping[str, int]) -> int:
    """Return the samples of a run as Megatron counts them; they decide its order."""
    if (surplus := arguments.pop(_SURPLUS, ["0.005"])) != ["0.005"]:
        accepted = "0.005, Megatron's default, with order megatron"
        raise InvalidParameter.expected(_SURPLUS, accepted, surplus)
    iterations, samples = arguments.pop("--train-iters", []), arguments.pop("--train-samples", [])
    if "num_samples" in said:
        return said["num_samples"]
    if samples:
        return _integer("--train-samples", samples[0])
    if iterations and "batch_size" in said:
        return _integer("--train-iters", iterations[0]) * said["batch_size"]
    raise too_little_said("Megatron", "--train-samples, or --train-iters and --global-batch-size")


def _integer(name: str, value: str) -> int:
    if not value.isdecimal():
        raise InvalidParameter.expected(name, "an integer", value)
    return int(value)
