"""Rows of token ids that are pieces of a running text, as `group_texts` of transformers' examples cuts them.

Such rows have one length. Only what was left at the end of a batch may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.files import unreadable
from corpus_server.tools.building.job import BuildOptions
from corpus_server.tools.building.kinds.kind import Document

_ROWS: Final = 64  # that are looked at
_MANY: Final = 16  # documents; fewer may have one length by chance
_PADDED: Final = 0.25  # of the rows; texts that end with the same token twice are fewer
_CHOICE: Final = (
    "say --rows packed if they are pieces of a running text, --rows documents if each is a document as it is"
)


def checked(rows: Iterable[Document]) -> Iterator[Document]:
    """Yield the rows of a file; raise UnreadableCorpus where they have the lengths of documents."""
    before = full = 0
    for row in rows:
        if length := len(row.content):
            # Of two neighbours, one at least has the full length.
            if full and max(before, length) != full:
                what = f"has {length:,} ids, the row before it {before:,}, others {full:,}"
                remedy = "packed rows have one length, but for remainders: leave out --rows packed"
                raise row.unreadable(what, remedy)
            full = max(before, length) if before else 0
            before = length
        yield row


def check_documents(path: Path, rows: Iterable[Document], options: BuildOptions) -> None:
    """Raise UnreadableCorpus if the first rows of a file look as if they were packed or padded.

    They have one length then, and some hold end-of-text tokens inside, or end with the same token several
    times, or they are many and do not end with end-of-text.
    """
    some = list(islice(rows, _ROWS))
    for row in some if options.on_error == "refuse" else ():
        row.check()
    ids = [row.content for row in some if row.error is None]
    if len(ids) < 2 or len({len(row) for row in ids}) > 1 or len(ids[0]) < 2:
        return
    table: NDArray[Any] = np.stack(ids)
    last = table[:, -1]
    are = f"its first {len(ids)} rows have {table.shape[1]:,} ids each, and"
    endings, counts = np.unique(last[last == table[:, -2]], return_counts=True)
    if not options.mask and counts.size and counts.max() >= max(2, _PADDED * len(ids)):
        what = f"{are} {counts.max()} of them end with token {endings[counts.argmax()]} several times"
        remedy = f"if that is padding, name the field that says so with --mask; else {_CHOICE}"
        raise unreadable(path, what, remedy)
    if inside := (table[:, 1:-1] == options.eot).any(axis=1).sum():
        raise unreadable(path, f"{are} {inside} of them hold end-of-text token {options.eot} inside", _CHOICE)
    if len(ids) >= _MANY and (last != options.eot).any():
        what = f"{are} {(last != options.eot).sum()} of them do not end with end-of-text token {options.eot}"
        raise unreadable(path, what, _CHOICE)
