"""A configuration of MosaicML streams (llm-foundry)."""

from __future__ import annotations

from collections.abc import Mapping

from corpus_server.errors import InvalidParameter
from corpus_server.tools.importing.plan import Imported, imported, unread
from corpus_server.tools.importing.texts import read_object


def read(text: str, given: Mapping[str, int], keeps_order: bool) -> Imported:
    """Return the plan; see `import_plan`."""
    config = read_object(text)
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
        sources.append(([folder], float(stream.get("proportion") or 1.0)))
        if stream is not dataset:
            left_out += unread(stream, {"remote", "local", "split", "proportion"}, f"streams.{name}")
    length = dataset.get("max_seq_len") or config.get("max_seq_len")
    said = {"seed": dataset.get("shuffle_seed", 9176)}
    if length:
        said["seq_len"] = length - 1
    if rows := config.get("global_train_batch_size"):
        said["batch_size"] = rows
    read = {"streams", "remote", "local", "split", "max_seq_len", "shuffle", "shuffle_seed"}
    left_out += unread(dataset, read, "dataset")
    order = "shuffle" if dataset.get("shuffle", False) else "sequential"
    return imported(sources, {**said, **given}, left_out, names=list(streams), are_rows=True, order=order)
