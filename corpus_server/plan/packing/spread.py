"""Fill rows with pieces by counts: how many pieces have a length, how many rows have a space.

Thousands of pieces of one length go into thousands of rows of one space in one move, so that a block of
2^18 documents takes milliseconds. docs/arithmetic.md defines this to the bit, all ties included.

The rule is called *spread*, because pieces of one length go into many rows rather than beside each other.
Pieces of one length are exchanged for each other in every epoch, and two that fill one row would meet again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

LEAST_PIECES: Final = 64
"""Pieces of a class that takes no further length. With fewer, neighbours meet again more often; with more,
rows are less full."""

_SPAN: Final = 400
"""One part in so many: how much shorter than the longest piece of its class a piece may be. Rows of 32,768
tokens lose 0.05 % to that."""


class Class(NamedTuple):
    """Pieces of similar length, which take each other's places."""

    tokens: int  # of the longest piece, for which each place has room
    pieces: int


class Pattern(NamedTuple):
    """Rows that hold pieces of the same classes."""

    classes: tuple[int, ...]  # numbers, descending, so that the longest piece comes first
    rows: int


_Node = tuple[int, "_Node"] | None
"""What rows hold so far: the class that came last, and what they held before it."""


def merge(lengths: Sequence[tuple[int, int]]) -> list[Class]:
    """Return the classes of pieces, the shortest first.

    Args:
        lengths: tokens and number of the pieces of each length, ascending.
    """
    classes: list[Class] = []
    longest = pieces = 0
    for tokens, number in reversed(lengths):
        if pieces and (pieces >= LEAST_PIECES or (longest - tokens) * _SPAN > longest):
            classes.append(Class(longest, pieces))
            pieces = 0
        if not pieces:
            longest = tokens
        pieces += number
    if pieces:
        classes.append(Class(longest, pieces))
    classes.reverse()
    return classes


def spread(classes: Sequence[Class], row_tokens: int) -> list[Pattern]:
    """Put all pieces into rows of `row_tokens`, which is at least the longest class's `tokens`.

    Rows are opened in advance, as many as hold all tokens. Each piece, the longest first, goes into the
    emptiest row while that has room for two such pieces, and else into the fullest row that has room.

    Returns:
        The different patterns, ascending as lists of numbers; none has rows 0.
    """
    if not classes:
        return []
    opened = -(-sum(tokens * pieces for tokens, pieces in classes) // row_tokens)
    open_rows: dict[int, deque[tuple[int, _Node]]] = {row_tokens: deque([(opened, None)])}
    spaces, filled = [row_tokens], list[tuple[int, _Node]]()
    shortest = classes[0].tokens
    for number in range(len(classes) - 1, -1, -1):
        tokens, left = classes[number]
        while left:
            space = spaces[-1] if spaces else 0
            if space < 2 * tokens:
                fullest = bisect_left(spaces, tokens)
                if fullest == len(spaces):
                    spaces.append(row_tokens)
                    open_rows[row_tokens] = deque([(-(-left // (row_tokens // tokens)), None)])
                    continue
                space = spaces[fullest]
            rows = open_rows[space]
            count, held = rows[0]  # those that have had this space for the longest time
            moved = min(count, left)
            if count > left:
                rows[0] = count - left, held
            else:
                rows.popleft()
                if not rows:
                    del open_rows[space], spaces[bisect_left(spaces, space)]
            left -= moved
            space -= tokens
            if space < shortest:
                filled.append((moved, (number, held)))
            elif space in open_rows:
                open_rows[space].append((moved, (number, held)))
            else:
                open_rows[space] = deque([(moved, (number, held))])
                insort(spaces, space)
    return _patterns(filled, *open_rows.values())


def _patterns(*groups: Sequence[tuple[int, _Node]]) -> list[Pattern]:
    found: dict[tuple[int, ...], int] = {}
    for group in groups:
        for count, held in group:
            numbers = []
            while held is not None:
                number, held = held
                numbers.append(number)
            if numbers:
                classes = tuple(reversed(numbers))
                found[classes] = found.get(classes, 0) + count
    return [Pattern(classes, found[classes]) for classes in sorted(found)]
