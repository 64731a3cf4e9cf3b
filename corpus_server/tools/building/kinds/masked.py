"""What the loss of each token of a document is multiplied by, as fields beside its token ids say.

    labels           the token ids, with -100 where a token is no target: 0 there, else 1
    attention_mask   1, and 0 for padding: padding at the ends of a document is left out of its tokens
    others           0 or 1 for each token, as integers or booleans, or any weight as a floating-point number

Several fields may be named: their product counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.formats.masks import MAX_WEIGHT
from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.job import NO_MASK, BuildOptions
from corpus_server.tools.building.kinds.kind import Document

_PADDING: Final = "attention_mask"
_NO_TARGET: Final = -100  # `ignore_index` of PyTorch's losses
# Fields of data sets of transformers and TRL. Who does not look at them trains on padding.
_USUAL: Final = (
    *("labels", _PADDING, "loss_mask", "assistant_masks", "completion_mask"),
    *("weights", "loss_weights"),
)


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
            would leave out a token, or give it a weight.
    """
    ids = document.content
    weights = np.ones(len(ids))
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
            weights *= (its := _weights(document, name, found))
            if name == _PADDING:
                inside = np.flatnonzero(its)
                start, stop = (int(inside[0]), int(inside[-1]) + 1) if inside.size else (0, 0)
        else:
            others[name] = found
    if (wrong := np.flatnonzero(weights > MAX_WEIGHT)).size:
        at = int(wrong[0])
        what = f"expected weights of at most {MAX_WEIGHT:g} in {', '.join(options.mask)}, got {weights[at]:g}"
        raise document.unreadable(f"{what} at token {at}", "loss masks keep weights as float16: scale them")
    for name, found in others.items():
        its = _weights(document, name, found)
        if (wrong := np.flatnonzero((weights > 0) & (its != 1))).size:
            at, named = int(wrong[0]), ",".join((*options.mask, name))
            is_target = f"has the weight {its[at]:g}" if its[at] else "is no target of training"
            raise document.unreadable(
                f"{name!r} says that token {at} {is_target}",
                f"say --mask {named} to make a loss mask of it, or --mask {NO_MASK} to train on every token",
            )
    if options.is_packed and stop - start < len(ids):
        raise document.unreadable(
            f"{_PADDING!r} says that {len(ids) - (stop - start)} of its {len(ids)} ids are padding",
            "rows of running text have none: leave out --rows packed",
        )
    mask = weights[start:stop] if options.has_masks else None
    return document._replace(content=ids[start:stop], mask=mask)


def _weights(document: Document, name: str, values: NDArray[Any]) -> NDArray[np.float64]:
    """Return what a field says of each token: `(n,)`, finite and at least 0."""
    if name.endswith("labels"):
        targets: NDArray[np.bool_] = values != _NO_TARGET
        if (wrong := np.flatnonzero(targets & (values != document.content))).size:
            at = int(wrong[0])
            raise document.unreadable(
                f"expected token ids or {_NO_TARGET} in {name!r}, got {values[at]} at token {at}, which is "
                f"{document.content[at]}: are the labels shifted?",
                f"labels stand at their own tokens; name another field, or say --mask {NO_MASK}",
            )
        return targets.astype(np.float64)
    is_right = (values == 0) | (values == 1)
    expected, remedy = "0 and 1", "weights are floating-point numbers"
    if values.dtype.kind == "f" and name != _PADDING:
        is_right, expected, remedy = (values >= 0) & np.isfinite(values), "finite weights of at least 0", ""
    if not np.all(is_right):
        at = int(np.flatnonzero(~is_right)[0])
        remedy = f"{remedy}; " if remedy and name != _PADDING else ""
        raise document.unreadable(
            f"expected {expected} in {name!r}, got {values[at]} at token {at}",
            f"{remedy}change them, or say --mask {NO_MASK}",
        )
    return values.astype(np.float64)


def with_masks(
    documents: Iterable[Document], columns: Mapping[str, Sequence[Any]], options: BuildOptions
) -> Iterator[Document]:
    """Yield the documents of rows with their loss masks; one that is wrong has an error."""
    for number, document in enumerate(documents):
        try:
            yield with_mask(document, {name: values[number] for name, values in columns.items()}, options)
        except UnreadableCorpus as error:
            yield document.failed(error)
