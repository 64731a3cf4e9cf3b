"""Fill rows with pieces by counts: how many pieces have a length, how many rows have a space.

Thousands of pieces of one length go into thousands of rows of one space in one move, so that a block of
2^18 documents takes milliseconds. docs/arithmetic.md defines this to the bit, all ties included.

The rule is called *spread*, because pieces of one length go into many rows rather than beside each other.
Pieces of one length are exchanged for each other in every epoch, and two that fill one row would meet again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
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


class _Filling:
    """Rows while pieces are put into them.

    Args:
        row_tokens: space of an empty row.
        shortest: room of the smallest piece to come; a row with less space is filled.

    Attributes:
        spaces: those that rows have, ascending.
        num_rows: that were opened.
    """

    def __init__(self, row_tokens: int, shortest: int) -> None:
        self.row_tokens, self._shortest = row_tokens, shortest
        self.spaces: list[int] = []
        self._with_space: dict[int, _Rows] = {}
        self._filled: _Rows = deque()
        self._lasts, self._befores = [0], [0]
        self.num_rows = 0

    def open(self, count: int, *numbers: int, room: int = 0) -> None:
        """Open rows that hold a piece of each class of some numbers, which have this room together."""
        held = 0
        for number in numbers:
            held = self._with(number, held)
        self._rows_of(self.row_tokens - room).append((count, held))
        self.num_rows += count

    def put(self, at: int, number: int, tokens: int, left: int) -> int:
        """Put pieces of a class into rows of the space `spaces[at]`, one each; return how many are left."""
        space = self.spaces[at]
        to, rows = self._rows_of(space - tokens), self._with_space[space]
        while rows and left:
            count, held = rows.popleft()  # those that have had this space for the longest time
            if count > left:
                rows.appendleft((count - left, held))
                count = left
            to.append((count, self._with(number, held)))
            left -= count
        if not rows:
            del self._with_space[space], self.spaces[bisect_left(self.spaces, space)]
        return left

    def _with(self, number: int, held: int) -> int:
        self._lasts.append(number)
        self._befores.append(held)
        return len(self._lasts) - 1

    def _rows_of(self, space: int) -> _Rows:
        if space < self._shortest:
            return self._filled
        if space not in self._with_space:
            insort(self.spaces, space)
            self._with_space[space] = deque()
        return self._with_space[space]

    def patterns(self) -> list[Pattern]:
        """Return the different patterns, ascending as lists of numbers; none is empty or has rows 0."""
        found: dict[tuple[int, ...], int] = {}
        for rows in (self._filled, *self._with_space.values()):
            for count, held in rows:
                numbers = []
                while held:
                    numbers.append(self._lasts[held])
                    held = self._befores[held]
                if numbers:
                    its = tuple(sorted(numbers, reverse=True))
                    found[its] = found.get(its, 0) + count
        return [Pattern(its, found[its]) for its in sorted(found)]


def spread(classes: Sequence[Class], row_tokens: int) -> list[Pattern]:
    """Put all pieces into rows of `row_tokens`, which is at least the longest class's `tokens`.

    Rows are opened in advance, as many as hold all tokens. Each piece, the longest first, goes into the
    emptiest row while that has room for two such pieces, and else into the fullest row that has room.

    Returns:
        The different patterns, ascending as lists of numbers; none has rows 0.
    """
    if not classes:
        return []
    filling = _Filling(row_tokens, min(each.tokens for each in classes))
    filling.open(-(-sum(tokens * pieces for tokens, pieces in classes) // row_tokens))
    _spread(filling, classes, [each.pieces for each in classes])
    return filling.patterns()


def _spread(filling: _Filling, classes: Sequence[Class], pieces: Sequence[int]) -> None:
    """Put so many pieces of each class into rows."""
    spaces, row_tokens = filling.spaces, filling.row_tokens
    for number in sorted(range(len(classes)), key=lambda number: (classes[number].tokens, number))[::-1]:
        tokens, left = classes[number].tokens, pieces[number]
        while left:
            at = len(spaces) - 1
            if at < 0 or spaces[at] < 2 * tokens:
                at = bisect_left(spaces, tokens)
                if at == len(spaces):
                    filling.open(-(-left // (row_tokens // tokens)))
            left = filling.put(at, number, tokens, left)


def spread_begun(
    classes: Sequence[Class], first_tail: int, first_whole: int, row_tokens: int
) -> tuple[list[Pattern], list[int]]:
    """Put pieces into rows that each hold a document from its beginning.

    Pieces that continue a document come first: each opens a row together with the longest whole document
    that leaves it room. The end of a document may go into a row that is open, if less of that row stays
    unused. Then the other documents are spread.

    Args:
        classes: of pieces that neither begin nor end a document, then from `first_tail` on of ends of
            documents, then from `first_whole` on of whole documents; ascending each.

    Returns:
        The patterns, and of each class the pieces that are left out, because no whole document is left.
    """
    left_out, wholes = [0] * len(classes), [each.pieces for each in classes]
    if first_whole == len(classes):
        return [], wholes
    filling = _Filling(row_tokens, min(each.tokens for each in classes[first_tail:]))
    rooms = [each.tokens for each in classes[first_whole:]]
    skipped = [0, *range(len(rooms))]  # beyond which of the classes before, counted from 1, is no piece left

    def longest(room: int) -> int:
        """Return the class of the longest whole document that needs no more room, or -1."""
        at = found = bisect_right(rooms, room)
        while found and not wholes[first_whole + found - 1]:
            found = skipped[found]
        while at > found:
            skipped[at], at = found, skipped[at]
        return first_whole + found - 1 if found else -1

    for number in (*reversed(range(first_tail)), *reversed(range(first_tail, first_whole))):
        tokens, left = classes[number].tokens, wholes[number]
        while left:
            whole = longest(row_tokens - tokens)
            if number >= first_tail:
                at = bisect_left(filling.spaces, tokens)
                unused = None if whole < 0 else row_tokens - classes[whole].tokens
                if at < len(filling.spaces) and (unused is None or filling.spaces[at] <= unused):
                    left = filling.put(at, number, tokens, left)
                    continue
            if whole < 0:
                left_out[number] = left
                break
            count = min(left, wholes[whole])
            filling.open(count, whole, number, room=tokens + classes[whole].tokens)
            wholes[whole] -= count
            left -= count
    kept = sum(each.tokens * (each.pieces - out) for each, out in zip(classes, left_out, strict=True))
    if (missing := -(-kept // row_tokens) - filling.num_rows) > 0:
        filling.open(missing)
    _spread(filling, classes, [0] * first_whole + wholes[first_whole:])
    return filling.patterns(), left_out
