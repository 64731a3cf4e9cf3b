"""What a plan and the options of a loader must have in common is checked before the first batch."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

from corpus_client import errors
from corpus_client.network.control import BoundPlan, StageDescription
from corpus_client.network.options import Network
from corpus_client.network.replicas import Replicas
from corpus_client.plan.world import RankPart
from corpus_client.prepared import PlanOptions
from corpus_client.staging.options import Staging


def check(
    stored: str,
    dtype: torch.dtype | None = torch.int64,
    *,
    context: tuple[int, int] = (0, 1),
    eot_id: int | None = None,
    ignore_index: int | None = None,
) -> None:
    """Check options against a plan of tokens of a type, whose server names no end of text."""
    stages = (StageDescription(first_step=0, global_batch_size=8, seq_len=12),)
    plan = BoundPlan(plan_id="ab", document={}, dtype=stored, shards=(), stages=stages, eot_id=None)
    PlanOptions(
        connect=partial(Replicas, ["http://127.0.0.1:1"]),
        place=RankPart(0, 1, context),
        step_stride=1,
        dtype=dtype,
        eot_id=eot_id,
        ignore_index=ignore_index,
        network=Network(),
        staging=Staging(),
    ).check(plan)


@pytest.mark.parametrize("stored", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_tokens_are_never_narrowed(stored: str) -> None:
    """As int32, an id of 2^31 or more would become another one."""
    check(stored)
    check(stored, None)
    if stored not in ("uint32", "int64"):
        check(stored, torch.int32)
        return
    said = f"dtype must be torch.int64 or None for {stored} tokens, got int32"
    with pytest.raises(errors.InvalidArgument, match=said):
        check(stored, torch.int32)


@pytest.mark.parametrize(
    ("stored", "options", "kind", "said"),
    [
        ("float32", {}, errors.AnswerCorrupt, "dtype must be one of ['uint8', "),
        ("uint16", {"eot_id": 2**16}, errors.InvalidArgument, "eot_id of uint16 tokens must be"),
        ("uint16", {"eot_id": -1}, errors.InvalidArgument, "eot_id of uint16 tokens must be"),
        ("uint16", {"ignore_index": -100}, errors.InvalidArgument, "ignore_index needs eot_id="),
        ("uint16", {"context": (0, 5)}, errors.InvalidArgument, "seq_len must be divisible by the context"),
    ],
)
def test_what_does_not_go_with_the_plan_is_refused(
    stored: str, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        check(stored, **options)
    check("uint16", eot_id=2**16 - 1, ignore_index=-100, context=(2, 3))
