"""The stages of a worker's stacks, as py-spy writes them."""

from __future__ import annotations

import pytest

from scripts.stages import stage_of

_SENDING = (
    "Exchange._advance (/t/corpus_server/http/exchange.py:281);write (/t/corpus_server/http/send.py:57)"
)


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        ("BoundPlan.pieces (/t/corpus_server/read/bound_plan.py:9);take (/n/numpy/fromnumeric.py:1)", "rows"),
        ("pieces (/t/corpus_server/read/bound_plan.py:9)", "rows"),
        ("permute (/t/corpus_server/plan/permutation.py:150)", "rows"),
        ("Gatherer.select (/t/corpus_server/read/gather.py:99)", "check"),
        (
            "Selection.read (/t/corpus_server/read/gather.py:239);touch (/t/corpus_server/read/memory.py:1)",
            "copy",
        ),
        (_SENDING, "send"),
        ("Connection.data_received (/t/corpus_server/http/connection.py:126)", "rest"),
        ("WindowReading.read (/t/corpus_server/read/reading.py:131)", "rest"),
    ],
)
def test_a_stack_is_in_the_first_stage_that_has_one_of_its_frames(stack: str, stage: str) -> None:
    assert stage_of(stack) == stage
