"""Steps that may differ between plans whose exclusions differ: those that hold an excluded window."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from corpus_server.plan import Plan, Sampler
from corpus_server.plan.questions.suspects import suspects
from corpus_server.plan.stage import MAX_STEP
from corpus_server.work import Budget, Limits

WEB = {"from_step": 0, "global_batch_size": 4, "mixture": {"web": 1}}
BOTH = {"from_step": 0, "global_batch_size": 4, "mixture": {"web": 3, "code": 1}}
OUT = {"exclude": {"web": [[9, 10]]}}
TOKENS = {"web": [8 * 40 + 1, 8 * 23 + 1], "code": [8 * 30 + 1]}


def plan(*stages: dict[str, Any], **fields: Any) -> Plan:
    return Plan.from_json({"seq_len": 8, "stages": list(stages), **fields})


def stage(base: dict[str, Any], from_step: int, **fields: Any) -> dict[str, Any]:
    return {**base, "from_step": from_step, **fields}


SKIPS = {"skip_steps": [[5, 9]]}


def holding(made: Plan, since: int, num_steps: int) -> set[int]:
    """Return the training steps of some whose windows touch what any stage excludes."""
    document = made.to_json()
    shards = [(name, sum(TOKENS[name][:k])) for name in made.sources for k in range(len(TOKENS[name]))]
    excluded = [
        (name, pair)
        for each in document["stages"]
        for name, pairs in each.pop("exclude", {}).items()
        for pair in pairs
    ]
    located = Sampler(Plan.from_json(document), TOKENS).locate(since, count=num_steps)
    held = np.zeros(located.shape[:2], dtype=bool)
    for name, (start, stop) in excluded:
        for shard, (corpus, first) in enumerate(shards):
            if corpus == name:
                tokens = located[..., 1] + first
                held |= (located[..., 0] == shard) & (tokens < stop) & (tokens + 9 > start)
    return {since + k for k in np.flatnonzero(held.any(axis=1)).tolist()}


EXCLUDING = {
    "one": [plan(WEB), plan({**WEB, **OUT})],
    "both": [plan({**WEB, "exclude": {"web": [[100, 120]]}}), plan(WEB, stage(WEB, 5, **OUT))],
    "mixture": [plan(BOTH), plan({**BOTH, "exclude": {"code": [[8, 20], [60, 61]]}})],
    "skips": [
        plan(BOTH, **SKIPS),
        plan({**BOTH, "exclude": {"web": [[400, 409]], "code": [[0, 1]]}}, **SKIPS),
    ],
    "not from the first": [
        plan(WEB, stage(BOTH, 700)),
        plan(WEB, stage(BOTH, 700, exclude={"code": [[7, 9]]})),
    ],
}


@pytest.mark.parametrize("since", [0, 2000, MAX_STEP - 5000, MAX_STEP], ids=str)
@pytest.mark.parametrize("name", EXCLUDING)
def test_the_steps_that_hold_an_excluded_window_are_found(name: str, since: int) -> None:
    """In spans of twice the steps each, to the last step of a plan."""
    pair = EXCLUDING[name]
    samplers = [Sampler(each, TOKENS) for each in pair]
    skips = pair[0].skip_steps
    begin = since
    for number, (until, steps) in enumerate(islice(suspects(*samplers, since, Budget()), 2)):
        assert until == min(begin + (4096 << number), MAX_STEP + 1)
        first, stop = (skips.outside_before(plan_step) for plan_step in (begin, until))
        if name != "not from the first" or first >= 700:  # else the steps of two stages have two shapes
            assert steps == sorted(set.union(*(holding(each, first, stop - first) for each in pair)))
        assert steps or until - begin == 1
        begin = until
    assert begin == until
    assert begin in (since + 3 * 4096, MAX_STEP + 1)


def test_a_search_ends_within_half_of_the_rows() -> None:
    """4,096 steps of 4 rows hold 261 epochs of 63 windows, each of which counts as 1,024 look-ups or more."""
    samplers = [Sampler(each, TOKENS) for each in EXCLUDING["one"]]
    for rows, spans in ((2 * 261 * 1024 - 1, 0), (2 * 261 * 1024, 1), (2 * 261 * 1024 + 1, 1)):
        assert sum(1 for _ in suspects(*samplers, 0, Budget(Limits(rows=rows)))) == spans


def test_of_many_excluded_windows_each_is_counted() -> None:
    """2,000 of 5,000 windows; the first 4,096 steps hold four epochs."""
    samplers = [
        Sampler(each, {"web": [40_001]})
        for each in (plan(WEB), plan({**WEB, "exclude": {"web": [[1, 16_000]]}}))
    ]
    for rows, spans in ((16_000, 1), (15_999, 0)):
        assert sum(1 for _ in suspects(*samplers, 0, Budget(Limits(rows=rows)))) == spans


def test_windows_that_both_plans_exclude_alike_are_not_looked_for() -> None:
    """Of two sources: what stands in for a window follows from what its own source excludes."""
    web = [[100, 120], [200, 260]]
    pair = [
        plan({**BOTH, "exclude": {"web": web, "code": code}}) for code in ([[8, 20]], [[8, 20], [60, 61]])
    ]
    _, steps = next(suspects(*(Sampler(each, TOKENS) for each in pair), 0, Budget()))
    alone = [plan({**BOTH, "exclude": {"code": code}}) for code in ([[8, 20]], [[8, 20], [60, 61]])]
    assert steps == next(suspects(*(Sampler(each, TOKENS) for each in alone), 0, Budget()))[1]


def test_an_epoch_that_begins_in_the_last_row_is_looked_up() -> None:
    """Window 0 of 127 comes first in each epoch, and for the 130th time in row 16,383 of 16,384."""
    pair = [plan(each, order="sequential") for each in (WEB, {**WEB, "exclude": {"web": [[0, 1]]}})]
    samplers = [Sampler(each, {"web": [8 * 127 + 1]}) for each in pair]
    assert next(suspects(*samplers, 0, Budget())) == (4096, [127 * k // 4 for k in range(130)])
