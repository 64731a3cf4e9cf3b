"""The state a loader can be resumed from: small, readable, JSON.

    {"plan": {...}, "plan_id": "<64 hex>", "next_step": 1234, "next_batch": "xxh3-64=<16 hex>"}

`next_batch` is the receipt of the next global batch, so that a resume is known to go on with the very
tokens; null where the server could not be asked in time. World size, device and prefetching never enter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from corpus_client import errors
from corpus_client.control import BoundPlan
from corpus_client.plan import integer
from corpus_client.wire import DIGEST

REQUIRED = {"plan", "plan_id", "next_step"}
OPTIONAL = {"next_batch"}


def make_state(plan: BoundPlan, next_step: int, next_batch: str | None) -> dict[str, Any]:
    """What a checkpoint needs."""
    return {
        "plan": copy.deepcopy(plan.document),
        "plan_id": plan.plan_id,
        "next_step": next_step,
        "next_batch": next_batch,
    }


def check_state(state: Mapping[str, Any], plan: BoundPlan) -> tuple[int, str | None]:
    """(next step, receipt of its batch or None) of a state that belongs to this plan.

    Raises:
        StateMismatch: naming each field that differs.
    """
    if not isinstance(state, Mapping) or not REQUIRED <= set(state) <= REQUIRED | OPTIONAL:
        found = sorted(state, key=str) if isinstance(state, Mapping) else type(state).__name__
        raise errors.StateMismatch(
            f"a state must hold plan, plan_id and next_step, and may hold next_batch, got {found}"
        )
    differences = _differences("", state["plan"], plan.document)
    if not differences and state["plan_id"] != plan.plan_id:
        differences = [f"plan_id: the state has {state['plan_id']}, this loader {plan.plan_id}"]
    if differences:
        raise errors.StateMismatch(
            "the state belongs to another run; "
            + "; ".join(differences)
            + "; to go on with that run build the loader with plan=state['plan']"
        )
    receipt = state.get("next_batch")
    if receipt is not None and not (isinstance(receipt, str) and DIGEST.fullmatch(receipt)):
        raise errors.StateMismatch(
            f"the state's next_batch must be xxh3-64=<16 hex> or null, got {receipt!r}"
        )
    try:
        return integer("next_step", state["next_step"], 0, 2**40), receipt
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
    if isinstance(theirs, list) and isinstance(ours, list):
        found = [
            line
            for number, pair in enumerate(zip(theirs, ours, strict=False))
            for line in _differences(f"{path}[{number}]", *pair)
        ]
        if len(theirs) != len(ours):
            found.append(f"{path}: the state has {len(theirs)} of them, this loader {len(ours)}")
        return found
    if theirs == ours:
        return []
    return [f"{path or 'plan'}: the state has {_shorten(theirs)}, this loader {_shorten(ours)}"]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()
