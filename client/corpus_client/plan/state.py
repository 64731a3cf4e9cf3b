"""The state from which a loader resumes: small, readable JSON.

    {"plan": {...}, "plan_id": "<64 hex>", "next_step": 1234}

`next_batch`, if it is there, is the receipt of the next global batch (`xxh3-64=<16 hex>`): a resume then
checks that the server still has the same tokens. World size, device and prefetching are no part of a state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from corpus_client import errors
from corpus_client.network import chain
from corpus_client.network.control import BoundPlan
from corpus_client.network.wire import DIGEST
from corpus_client.plan.document import MAX_STEP, integer

REQUIRED = {"plan", "plan_id", "next_step"}
OPTIONAL = {"next_batch"}

MAX_SHOWN = 20
"""Differences in a message; a plan of 100,000 decisions may have as many."""


def make_state(plan: BoundPlan, next_step: int, next_batch: str | None = None) -> dict[str, Any]:
    """Return what a checkpoint needs, as JSON values that the caller owns; `next_batch` is a receipt.

    Decisions are there also if there are none: torch's distributed checkpoints load only what stands in the
    state that the loader has then.
    """
    document = {chain.DECISIONS: "", **copy.deepcopy(plan.whole)}
    state = {"plan": document, "plan_id": plan.plan_id, "next_step": next_step}
    return state if next_batch is None else {**state, "next_batch": next_batch}


def check_state(state: Mapping[str, Any], plan: BoundPlan) -> tuple[int, str | None]:
    """Return (next step, receipt of its batch or None) of this plan's state; name each field of another's."""
    if not isinstance(state, Mapping) or not REQUIRED <= set(state) <= REQUIRED | OPTIONAL:
        found = sorted(state, key=str) if isinstance(state, Mapping) else type(state).__name__
        raise errors.StateMismatch(
            f"a state must hold plan, plan_id and next_step, and may hold next_batch, got {found}"
        )
    differences = _differences("", *(_by_line(each) for each in (state["plan"], plan.whole)))
    if not differences and state["plan_id"] != plan.plan_id:
        differences = [f"plan_id: the state has {state['plan_id']}, this loader {plan.plan_id}"]
    if differences:
        raise errors.StateMismatch(
            f"the state belongs to another run; {'; '.join(differences[:MAX_SHOWN])}; {_way_on(differences)}"
        )
    receipt = state.get("next_batch")
    if receipt is not None and not (isinstance(receipt, str) and DIGEST.fullmatch(receipt)):
        raise errors.StateMismatch(
            f"the state's next_batch must be xxh3-64=<16 hex> or null, got {receipt!r}"
        )
    try:
        return integer("next_step", state["next_step"], 0, MAX_STEP), receipt
    except errors.InvalidArgument as error:
        raise errors.StateMismatch(f"the state's {error}") from error


def _way_on(differences: Sequence[str]) -> str:
    """Return what to do: a plan of another content is taken only where that content is served."""
    if not all(each.startswith(("fingerprints.", "plan_id")) for each in differences):
        return "to go on with that run build the loader with plan=state['plan']"
    return (
        "the corpus was built anew: serve the one of the state beside it, under another name that the new "
        "one's `earlier` lists, and build the loader with plan=state['plan']"
    )


def _by_line(document: object) -> object:
    """Return a plan with a list of its decisions, as far as they are there."""
    try:
        root, lines = chain.split(document)  # type: ignore[arg-type]
    except (AttributeError, ValueError):
        return document
    return {**root, chain.DECISIONS: lines}


def _differences(path: str, theirs: object, ours: object) -> list[str]:
    """Return a line per leaf that differs: `stages[0].global_batch_size: the state has 8, this loader 16`."""
    parts: list[tuple[str, object, object]]
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        names = sorted({*theirs, *ours}, key=str)
        prefix = f"{path}." if path else ""
        parts = [(f"{prefix}{name}", theirs.get(name, ...), ours.get(name, ...)) for name in names]
    elif isinstance(theirs, list) and isinstance(ours, list):
        pairs = enumerate(zip(theirs, ours, strict=False))
        parts = [(f"number of {path}", len(theirs), len(ours))]
        parts += [(f"{path}[{number}]", *pair) for number, pair in pairs]
    elif theirs == ours:
        return []
    else:
        return [f"{path or 'plan'}: the state has {_shorten(theirs)}, this loader {_shorten(ours)}"]
    return [line for part in parts for line in _differences(*part)]


def _shorten(value: object) -> str:
    text = "nothing" if value is ... else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
