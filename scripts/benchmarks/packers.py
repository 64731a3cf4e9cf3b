"""Pack documents into rows by the rules of others, for comparison: each takes lengths in tokens.

The rules are written anew here, in Python, which OLMo-core and nanochat use, too. A row has `seq_len`
predictions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.packing.spread import Class, Pattern

Lengths = NDArray[np.int64]
_List = tuple[int, ...]


class Packed(NamedTuple):
    """What a rule makes of documents."""

    rows: int
    row_tokens: int
    used: int  # tokens of rows that are no padding; a token in two rows counts twice
    begin: int  # rows whose first token is the first one of a document
    cut: int  # documents that would fit into a row, and are in several or not whole
    lost: int  # tokens that come in no row


def concatenate_and_cut(lengths: Lengths, seq_len: int) -> Packed:
    """Lay all documents end to end and cut every `seq_len` tokens."""
    starts = lengths.cumsum() - lengths
    rows = int(lengths.sum() - 1) // seq_len
    cut = (lengths <= seq_len + 1) & (starts // seq_len < (starts + lengths - 2) // seq_len)
    begin = int((starts % seq_len == 0).sum())
    return Packed(rows, seq_len + 1, rows * (seq_len + 1), begin, int(cut.sum()), 0)


def crop(lengths: Lengths, seq_len: int, num_kept: int = 1000) -> Packed:
    """Fill each row from a buffer as nanochat does (dataloader.py), and crop what does not fit.

    The longest document that fits comes next. If none fits, the shortest one fills the row, and its end is
    lost.
    """
    coming = iter(lengths.tolist())
    kept = sorted(length for _, length in zip(range(num_kept), coming, strict=False))
    rows = cut = lost = 0
    row_tokens = left = seq_len + 1
    while kept:
        at = bisect_right(kept, left) - 1
        length = kept.pop(max(at, 0))
        cut += at < 0 and length <= row_tokens
        lost += max(length - left, 0)
        left -= min(length, left)
        if not left:
            rows, left = rows + 1, row_tokens
        if (following := next(coming, None)) is not None:
            insort(kept, following)
    return Packed(rows, row_tokens, rows * row_tokens, rows, cut, lost)


def best_fit_documents(lengths: Lengths, seq_len: int) -> Packed:
    """Pack by best-fit decreasing, document by document, as OLMo-core's InstancePacker does.

    Documents are cut every `seq_len` tokens, and no token is in two parts. A row has `seq_len` tokens.
    """
    parts = [
        (min(seq_len, length - first), not first)
        for length in lengths.tolist()
        for first in range(0, length, seq_len)
    ]
    rows = _best_fit(sorted(parts, key=lambda part: -part[0]), seq_len)
    return Packed(len(rows), seq_len, int(lengths.sum()), sum(rows), 0, 0)


def _best_fit(parts: Sequence[tuple[int, bool]], row_tokens: int) -> list[bool]:
    """Return for each row whether its first part begins a document."""
    rows: list[bool] = []
    with_space: dict[int, int] = {}
    spaces: list[int] = []
    for tokens, begins in parts:
        at = bisect_left(spaces, tokens)
        if at == len(spaces):
            rows.append(begins)
            space = row_tokens
        else:
            space = spaces[at]
            with_space[space] -= 1
            if not with_space[space]:
                del spaces[at], with_space[space]
        if space := space - tokens:
            if space not in with_space:
                insort(spaces, space)
            with_space[space] = with_space.get(space, 0) + 1
    return rows


def first_fit(lengths: Lengths, seq_len: int) -> Packed:
    """Put each tail into the first row that has room, in file order; full pieces have rows of their own."""
    row_tokens = seq_len + 1
    predictions = np.maximum(lengths - 1, 0)
    full, rest = np.divmod(predictions, seq_len)
    tails = [(int(tokens), not before) for tokens, before in zip(rest + 1, full, strict=True) if tokens > 1]
    size = 1 << max(1, len(tails)).bit_length()
    most = [row_tokens] * (2 * size)  # a tree over the rows: the largest space below each node
    begins: dict[int, bool] = {}
    for tokens, is_first in tails:
        node = 1
        while node < size:
            node = 2 * node + (most[2 * node] < tokens)
        begins.setdefault(node, is_first)
        most[node] -= tokens
        while node := node >> 1:
            most[node] = max(most[2 * node], most[2 * node + 1])
    rows = len(begins) + int(full.sum())
    begin = sum(begins.values()) + int((full > 0).sum())
    used = int(predictions.sum() + full.sum() + np.count_nonzero(rest))
    return Packed(rows, row_tokens, used, begin, 0, 0)


def best_fit_counts(classes: Sequence[Class], row_tokens: int) -> list[Pattern]:
    """Pack classes by best-fit decreasing: the rule *spread* without rows opened in advance."""
    with_space: dict[int, deque[tuple[int, _List]]] = {}
    spaces: list[int] = []
    for number in range(len(classes) - 1, -1, -1):
        tokens, left = classes[number]
        while left:
            at = bisect_left(spaces, tokens)
            if at == len(spaces):
                each = row_tokens // tokens  # a new row takes all that it has room for
                moves = [(left // each, each), (1, left % each)]
                taken: list[tuple[int, _List, int]] = [
                    (rows, (), pieces) for rows, pieces in moves if rows and pieces
                ]
            else:
                count, held = with_space[spaces[at]].popleft()
                each = spaces[at] // tokens
                rows = min(count, max(1, left // each))
                taken = [(rows, held, min(each, left))]
                if count > rows:
                    with_space[spaces[at]].appendleft((count - rows, held))
                elif not with_space[spaces[at]]:
                    del with_space[spaces[at]], spaces[at]
            for rows, held, pieces in taken:
                left -= rows * pieces
                held = (*held, *[number] * pieces)
                space = row_tokens - sum(classes[each].tokens for each in held)
                if space not in with_space:
                    with_space[space] = deque()
                    insort(spaces, space)
                with_space[space].append((rows, held))
    return [Pattern(held, rows) for groups in with_space.values() for rows, held in groups]


def meeting_again(classes: Sequence[Class], patterns: Sequence[Pattern]) -> float:
    """Return which share of neighbours in rows shares a row in the next epoch, too, by one trial."""
    random = np.random.default_rng(0)
    slot_class = np.concatenate([np.tile(each.classes, each.rows) for each in patterns])
    slot_row = np.repeat(
        np.arange(sum(each.rows for each in patterns)), [n for each in patterns for n in _sizes(each)]
    )
    by_class = slot_class.argsort(kind="stable")
    first = np.cumsum([each.pieces for each in classes]) - [each.pieces for each in classes]
    rows_of_pieces = np.empty((2, slot_row.size), dtype=np.int64)
    for epoch in rows_of_pieces:
        for begin, each in zip(first.tolist(), classes, strict=True):
            its = slice(begin, begin + each.pieces)
            epoch[its] = random.permutation(slot_row[by_class[its]])
    # The pieces of a row in the order of its classes, as its neighbours are.
    order = np.lexsort((np.arange(slot_row.size), rows_of_pieces[0]))
    now, then = rows_of_pieces[:, order]
    neighbours = now[1:] == now[:-1]
    again = neighbours & (then[1:] == then[:-1])
    return int(again.sum()) / max(1, int(neighbours.sum()))


def _sizes(pattern: Pattern) -> Iterator[int]:
    for _ in range(pattern.rows):
        yield len(pattern.classes)
