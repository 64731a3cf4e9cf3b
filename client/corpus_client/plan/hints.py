"""What an argument that a loader does not have is called there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from corpus_client import errors

ELSEWHERE = {
    "batch_size": "global_batch_size=, rows of a step over all ranks",
    "micro_batch_size": "global_batch_size=, and batch.split(rows) for micro batches",
    "mixture": "corpus={NAME: weight, ...}",
    "corpora": "corpus={NAME: weight, ...}",
    "sequence_length": "seq_len=",
    "block_size": "seq_len=",
    "num_epochs": "epochs={NAME: 2, ...}, or num_steps='epoch' for one pass",
    "eos_token_id": "eot_id=",
    "start_step": "loader.seek(step), or load_state_dict",
    "num_workers": "nothing: a loader fetches ahead in one thread",
    "pin_memory": "nothing: batches arrive on the device",
    "shuffle": "order='shuffle', which is the default, or order='sequential'",
    "transform": "nothing: the bytes are the plan's; change a batch where it is used",
    "collate_fn": "nothing: the bytes are the plan's; change a batch where it is used",
}


def hint(unknown: Iterable[str], known: Iterable[str], groups: Mapping[str, type[Any]]) -> str:
    """Return the message about arguments that a loader does not have: what stands in their place.

    groups: the classes of options, by the argument that takes them.
    """
    return "; ".join(_about(name, [*known], groups) for name in unknown)


def check_groups(groups: Mapping[str, tuple[type[Any], object]]) -> None:
    """Raise `InvalidArgument` for the first group of options that is given and is no object of its class."""
    for name, (kind, given) in groups.items():
        if given is not None and not isinstance(given, kind):
            raise errors.InvalidArgument(
                f"{name} must be a {kind.__name__}, got a {type(given).__name__}; pass "
                f"{name}={kind.__name__}(...)"
            )


def _about(name: str, known: list[str], groups: Mapping[str, type[Any]]) -> str:
    for group, kind in groups.items():
        if name in (names := [each.name for each in fields(kind)]):
            return f"{name} is passed as {group}={kind.__name__}({name}=...)"
        known += names
    if name in ELSEWHERE:
        return f"there is no argument {name}; pass {ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, known, 1)
    return f"there is no argument {name}" + (f"; did you mean {near[0]}?" if near else "")
