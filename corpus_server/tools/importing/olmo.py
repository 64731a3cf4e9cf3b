"""The configuration that an OLMo-core run saves, or one of OLMo, the trainer before it."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from corpus_server.corpus.selection import natural_key
from corpus_server.errors import InvalidParameter
from corpus_server.tools.importing.plan import Imported, imported, unread
from corpus_server.tools.importing.texts import read_object

_READ: Final = ("paths", "source_mixture_config", "sequence_length", "dtype", "tokenizer")
_DTYPES: Final = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}

_FILTER: Final = "OLMo leaves the instances that it filters out of the loss; here they count"
_LEFT_OUT: Final = {
    "instance_filter_config": _FILTER,
    "label_mask_paths": "serve masks beside the shards, see docs/formats.md",
    "generate_doc_lengths": "batches have document_ids and cu_seqlens",
}
"""What OLMo makes of a batch besides its tokens, and what takes its place."""
_END: Final = "the plan ends after an epoch, or as many as --num-epochs says, and the loader takes num_steps"
_LOADER: Final = {
    *("seed", "global_batch_size", "work_dir", "num_threads", "num_workers", "prefetch_factor"),
    *("target_device_type", "ignore_fingerprint_mismatch", "_CLASS_"),
}
"""Fields of OLMo-core's data loader that are read, or that change no row."""


def read(text: str, given: Mapping[str, int], keeps_order: bool) -> Imported:
    """Return the plan; see `import_plan`."""
    config = read_object(text)
    if "data" in config and "dataset" not in config:
        return _first_olmo(config, given, keeps_order)
    dataset, loader = config.get("dataset") or {}, config.get("data_loader") or {}
    mixture = dataset.get("source_mixture_config")
    if mixture:
        kinds = mixture.get("source_configs") or mixture.get("source_list", {}).get("sources") or []
        sources = [(each["paths"], float(each["target_ratio"])) for each in kinds]
        names = [str(each["source_name"]) for each in kinds]
    else:
        if not dataset.get("paths"):
            accepted = "paths or a source_mixture_config (a named mix is a list inside OLMo-core)"
            remedy = "write the paths of the mix into the configuration, as docs/start/replay.md does"
            raise InvalidParameter.expected("dataset", accepted, dataset.get("mix"), remedy=remedy)
        sources, names = [(dataset["paths"], 1.0)], ["olmo"]
    length = dataset.get("sequence_length") or (mixture or {}).get("sequence_length")
    said: dict[str, Any] = {"seed": loader.get("seed", 0)}
    if length:
        said["seq_len"] = length - 1
        if tokens := loader.get("global_batch_size"):
            said["batch_size"] = tokens // length
    said |= given
    options = _file_options(dataset.get("dtype"), dataset.get("tokenizer") or {})
    if not keeps_order:
        left_out = unread(dataset, set(_READ), "dataset")
        left_out += unread(loader, {"seed", "global_batch_size"}, "data_loader")
        return imported(sources, said, left_out, names=names, are_rows=True, options=options)
    _require_known_rows(config, dataset, loader)
    paths = list(dataset["paths"])
    if (seed := dataset.get("source_permutation_seed")) is not None:
        random.Random(seed).shuffle(paths)  # as OLMo-core does
    left_out = [f"dataset.{name}: {remedy}" for name, remedy in _LEFT_OUT.items() if dataset.get(name)]
    left_out += unread(loader, _LOADER, "data_loader")
    order: dict[str, Any] = {}
    if (target := dataset.get("max_target_sequence_length")) not in (None, length):
        order["max_target_sequence_length"] = target
    duration = (config.get("trainer") or {}).get("max_duration") or {}
    if duration.get("unit") == "epochs":
        order["num_epochs"] = duration["value"]
    elif duration and "num_epochs" not in given:
        said_in = f"{duration.get('value')} {duration.get('unit')}"
        left_out.append(f"trainer.max_duration: {said_in}; {_END}")
    return _olmo_order(paths, said, order, left_out, options)


def _require_known_rows(
    config: Mapping[str, Any], dataset: Mapping[str, Any], loader: Mapping[str, Any]
) -> None:
    """Refuse an OLMo-core run whose batches order `olmo` does not have."""
    kinds = [str(dataset.get(name) or "fsl") for name in ("_CLASS_", "name", "type")]
    for kind in (each.rpartition(".")[2] for each in kinds):
        if kind not in ("fsl", "NumpyFSLDatasetConfig", "NumpyDatasetConfig"):
            accepted = "NumpyFSLDatasetConfig with order olmo, whose instances are known"
            raise InvalidParameter.expected("dataset", accepted, kind)
    if (kind := str(loader.get("_CLASS_") or "NumpyDataLoaderConfig").rpartition(".")[2]) != (
        "NumpyDataLoaderConfig"
    ):
        raise InvalidParameter.expected("data_loader", "NumpyDataLoaderConfig with order olmo", kind)
    if dataset.get("source_mixture_config"):
        accepted = "paths with order olmo: how much a mixture takes of a file follows from all files' sizes"
        raise InvalidParameter.expected("dataset.source_mixture_config", accepted, "a mixture")
    callbacks = (config.get("trainer") or {}).get("callbacks") or {}
    for name, callback in callbacks.items():
        words = f"{name} {(callback or {}).get('_CLASS_')}".lower().replace("_", "")
        is_on = (callback or {}).get("enabled", True)
        if is_on and ("batchsizescheduler" in words or "sequencelengthscheduler" in words):
            accepted = "left out with order olmo: it changes the batches of a run"
            raise InvalidParameter.expected(f"trainer.callbacks.{name}", accepted, callback)


def _first_olmo(config: Mapping[str, Any], given: Mapping[str, int], keeps_order: bool) -> Imported:
    """Read a configuration of OLMo (`olmo/config.py`), the trainer before OLMo-core."""
    data, model = config["data"], config.get("model") or {}
    length = model.get("max_sequence_length")
    groups = data.get("datasets") or {}
    paths = [path for label in sorted(groups) for path in groups[label]] or list(data.get("paths") or [])
    seed = data.get("seed")
    said = {"seed": config.get("seed", 6198) if seed is None else seed}
    if length:
        said["seq_len"] = length - 1
    if rows := config.get("global_train_batch_size"):
        said["batch_size"] = rows
    said |= given
    options = _file_options(data.get("memmap_dtype", "uint16"), model)
    if not keeps_order:
        left_out = unread(data, {"paths", "datasets", "seed", "memmap_dtype"}, "data")
        sources = [(paths, 1.0)] if paths else []
        return imported(sources, said, left_out, names=["olmo"], are_rows=True, options=options)
    if not data.get("drop_last"):
        accepted = "true with order olmo: else the last batches of an epoch repeat rows or are not full"
        raise InvalidParameter.expected("data.drop_last", accepted, data.get("drop_last", False))
    left_out = [
        f"data.{name}: {remedy}"
        for name, remedy in {**_LEFT_OUT, "instance_filter": _FILTER}.items()
        if data.get(name)
    ]
    order: dict[str, Any] = {"first_epoch": 0}
    duration = str(config.get("max_duration", ""))
    if duration.endswith("ep"):
        order["num_epochs"] = int(duration.removesuffix("ep"))
    elif duration and "num_epochs" not in given:
        left_out.append(f"max_duration: {duration}; {_END}")
    return _olmo_order(paths, said, order, left_out, options)


def _file_options(dtype: str | None, tokenizer: Mapping[str, Any]) -> str:
    """Return what OLMo's files do not say of themselves, as `serve` takes it: dtype and end-of-text."""
    if dtype is None and (size := tokenizer.get("vocab_size")):
        dtype = next(name for name, bits in _DTYPES.items() if size <= 2**bits)  # as OLMo-core chooses it
    eot = tokenizer.get("eos_token_id")
    return ("" if dtype is None else f",dtype={dtype}") + ("" if eot is None else f",eot={eot}")


def _olmo_order(
    paths: Sequence[str],
    said: Mapping[str, int],
    order: dict[str, Any],
    left_out: Sequence[str],
    options: str,
) -> Imported:
    """Return the plan in OLMo's order over paths in the run's order."""
    if pattern := next((path for path in paths if re.search(r"[*?\[]|\$\{", path)), None):
        accepted = "paths without patterns with order olmo, whose rows follow from the order of the files"
        raise InvalidParameter.expected("paths", accepted, pattern)
    files = sorted(set(paths), key=natural_key)  # as a corpus orders its shards
    if files != list(paths):
        numbers = {path: number for number, path in enumerate(files)}
        order["shards"] = [numbers[path] for path in paths]
    if "num_epochs" in said:
        order["num_epochs"] = said["num_epochs"]
    told = [*left_out, "which rank has which row of a step: rank k of W has rows k, k + W, ... in OLMo"]
    sources = [(files, 1.0)] if files else []
    return imported(
        sources, said, told, names=["olmo"], are_rows=True, options=options, order={"olmo": order}
    )
