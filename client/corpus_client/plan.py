"""The plan a loader asks for: from arguments, a document or a file; and its successors."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corpus_client import errors

ORDERS = ("shuffle", "sequential", "random")
STAGE_FIELDS = ("mixture", "global_batch_size", "exclude")

PlanArgument = Mapping[str, Any] | str | os.PathLike[str]


def requested_plan(
    plan: PlanArgument | None,
    *,
    corpus: str | None,
    seq_len: int | None,
    global_batch_size: int | None,
    seed: int,
    order: str,
    stride: int | None,
) -> Mapping[str, Any]:
    """The plan document that a loader's arguments ask for: `plan`, or else what the others make."""
    if plan is None:
        return make_plan(
            corpus=corpus,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            seed=seed,
            order=order,
            stride=stride,
        )
    if (corpus, seq_len, global_batch_size, stride, seed, order) != (*4 * (None,), 0, "shuffle"):
        raise errors.InvalidArgument("plan= must come without the arguments that stand in a plan")
    return read_plan(plan)


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


def read_plan(plan: PlanArgument) -> Mapping[str, Any]:
    """A plan document, read from its JSON file if it is a path; its fields are the server's to check."""
    if isinstance(plan, str | os.PathLike):
        path = Path(plan)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise errors.InvalidArgument(
                f"plan must be a plan document or the path of one, got {str(path)!r}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise errors.InvalidArgument(f"plan {str(path)!r} must be JSON: {error}") from error
        if not isinstance(found, dict):
            raise errors.InvalidArgument(
                f"plan {str(path)!r} must hold a JSON object, got {type(found).__name__}"
            )
        return found
    if not isinstance(plan, Mapping):
        raise errors.InvalidArgument(f"plan must be a plan document or a path, got {type(plan).__name__}")
    return plan


def successor(plan: Mapping[str, Any], from_step: int, stage: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with one more stage.

    Args:
        plan: canonical.
        from_step: plan step at which the stage begins.
        stage: `mixture`, and where they change `global_batch_size` and `exclude`.
    """
    if not isinstance(stage, Mapping) or "mixture" not in stage or not set(stage) <= set(STAGE_FIELDS):
        found = sorted(stage, key=str) if isinstance(stage, Mapping) else type(stage).__name__
        raise errors.InvalidArgument(
            f"stage must hold mixture and may hold global_batch_size and exclude, got {found}; "
            "it begins at the loader's next step"
        )
    last = plan["stages"][-1]
    if last["from_step"] >= from_step:
        raise errors.InvalidArgument(
            f"stage would begin at plan step {from_step}, where or before which a stage of the plan begins "
            f"({last['from_step']}); to replace that one, build the loader with a whole plan="
        )
    grown = copy.deepcopy(dict(plan))
    size = last["global_batch_size"]
    grown["stages"].append({"from_step": from_step, "global_batch_size": size, **copy.deepcopy(dict(stage))})
    return grown


def integer(name: str, value: object, low: int, high: int) -> int:
    """The value, if it is an integer in `[low, high]`; a bool is a typing error."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise errors.InvalidArgument(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    return value
