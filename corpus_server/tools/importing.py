"""Plans from the data configurations of other trainers, and what of these a plan cannot carry over.

    megatron   a blend (`0.3 /data/web 0.7 /data/code`) or command-line arguments
    olmo       the JSON configuration that an OLMo-core run saves
    mosaicml   a configuration of MosaicML streams (llm-foundry) as JSON

A plan shuffles windows by its own permutation. Only Megatron's order can be kept, if it is asked for.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final, Literal

from corpus_server.errors import InvalidParameter
from corpus_server.user_files import parse_json

Trainer = Literal["megatron", "olmo", "mosaicml"]
ImportedOrder = Literal["shuffle", "megatron"]
ImportedRows = Literal["windows", "documents"]

_BLEND: Final = ("--data-path", "--train-data-path")
_NUMBERS: Final = {"seq_len": "--seq-length", "batch_size": "--global-batch-size", "seed": "--seed"}
_WEIGHT: Final = re.compile(r"\d*\.?\d+([eE][+-]?\d+)?")
_DEFAULT_SPLIT: Final = "969, 30, 1"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A plan from another trainer's configuration."""

    document: Mapping[str, Any]  # the plan's JSON
    corpora: Mapping[str, str]  # by the name in the plan, where the configuration has the tokens
    left_out: Sequence[str]  # what is not carried over, a sentence each


def import_plan(
    trainer: Trainer,
    text: str,
    *,
    order: ImportedOrder = "shuffle",
    rows: ImportedRows = "windows",
    **fields: int | None,
) -> Imported:
    """Make a plan of the text of a configuration.

    Args:
        order: `megatron` keeps Megatron's own order, element for element; it takes the samples of the run.
        rows: `documents` joins whole documents, whatever the trainer's rows are.
        fields: `seq_len`, `batch_size` (rows of a step) and `seed`, which replace what the text says.

    Raises:
        InvalidParameter: the text is no such configuration, or names no weights, length or batch size.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if order == "megatron" and trainer != "megatron":
        raise InvalidParameter.expected("order", f"shuffle for {trainer}, whose order is not known", order)
    try:
        imported = _IMPORTERS[trainer](text, given, order == "megatron")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidParameter(
            f"the text is no data configuration of {trainer}: {type(error).__name__} {error}",
            parameter="file",
        ) from error
    if rows == "windows":
        return imported
    document = {name: value for name, value in imported.document.items() if name != "stride"}
    return replace(imported, document={**document, "rows": rows})


def _megatron(text: str, given: Mapping[str, int], keeps_order: bool) -> Imported:
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
    sources = [(path, float(weight)) for path, weight in zip(paths, weights, strict=True)]
    values = {name: arguments.pop(argument, []) for name, argument in _NUMBERS.items()}
    said = {name: _integer(_NUMBERS[name], value[0]) for name, value in values.items() if value}
    said = {"seed": 1234, **said, **given}
    kept: dict[str, Any] = {}
    if keeps_order:
        # Of one path without a weight, and of one path of its own for training, Megatron makes no blend.
        is_blend = len(blend) > (2 if option == "--train-data-path" else 1)
        split = arguments.pop("--split", [_DEFAULT_SPLIT]) if option == "--data-path" else ["1"]
        kept = {
            "num_samples": _num_samples(arguments, said),
            **({"weights": [weight for _, weight in sources]} if is_blend else {}),
            "split": [float(share) for share in re.findall(r"[.0-9]+", "".join(split))],
        }
    left_out = [f"{name}: {_ARGUMENTS[name]}" for name in arguments if name in _ARGUMENTS]
    if others := [name for name in arguments if name not in _ARGUMENTS]:
        left_out.append(f"arguments that are not read: {', '.join(others)}")
    if keeps_order:
        left_out.append("which rank and micro batch has which row: each step has the same rows in all")
    else:
        left_out.append("samples across document and file ends: a window lies inside one file, in file order")
    imported = _imported(sources, said, left_out, order={"megatron": kept} if kept else "shuffle")
    if kept:
        kept["blend"] = list(imported.corpora)
    return imported


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
    raise InvalidParameter(
        "the configuration does not say how many samples the run has, on which Megatron's order depends",
        parameter="num_samples",
        remedy="give --train-samples, or --train-iters and --global-batch-size, or the option --num-samples",
    )


def _olmo(text: str, given: Mapping[str, int], keeps_order: bool) -> Imported:
    config = _object(text)
    dataset, loader = config.get("dataset") or {}, config.get("data_loader") or {}
    mixture = dataset.get("source_mixture_config")
    if mixture:
        kinds = mixture.get("source_configs") or mixture.get("source_list", {}).get("sources") or []
        sources = [(",".join(each["paths"]), float(each["target_ratio"])) for each in kinds]
        names = [str(each["source_name"]) for each in kinds]
    else:
        if not dataset.get("paths"):
            accepted = "paths or a source_mixture_config (a named mix is a list inside OLMo-core)"
            raise InvalidParameter.expected("dataset", accepted, dataset.get("mix"))
        sources, names = [(",".join(dataset["paths"]), 1.0)], ["olmo"]
    length = dataset.get("sequence_length") or (mixture or {}).get("sequence_length")
    said: dict[str, Any] = {"seed": loader.get("seed", 0)}
    if length:
        said["seq_len"] = length - 1
        if tokens := loader.get("global_batch_size"):
            said["batch_size"] = tokens // length
    left_out = _unread(dataset, {"paths", "source_mixture_config", "sequence_length"}, "dataset")
    left_out += _unread(loader, {"seed", "global_batch_size"}, "data_loader")
    return _imported(sources, {**said, **given}, left_out, names=names, are_rows=True)


def _mosaicml(text: str, given: Mapping[str, int], keeps_order: bool) -> Imported:
    config = _object(text)
    loader = config.get("train_loader") or config
    dataset = loader.get("dataset") or loader
    streams = dataset.get("streams") or {"train": dataset}
    sources, left_out = [], []
    for name, stream in streams.items():
        path = stream.get("remote") or stream.get("local")
        if len(streams) > 1 and not stream.get("proportion"):
            # `repeat` and `choose` are weights relative to a size that only the files say.
            raise InvalidParameter.expected(f"streams.{name}", "a proportion for each stream", stream)
        folder = "/".join(filter(None, (path or dataset.get("remote"), stream.get("split"))))
        sources.append((folder, float(stream.get("proportion") or 1.0)))
        if stream is not dataset:
            left_out += _unread(stream, {"remote", "local", "split", "proportion"}, f"streams.{name}")
    length = dataset.get("max_seq_len") or config.get("max_seq_len")
    said = {"seed": dataset.get("shuffle_seed", 9176)}
    if length:
        said["seq_len"] = length - 1
    if rows := config.get("global_train_batch_size"):
        said["batch_size"] = rows
    read = {"streams", "remote", "local", "split", "max_seq_len", "shuffle", "shuffle_seed"}
    left_out += _unread(dataset, read, "dataset")
    order = "shuffle" if dataset.get("shuffle", False) else "sequential"
    return _imported(sources, {**said, **given}, left_out, names=list(streams), are_rows=True, order=order)


def _imported(
    sources: Sequence[tuple[str, float]],
    said: Mapping[str, int],
    left_out: Sequence[str],
    *,
    names: Sequence[str] = (),
    are_rows: bool = False,
    order: str | Mapping[str, Any] = "shuffle",
) -> Imported:
    """Return the plan. With `are_rows`, samples are disjoint, `seq_len + 1` tokens each."""
    if not sources:
        raise InvalidParameter.expected("data", "the paths of tokens", None)
    for name, option in (("seq_len", "--seq-len"), ("batch_size", "--batch-size")):
        if name not in said:
            raise InvalidParameter(
                f"the configuration does not say {name}", parameter=name, remedy=f"give it with {option}"
            )
    corpora: dict[str, str] = {}
    mixture: dict[str, float] = {}
    for number, (path, weight) in enumerate(sources):
        stem = names[number] if names else PurePosixPath(path).name.removesuffix("_text_document")
        name = base = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "corpus"
        again = itertools.count(1)
        while name in corpora:
            name = f"{base}-{next(again)}"
        corpora[name], mixture[name] = path, weight
    stride = said["seq_len"] + 1 if are_rows else said["seq_len"]
    document = {
        "seq_len": said["seq_len"],
        "stride": stride,
        "seed": said["seed"],
        "order": order,
        "stages": [{"from_step": 0, "global_batch_size": said["batch_size"], "mixture": mixture}],
    }
    told = list(left_out)
    if order == "shuffle":
        told.append("the order: a plan shuffles by a permutation of its own")
    if are_rows:
        told.append("a sample's last token is a target only: samples of L tokens are rows of seq_len L - 1")
    return Imported(document=document, corpora=corpora, left_out=told)


def _unread(table: Mapping[str, Any], read: set[str], where: str) -> list[str]:
    unread = sorted(name for name, value in table.items() if name not in read and value is not None)
    return [f"{where}: {', '.join(unread)}"] if unread else []


def _object(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InvalidParameter(
            f"the configuration must be JSON: {error}",
            parameter="file",
            remedy="convert YAML with yq -o=json",
        ) from error
    if not isinstance(found, dict):
        raise InvalidParameter.expected("file", "a JSON object", found)
    return found


def _integer(name: str, value: str) -> int:
    if not value.isdecimal():
        raise InvalidParameter.expected(name, "an integer", value)
    return int(value)


_IMPORTERS: Final[Mapping[Trainer, Callable[[str, Mapping[str, int], bool], Imported]]] = {
    "megatron": _megatron,
    "olmo": _olmo,
    "mosaicml": _mosaicml,
}
