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

LEAST_PIECES: Final = 128
"""Pieces of a class that takes no further length. With fewer, neighbours meet again more often; with more,
rows are less full."""

_SPAN: Final = 512
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


_Rows = deque[tuple[int, int]]
"""Rows of one space: how many hold the same, and what, as a number. Those that got it first come first.

What rows hold is a number of two lists: the class that came last, and the number of what they held before; 0
is nothing. As nested tuples, which the garbage collector visits, the same takes five times as long."""


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
    spaces = [row_tokens]  # ascending, those that rows have
    with_space: dict[int, _Rows] = {row_tokens: deque([(opened, 0)])}
    filled: _Rows = deque()
    lasts, befores = [0], [0]
    shortest = classes[0].tokens
    for number in range(len(classes) - 1, -1, -1):
        tokens, left = classes[number]
        while left:
            at = len(spaces) - 1
            if at < 0 or spaces[at] < 2 * tokens:
                at = bisect_left(spaces, tokens)
                if at == len(spaces):
                    spaces.append(row_tokens)
                    with_space[row_tokens] = deque([(-(-left // (row_tokens // tokens)), 0)])
            space = spaces[at]
            after = space - tokens
            if after < shortest:
                to = filled
            elif after in with_space:
                to = with_space[after]
            else:
                to = with_space[after] = deque()
                insort(spaces, after)
                at += 1
            rows = with_space[space]
            while rows and left:
                count, held = rows.popleft()  # those that have had this space for the longest time
                if count > left:
                    rows.appendleft((count - left, held))
                    count = left
                to.append((count, len(lasts)))
                lasts.append(number)
                befores.append(held)
                left -= count
            if not rows:
                del with_space[space], spaces[at]
    return _patterns((filled, *with_space.values()), lasts, befores)


def _patterns(groups: Sequence[_Rows], lasts: list[int], befores: list[int]) -> list[Pattern]:
    found: dict[tuple[int, ...], int] = {}
    for rows in groups:
        for count, held in rows:
            numbers = []
            while held:
                numbers.append(lasts[held])
                held = befores[held]
            if numbers:
                its = tuple(reversed(numbers))
                found[its] = found.get(its, 0) + count
    return [Pattern(its, found[its]) for its in sorted(found)]
