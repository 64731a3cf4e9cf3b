"""Plans from the data configurations of other trainers, and what of these a plan cannot carry over.

A plan shuffles windows by its own permutation. The orders of Megatron, GPT-NeoX and OLMo can be kept, if they
are asked for by name. Configurations are JSON or YAML. Each trainer has a file, and a line in `_READERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Literal, get_args

from corpus_server.errors import InvalidParameter
from corpus_server.tools.importing import megatron, mosaicml, neox, olmo
from corpus_server.tools.importing.plan import Imported
from corpus_server.tools.importing.texts import is_object, read_object

__all__ = ["Imported", "ImportedOrder", "ImportedRows", "OwnOrder", "Trainer", "import_plan", "trainer_of"]

Trainer = Literal["megatron", "neox", "olmo", "mosaicml"]
OwnOrder = Literal["megatron", "neox", "olmo"]
"""Trainers whose own order can be kept."""
ImportedOrder = Literal["shuffle", "megatron", "neox", "olmo"]
ImportedRows = Literal["windows", "documents"]

_READERS: Final[Mapping[Trainer, Callable[[str, Mapping[str, int], bool], Imported]]] = {
    "megatron": megatron.read,
    "neox": neox.read,
    "olmo": olmo.read,
    "mosaicml": mosaicml.read,
}


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
        order: the trainer's name keeps its own order, element for element.
        rows: `documents` joins whole documents, whatever the trainer's rows are.
        fields: `seq_len`, `batch_size` (rows of a step), `seed`, `num_samples` and `num_epochs` (of the run,
            for orders that end), which replace what the text says.

    Raises:
        InvalidParameter: the text is no such configuration, or names no weights, length or batch size.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if order not in ("shuffle", trainer):
        known = f"shuffle or {trainer}" if trainer in get_args(OwnOrder) else "shuffle"
        raise InvalidParameter.expected("order", f"{known} for a configuration of {trainer}", order)
    if rows != "windows" and order != "shuffle":
        accepted = f"windows with order {order}, which has rows of its own"
        raise InvalidParameter.expected("rows", accepted, rows)
    try:
        imported = _READERS[trainer](text, given, order != "shuffle")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidParameter(
            f"the text is no data configuration of {trainer}: {type(error).__name__} {error}",
            parameter="file",
        ) from error
    if rows == "windows":
        return imported
    document = {name: value for name, value in imported.document.items() if name != "stride"}
    return replace(imported, document={**document, "rows": rows})


def trainer_of(text: str) -> OwnOrder:
    """Return whose configuration a text is, by the fields that only this trainer has.

    Raises:
        InvalidParameter: it has none of them.
    """
    if not is_object(text):
        return "megatron"
    names = {str(name).replace("-", "_") for name in read_object(text)}
    if names & {"dataset", "data"}:
        return "olmo"
    if names & {"data_path", "train_data_paths"}:
        return "neox"
    accepted = f"one of {', '.join(get_args(OwnOrder))}; the file has neither dataset nor data-path"
    raise InvalidParameter.expected("trainer", accepted, None)
