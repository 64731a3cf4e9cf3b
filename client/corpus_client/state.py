"""The plan a loader asks for, and the state it can be resumed from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from corpus_client import errors
from corpus_client.control import BoundPlan

ORDERS = ("shuffle", "sequential", "random")


def make_plan(
    *,
    corpus: str | None,
    seq_len: int | None,
    global_batch_size: int | None,
    seed: int,
    order: str,
    stride: int | None,
) -> dict[str, Any]:
    """The plan document of one corpus; defaults are left to the server."""
    if not isinstance(corpus, str) or not corpus:
        raise errors.InvalidArgument(f"corpus must name a corpus of the server, got {corpus!r}")
    if order not in ORDERS:
        raise errors.InvalidArgument(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    stage = {
        "from_step": 0,
        "global_batch_size": integer("global_batch_size", global_batch_size, 1, 2**20),
        "mixture": {corpus: 1.0},
    }
    plan: dict[str, Any] = {
        "seq_len": integer("seq_len", seq_len, 1, 2**20),
        "seed": integer("seed", seed, 0, 2**64 - 1),
        "order": order,
        "stages": [stage],
    }
    if stride is not None:
        plan["stride"] = integer("stride", stride, 1, 2**63 - 1)
    return plan


def integer(name: str, value: object, low: int, high: int) -> int:
    """The value, if it is an integer in `[low, high]`; a bool is a typing error."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise errors.InvalidArgument(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    return value


def plan_batch_size(plan: Mapping[str, Any]) -> int:
    """The global batch size of a canonical plan, which must be the same in all of its stages."""
    sizes = {int(stage["global_batch_size"]) for stage in plan["stages"]}
    if len(sizes) != 1:
        raise errors.InvalidArgument(
            f"global_batch_size must be the same in every stage for this client, got {sorted(sizes)}"
        )
    return sizes.pop()


def make_state(plan: BoundPlan, next_step: int) -> dict[str, Any]:
    """What a checkpoint needs: small, readable, JSON; it never holds the world size."""
    return {"plan": json.loads(json.dumps(plan.document)), "plan_id": plan.plan_id, "next_step": next_step}


def check_state(state: Mapping[str, Any], plan: BoundPlan) -> int:
    """The state's next step, if the state belongs to this plan.

    Raises:
        StateMismatch: naming each field that differs.
    """
    if not isinstance(state, Mapping) or set(state) != {"plan", "plan_id", "next_step"}:
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise errors.StateMismatch(f"a state must hold plan, plan_id and next_step, got {found}")
    differences = _differences("", state["plan"], plan.document)
    if not differences and state["plan_id"] != plan.plan_id:
        differences = [f"plan_id: the state has {state['plan_id']}, this loader {plan.plan_id}"]
    if differences:
        raise errors.StateMismatch(
            "the state belongs to another run; "
            + "; ".join(differences)
            + "; to go on with that run build the loader with plan=state['plan']"
        )
    try:
        return integer("next_step", state["next_step"], 0, 2**40)
    except errors.InvalidArgument as error:
        raise errors.StateMismatch(f"the state's {error}") from error


def _differences(path: str, theirs: object, ours: object) -> list[str]:
    """One line per leaf that differs: `stages[0].global_batch_size: the state has 8, this loader 16`."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        found: list[str] = []
        for name in sorted({*theirs, *ours}, key=str):
            where = f"{path}.{name}" if path else str(name)
            found += _differences(where, theirs.get(name, _ABSENT), ours.get(name, _ABSENT))
        return found
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return [
            line
            for number, pair in enumerate(zip(theirs, ours, strict=True))
            for line in _differences(f"{path}[{number}]", *pair)
        ]
    return [] if theirs == ours else [f"{path or 'plan'}: the state has {theirs!r}, this loader {ours!r}"]


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()
