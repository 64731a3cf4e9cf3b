"""The orders of a plan that have parameters, checked when they are made, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Literal, get_args

from corpus_server.errors import InvalidPlan
from corpus_server.plan.checking import require_fields, require_int

Order = Literal["shuffle", "sequential", "random"]
ORDERS: tuple[Order, ...] = get_args(Order)
ORDERS_ACCEPTED: Final = (
    f'one of {", ".join(ORDERS)}, or {{"shuffle": {{"block_windows": ..., "group_blocks": ...}}}}, '
    'or {"megatron": {"num_samples": ...}}'
)
MAX_BLOCK_WINDOWS: Final = 2**40
MAX_GROUP_BLOCKS: Final = 2**16
"""Reading ahead looks at each block of a group."""
MAX_NUM_SAMPLES: Final = 2**31
MAX_BLENDED: Final = 1024

Part = Literal["train", "valid", "test"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedShuffle:
    """An order that is random within groups of blocks, for corpora larger than memory."""

    block_windows: int  # consecutive windows of a block, in [1, 2^40]
    group_blocks: int  # blocks whose windows are permuted among themselves, in [1, 2^16]

    def __post_init__(self) -> None:
        require_int("order.shuffle.block_windows", self.block_windows, 1, MAX_BLOCK_WINDOWS)
        require_int("order.shuffle.group_blocks", self.group_blocks, 1, MAX_GROUP_BLOCKS)

    def __str__(self) -> str:
        return f"shuffle {self.group_blocks} x {self.block_windows}"

    def to_json(self) -> dict[str, Any]:
        """Return the order's canonical JSON object."""
        return {"shuffle": {name: getattr(self, name) for name in ("block_windows", "group_blocks")}}


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOrder:
    """The order of Megatron-Core's GPTDataset and BlendedDataset, see `plan/megatron.py`."""

    num_samples: int  # of the whole run, as Megatron was asked for; a plan has no rows beyond
    blend: tuple[str, ...] = ()  # corpora in Megatron's order; empty until the plan fills in its one source
    weights: tuple[float, ...] | None = None  # as Megatron was given them; None only for a single path
    split: tuple[float, ...] = (1.0,)  # shares of the documents for training, validation and test
    part: Part = "train"
    documents: Mapping[str, str] = field(default_factory=dict)  # digests of lengths; empty until bound

    def __post_init__(self) -> None:
        require_int("order.megatron.num_samples", self.num_samples, 1, MAX_NUM_SAMPLES)
        if not _is_list(self.blend, str, MAX_BLENDED) or len(set(self.blend)) != len(self.blend):
            accepted = f"a list of at most {MAX_BLENDED} corpus names, each once"
            raise InvalidPlan.expected("order.megatron.blend", accepted, self.blend)
        if self.weights is not None or len(self.blend) > 1:
            size = len(self.blend)
            sizes = range(size, size + 1) if size else range(1, MAX_BLENDED + 1)
            accepted = "numbers above 0, one for each corpus of blend"
            _require_shares("weights", self.weights, sizes, accepted, zeros=False)
        sizes = range(1, len(PARTS) + 1)
        _require_shares("split", self.split, sizes, "1 to 3 numbers, not all 0", zeros=True)
        if self.part not in PARTS:
            raise InvalidPlan.expected("order.megatron.part", f"one of {', '.join(PARTS)}", self.part)
        texts = self.documents.values() if isinstance(self.documents, Mapping) else [None]
        if any(type(text) is not str for text in texts):
            raise InvalidPlan.expected("order.megatron.documents", "an object of strings", self.documents)
        # One spelling of equal numbers, so that equal plans have one id.
        object.__setattr__(self, "blend", tuple(self.blend))
        object.__setattr__(self, "split", tuple(map(float, self.split)))
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(map(float, self.weights)))

    def __str__(self) -> str:
        return f"megatron {self.num_samples}"

    def to_json(self) -> dict[str, Any]:
        """Return the order's canonical JSON object."""
        fields: dict[str, Any] = {
            "num_samples": self.num_samples,
            "blend": list(self.blend),
            "split": list(self.split),
            "part": self.part,
        }
        if self.weights is not None:
            fields["weights"] = list(self.weights)
        if self.documents:
            fields["documents"] = dict(self.documents)
        return {"megatron": fields}


def order_from_json(document: Mapping[str, Any]) -> BoundedShuffle | MegatronOrder:
    """Make an order of its JSON object."""
    if set(document) == {"shuffle"}:
        names = {"block_windows", "group_blocks"}
        checked = require_fields("order.shuffle", BoundedShuffle, document["shuffle"], required=names)
        return BoundedShuffle(**checked)
    if set(document) == {"megatron"}:
        what, required = "order.megatron", {"num_samples"}
        return MegatronOrder(**require_fields(what, MegatronOrder, document["megatron"], required=required))
    raise InvalidPlan.expected("order", ORDERS_ACCEPTED, document)


def _require_shares(name: str, value: Any, sizes: range, accepted: str, *, zeros: bool) -> None:
    """Refuse what is no list of finite numbers from 0 on with a finite sum above 0; a 0 only if `zeros`."""
    found = isinstance(value, Sequence) and len(value) in sizes
    found = found and all(isinstance(each, int | float) and each is not True for each in value)
    found = found and min(value) >= 0 and (zeros or 0 not in value)
    if not found or not 0 < sum(value) < inf:
        raise InvalidPlan.expected(f"order.megatron.{name}", f"a list of {accepted}", value)


def _is_list(value: object, kind: type, most: int) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > most:
        return False
    return all(type(each) is kind for each in value)
