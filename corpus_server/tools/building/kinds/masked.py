"""Which tokens of a document are targets of training, as fields beside its token ids say.

    labels           the token ids, with -100 where a token is no target
    attention_mask   1, and 0 for padding: padding at the ends of a document is left out of its tokens
    others           0 or 1 for each token, as integers, booleans or floating-point numbers

Several fields may be named: a token is a target if all of them say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.job import NO_MASK, BuildOptions
from corpus_server.tools.building.kinds.kind import Document

_PADDING: Final = "attention_mask"
_NO_TARGET: Final = -100  # `ignore_index` of PyTorch's losses
# Fields of data sets of transformers and TRL. Who does not look at them trains on padding.
_USUAL: Final = ("labels", _PADDING, "loss_mask", "assistant_masks", "completion_mask")


def mask_fields(names: Iterable[str], options: BuildOptions) -> list[str]:
    """Return the fields of a record to look at: those that the options name, and the usual ones there."""
    if options.column is None or options.mask == (NO_MASK,):
        return []
    return list(dict.fromkeys((*options.mask, *(name for name in _USUAL if name in names))))


def with_mask(
    document: Document, fields: Mapping[str, Sequence[Any] | None], options: BuildOptions
) -> Document:
    """Return a document with its loss mask, and without padding.

    Args:
        fields: values of `mask_fields`.

    Raises:
        UnreadableCorpus: a field has not one right value for each token, or one that the options do not name
            would leave out a token.
    """
    ids = document.content
    targets = np.ones(len(ids), bool)
    others = {}
    start, stop = 0, len(ids)
    for name, values in fields.items():
        found = np.asarray([] if values is None else values)
        if found.shape != ids.shape:
            if name not in options.mask:
                continue  # a column of that name about something else
            raise document.unreadable(
                f"expected {len(ids)} values in {name!r}, one a token, got {len(found)}"
            )
        if name in options.mask:
            targets &= (its := _targets(document, name, found))
            if name == _PADDING:
                inside = np.flatnonzero(its)
                start, stop = (int(inside[0]), int(inside[-1]) + 1) if inside.size else (0, 0)
        else:
            others[name] = found
    for name, found in others.items():
        if (wrong := np.flatnonzero(targets & ~_targets(document, name, found))).size:
            named = ",".join((*options.mask, name))
            raise document.unreadable(
                f"{name!r} says that token {wrong[0]} is no target of training",
                f"say --mask {named} to make a loss mask of it, or --mask {NO_MASK} to train on every token",
            )
    if options.is_packed and stop - start < len(ids):
        raise document.unreadable(
            f"{_PADDING!r} says that {len(ids) - (stop - start)} of its {len(ids)} ids are padding",
            "rows of running text have none: leave out --rows packed",
        )
    mask = targets[start:stop].astype(np.uint8) if options.has_masks else None
    return document._replace(content=ids[start:stop], mask=mask)


def _targets(document: Document, name: str, values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which tokens a field calls targets."""
    if name.endswith("labels"):
        targets: NDArray[np.bool_] = values != _NO_TARGET
        if (wrong := np.flatnonzero(targets & (values != document.content))).size:
            at = int(wrong[0])
            raise document.unreadable(
                f"expected token ids or {_NO_TARGET} in {name!r}, got {values[at]} at token {at}, which is "
                f"{document.content[at]}: are the labels shifted?",
                f"labels stand at their own tokens; name another field, or say --mask {NO_MASK}",
            )
        return targets
    if not (is_one := values == 1).all() and (wrong := np.flatnonzero(~is_one & (values != 0))).size:
        what = f"expected 0 and 1 in {name!r}, got {values[wrong[0]]} at token {wrong[0]}"
        remedy = f"a loss mask keeps one of the two for each token; round them, or say --mask {NO_MASK}"
        raise document.unreadable(what, remedy)
    return np.asarray(is_one)


def with_masks(
    documents: Iterable[Document], columns: Mapping[str, Sequence[Any]], options: BuildOptions
) -> Iterator[Document]:
    """Yield the documents of rows with their loss masks; one that is wrong has an error."""
    for number, document in enumerate(documents):
        try:
            yield with_mask(document, {name: values[number] for name, values in columns.items()}, options)
        except UnreadableCorpus as error:
            yield document.failed(error)
