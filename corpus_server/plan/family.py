"""A family of plans: each member leaves out documents of its own, chosen by a key.

    "family": {"seed": 7, "leave_out": 0.1, "member": 3}

Whether a member leaves a document out follows from the family's seed, the name of the source, the member's
number and the document's number alone. So nothing is stored, and any member of a thousand is one more plan.

With `"by": COLUMN` the hash of the document's value in a column of metadata stands in the place of its
number, so that a member leaves out all documents of a value, or none. A document without a value counts by
its number.

With `"double": SHARE` a member has other documents twice, chosen by the same hash:

    0          leave_out                1 - double          1
    | left out |  as without a family  |  doubled          |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import UInt64Array
from corpus_server.plan.declared import Declared, Kind, checked, declared, integer, texts
from corpus_server.plan.orders import Order
from corpus_server.plan.permutation import hashed_number, mix64, stream_key
from corpus_server.plan.rows.rows import Rows
from corpus_server.plan.stage import Stage

MAX_MEMBERS: Final = 2**16
_MAX_NAME: Final = 256
_UNITS: Final = 2**53
"""A double below 1 is a multiple of 1/2^53, or next to one."""


def _share() -> Kind:
    schema = {"type": "number", "minimum": 1 / _UNITS, "exclusiveMaximum": 1}
    accepted = "a number of at least 2**-53, the smallest share of hashes, and below 1"
    # Of integers none lies between; a bool is an int to isinstance.
    return checked(schema, accepted, lambda value: type(value) is float and 1 / _UNITS <= value < 1)


def _column() -> Kind:
    return checked(
        {"type": "string", "minLength": 1, "maxLength": _MAX_NAME},
        f"the name of a column of metadata, of at most {_MAX_NAME} characters",
        lambda value: isinstance(value, str) and 0 < len(value) <= _MAX_NAME,
    )


class Family(Declared):
    """Which member of a family a plan is.

    Raises:
        InvalidPlan: a field is outside its range.
    """

    prefix = "family."

    seed: int = declared(integer(0, 2**64 - 1), "Of the family; default 0.", default=0)
    leave_out: float = declared(_share(), "Share of the documents that a member leaves out.")
    member: int = declared(integer(0, MAX_MEMBERS - 1), "Number of the member.")
    double: float | None = declared(
        _share(),
        "Share of the documents that a member doubles, in the rows of those that it leaves out.",
        omit=True,
        default=None,
    )
    documents: Mapping[str, str] = declared(
        texts("an object of strings"),
        "Digests of where the documents of each corpus end; the server fills them in.",
        omit=True,
        default_factory=dict,
    )
    by: str | None = declared(
        _column(),
        "Column of the documents' metadata: a member leaves out documents by their values there.",
        omit=True,
        default=None,
    )
    values: Mapping[str, str] = declared(
        texts("an object of strings"),
        "Digests of the values of `by` in each corpus; the server fills them in.",
        omit=True,
        default_factory=dict,
    )

    def settled(self) -> dict[str, Any]:
        """See `Declared.settled`."""
        if self.values and self.by is None:
            raise InvalidPlan.expected("family.values", "left out without by", dict(self.values))
        if self._num_doubled > self._num_out:
            accepted = f"at most leave_out, {self.leave_out}, because documents double in the rows of others"
            raise InvalidPlan.expected("family.double", accepted, self.double)
        if self._num_out + self._num_doubled >= _UNITS:
            raise InvalidPlan.expected("family.double", "below 1 together with leave_out", self.double)
        return {}

    @property
    def _num_out(self) -> int:
        return int(self.leave_out * _UNITS)

    @property
    def _num_doubled(self) -> int:
        return int((self.double or 0) * _UNITS)

    def keys(self, names: Sequence[str]) -> UInt64Array:
        """Return the family's key of each source, `(sources,) uint64`."""
        return np.array([stream_key("family", self.seed, name) for name in names], dtype=np.uint64)

    def signs(self, keys: UInt64Array, numbers: UInt64Array) -> NDArray[np.int8]:
        """Return what members do with documents, `(k,)`: 1 leaves out, -1 doubles, 0 neither.

        Args:
            keys: of a member in the documents' source, `(1,)`, or `(k,)`, see `member_keys`.
            numbers: `(k,)`, of the documents, or with `by` the hashes of their values.
        """
        hashes = hashed_number(keys, numbers) >> np.uint64(11)
        found: NDArray[np.int8] = (hashes < np.uint64(self._num_out)).astype(np.int8)
        if self.double is not None:
            found -= hashes >= np.uint64(_UNITS - self._num_doubled)
        return found


FAMILY: Final = Kind(
    Family.schema(),
    lambda what, value: value if isinstance(value, Family) else Family.from_json(value, what=what),
)


def member_keys(keys: UInt64Array, members: UInt64Array | int) -> UInt64Array:
    """Return the keys of members, by which they leave documents out, of the family's keys of sources."""
    return hashed_number(keys, np.atleast_1d(np.asarray(members, dtype=np.uint64)))


def circle_keys(keys: UInt64Array) -> UInt64Array:
    """Return the keys of members' circles, from which substitutes come, of the members' keys."""
    return mix64(keys)


def check_family(order: Order, rows: Rows, stages: Sequence[Stage]) -> None:
    """Refuse what a plan of a family cannot carry.

    Raises:
        InvalidPlan: naming the field.
    """
    if order.has_table:
        accepted = "an order that permutes rows by their numbers, with a family"
        raise InvalidPlan.expected("order", accepted, order.name)
    if type(rows).tokens_of is Rows.tokens_of:
        accepted = "rows whose tokens say which documents they hold, with a family"
        raise InvalidPlan.expected("rows", accepted, rows.name)
    for number, stage in enumerate(stages):
        if stage.exclude:
            raise InvalidPlan(
                f"stages[{number}].exclude is not built together with family, which replaces rows, too",
                parameter=f"stages[{number}].exclude",
                remedy="serve a view without these documents, and make the family over the view",
            )
