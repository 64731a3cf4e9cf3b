"""The plan that a loader asks for: from arguments, a document or a file; and the stages that continue it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from corpus_client import errors
from corpus_client.network import chain
from corpus_client.network.control import BoundPlan
from corpus_client.plan.schedule import MAX_STEP as MAX_STEP
from corpus_client.user_files import parse_json, read_text

STAGE_FIELDS = ("mixture", "global_batch_size", "seq_len", "exclude")

SAVED_KIND = "corpus-plan"
"""What a file says that `corpus-server plans save` wrote."""

DEFAULTS: dict[str, Any] = {"seed": 0, "order": "shuffle", "rows": "windows"}
"""Of `make_plan`; a loader cannot tell an argument that was left out from one that says the same."""

CorpusArgument = str | Mapping[str, Any]
AmountsArgument = Mapping[str, Any]
OrderArgument = str | Mapping[str, Mapping[str, Any]]
PlanArgument = Mapping[str, Any] | str | os.PathLike[str]


def requested_plan(plan: PlanArgument | None = None, **parts: Any) -> Mapping[str, Any]:
    """Return the plan that a loader's arguments ask for; the server checks its fields.

    plan: a document or the path of its JSON file; None: what `make_plan` makes of the others.
    """
    if plan is None:
        return make_plan(**parts)
    if others := [name for name, value in parts.items() if value != DEFAULTS.get(name)]:
        named = ", ".join(others)
        raise errors.InvalidArgument(
            f"plan= must come without {named}: each stands in a plan, or is no argument"
        )
    if isinstance(plan, str | os.PathLike):
        try:
            plan = parse_json(read_text(plan))
        except OSError as error:
            raise errors.InvalidArgument(
                f"plan must be a plan document or the path of one, got {str(plan)!r}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise errors.InvalidArgument(f"plan {str(plan)!r} must be JSON: {error}") from error
    if not isinstance(plan, Mapping):
        kind = type(plan).__name__
        raise errors.InvalidArgument(f"plan must be a plan document or the path of one, got a {kind}")
    return _saved(plan) if plan.get("kind") == SAVED_KIND else plan


def _saved(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a file that `corpus-server plans save` wrote, with its links as decisions."""
    try:
        lines = []
        for link in file["links"]:
            more = {name: link[name] for name in ("fingerprints", "lengths") if name in link}
            lines.append(json.dumps({**link["stages"][0], **more}))
        return {**file["plan"], chain.DECISIONS: "\n".join(lines)}
    except (KeyError, TypeError, IndexError) as error:
        raise errors.InvalidArgument(
            f"plan is a file of another release than this client, or was changed: {error!r}"
        ) from error


def make_plan(
    *,
    corpus: CorpusArgument | None = None,
    epochs: AmountsArgument | None = None,
    tokens: AmountsArgument | None = None,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
    seed: int = 0,
    order: OrderArgument = "shuffle",
    rows: OrderArgument = "windows",
    family: Mapping[str, Any] | None = None,
    tokenizers: str | None = None,
    stride: int | None = None,
) -> dict[str, Any]:
    """Return the plan document of one stage, as `plan=` of a loader takes it.

    Args:
        corpus: name of a corpus of the server, or a mixture: `{"web": 0.7, "code": 0.3}`. Corpora may share
            a weight: `{"web": {"share": 0.7, "of": {"cc": 2, "wiki": 1}}, "code": 0.3}`.
        epochs, tokens: instead of `corpus`, how often the run sees each one, `{"web": 1, "code": 2}`, or how
            many tokens of it; the server makes weights of them, and the run ends when they are over.
        seq_len: inputs of a row, in tokens.
        global_batch_size: rows of a step over all ranks.
        order: the name of an order, such as `shuffle`, or one with parameters as a plan document spells it:
            `{"shuffle": {"block_windows": 16384, "group_blocks": 64}}` or
            `{"megatron": {"num_samples": 1000000}}`.
        rows: `windows`, or rows that join whole documents: `documents`, or with a parameter
            `{"documents": {"block_documents": 65536, "balance_ranks": True}}`.
        family: the documents that the run leaves out, and has twice, as one of many runs:
            `{"seed": 7, "leave_out": 0.15, "double": 0.1, "member": 3}`.
        tokenizers: `differ`, if corpora of different tokenizers are meant; a server refuses them otherwise.
        stride: tokens from the start of a window to the next one's; default: `seq_len`.

    Raises:
        InvalidArgument: a value lies outside its range.
    """
    stage = {
        "from_step": 0,
        "global_batch_size": integer("global_batch_size", global_batch_size, 1, 2**20),
        **_sources(corpus, {"epochs": epochs, "tokens": tokens}),
    }
    plan: dict[str, Any] = {
        "seq_len": integer("seq_len", seq_len, 1, 2**20),
        "seed": integer("seed", seed, 0, 2**64 - 1),
        "order": order,  # the server knows which there are
        "stages": [stage],
    }
    if rows != DEFAULTS["rows"]:
        plan["rows"] = rows
    if family is not None:
        if not isinstance(family, Mapping) or not family:
            raise errors.InvalidArgument(
                f'family must be a mapping, like {{"seed": 7, "leave_out": 0.1, "member": 3}}, got {family!r}'
            )
        plan["family"] = dict(family)  # the server knows its fields
    if tokenizers is not None:
        plan["tokenizers"] = tokenizers
    if stride is not None:
        plan["stride"] = integer("stride", stride, 1, 2**63 - 1)
    return plan


def _sources(
    corpus: CorpusArgument | None, amounts: Mapping[str, AmountsArgument | None]
) -> dict[str, dict[str, Any]]:
    """Return the fields of a stage that say what it shows."""
    given = {name: amount for name, amount in amounts.items() if amount is not None}
    for name, amount in given.items():
        if not isinstance(amount, Mapping) or not amount:
            raise errors.InvalidArgument(
                f'{name} must be numbers by the names of corpora, like {{"web": 2}}, got {amount!r}'
            )
    if given:
        if corpus is not None:
            raise errors.InvalidArgument(
                f"corpus must be left out with {' and '.join(given)}, which name the corpora, got {corpus!r}"
            )
        return {name: dict(amount) for name, amount in given.items()}
    mixture = {corpus: 1.0} if isinstance(corpus, str) else corpus
    if not isinstance(mixture, Mapping) or not mixture or "" in mixture:
        raise errors.InvalidArgument(
            f"corpus must name a corpus of the server, or give weights by name, got {corpus!r}"
        )
    return {"mixture": dict(mixture)}


def given_stage(stage: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stage that is given as a whole, or by its fields, of which None is not given."""
    given = {name: value for name, value in fields.items() if value is not None}
    if (stage is None) == (not given):
        raise errors.InvalidArgument("extend takes a stage, or the fields of one by name")
    return given if stage is None else stage


def next_stage(plan: BoundPlan, from_step: int, stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stage that continues a plan from the plan step `from_step` on.

    stage: what changes: some of `mixture`, `global_batch_size`, `seq_len` and `exclude`.
    """
    if not isinstance(stage, Mapping) or not stage or not set(stage) <= set(STAGE_FIELDS):
        found = sorted(stage, key=str) if isinstance(stage, Mapping) else type(stage).__name__
        raise errors.InvalidArgument(
            f"stage must hold some of {', '.join(STAGE_FIELDS)}, got {found}; it begins at the loader's next "
            "step, or at at_step="
        )
    for name in {"mixture", "exclude"} & set(stage):
        if not isinstance(stage[name], Mapping):
            raise errors.InvalidArgument(f"stage.{name} must be a mapping, got {stage[name]!r}")
    last = plan.stages[-1]
    if last.from_step >= from_step:
        raise errors.InvalidArgument(
            f"stage would begin at plan step {from_step}, where or before which a stage of the plan begins "
            f"({last.from_step}); to replace that one, build the loader with a whole plan="
        )
    shape = {"global_batch_size": last.global_batch_size, "seq_len": last.seq_len}
    if "mixture" not in stage and not last.weights_65536:
        raise errors.InvalidArgument("stage must hold mixture: the server did not say that of the last one")
    mixture = dict(last.weights_65536)
    return {"from_step": from_step, **shape, "mixture": mixture, **copy.deepcopy(dict(stage))}


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return the value as an int if it is an integer in `[low, high]`.

    Accepts NumPy integers and converts them for JSON. A bool counts as a typing error.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise errors.InvalidArgument(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    return int(value)
