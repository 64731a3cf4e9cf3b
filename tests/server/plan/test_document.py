"""The plan document: one canonical spelling, and every mistake named."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.errors import InvalidPlan
from corpus_server.plan import Plan
from tests.plans import Case, small_plans
from tests.reference import one_source

FINGERPRINTS = {"web": "sampled-" + "0" * 64}


def make(**fields: Any) -> Plan:
    return Plan.from_json({**one_source("web", 1024, 512), **fields})


def test_the_canonical_json_and_the_id_are_these_bytes() -> None:
    """A change here is a new plan for every run under way."""
    plan = make(seed=1337, fingerprints=FINGERPRINTS)
    expected = (
        '{"fingerprints":{"web":"sampled-' + "0" * 64 + '"},"order":"shuffle","seed":1337,"seq_len":1024,'
        '"skip_steps":[],"stages":[{"from_step":0,"global_batch_size":512,"mixture":{"web":1.0}}],'
        '"stride":1024}'
    )
    assert plan.canonical_json() == expected
    assert plan.id == hashlib.sha256(expected.encode()).hexdigest()


@given(case=small_plans(orders=("shuffle", "sequential", "random")))
def test_the_canonical_json_is_the_sorted_one_without_spaces(case: Case) -> None:
    plan = Plan.from_json(case.document)
    assert plan.canonical_json() == json.dumps(plan.to_json(), sort_keys=True, separators=(",", ":"))
    assert Plan.parse(plan.canonical_json()) == plan


@pytest.mark.parametrize(
    "spelled",
    [
        {"stride": 1024},
        {"seed": 0},
        {"order": "shuffle"},
        {"skip_steps": []},
        {"fingerprints": FINGERPRINTS},
        {"stages": [{"global_batch_size": 512, "mixture": {"web": 1}}]},
        {"stages": [{"from_step": 0, "global_batch_size": 512, "mixture": {"web": 0.3}, "exclude": {}}]},
    ],
    ids=lambda spelled: next(iter(spelled)),
)
def test_a_default_spelled_out_is_the_same_plan(spelled: dict[str, Any]) -> None:
    assert make(**spelled).bind(FINGERPRINTS).id == make().bind(FINGERPRINTS).id


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 1023, "stride": 1024},
        {"stride": 1025},
        {"seed": 1},
        {"order": "sequential"},
        {"fingerprints": {"web": "sampled-" + "1" * 64}},
        {"stages": [{"global_batch_size": 511, "mixture": {"web": 1}}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_a_row_changes_the_id(change: dict[str, Any]) -> None:
    changed = make(**change)
    assert changed.bind(changed.fingerprints or FINGERPRINTS).id != make().bind(FINGERPRINTS).id


@given(
    seq_len=st.integers(1, 2**20),
    stride=st.none() | st.integers(1, 2**40),
    seed=st.integers(0, 2**64 - 1),
    order=st.sampled_from(["shuffle", "sequential"]),
    batch_size=st.integers(1, 2**20),
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=10),
)
def test_json_makes_an_equal_plan(
    seq_len: int, stride: int | None, seed: int, order: str, batch_size: int, name: str
) -> None:
    document = one_source(name, seq_len, batch_size, seed=seed, order=order)
    plan = Plan.from_json(document if stride is None else {**document, "stride": stride})
    again = Plan.from_json(json.loads(plan.canonical_json()))
    assert again == plan
    assert (plan.stride, plan.sources) == (stride or seq_len, (name,))


def test_the_stride_of_random_is_one() -> None:
    assert make(order="random").stride == 1
    assert make(order="random", stride=1).stride == 1


def test_only_a_bound_plan_has_an_id() -> None:
    with pytest.raises(InvalidPlan, match="bound"):
        _ = make().id


STAGE = {"global_batch_size": 1, "mixture": {"web": 1}}
MISTAKES: list[tuple[str, object, str, str]] = [
    ("seq-len-0", {"seq_len": 0}, "seq_len", r"seq_len must be an integer in \[1, 1048576\], got 0"),
    ("seq-len-huge", {"seq_len": 2**64}, "seq_len", "got 18446744073709551616"),
    ("seq-len-float", {"seq_len": 8.0}, "seq_len", "got 8.0"),
    ("seq-len-true", {"seq_len": True}, "seq_len", "got True"),
    ("seq-len-text", {"seq_len": "8"}, "seq_len", "got '8'"),
    ("seq-len-null", {"seq_len": None}, "seq_len", "got None"),
    ("stride-0", {"stride": 0}, "stride", "got 0"),
    ("stride-random", {"order": "random", "stride": 2}, "stride", "stride must be 1"),
    ("seed-negative", {"seed": -1}, "seed", "got -1"),
    ("seed-2^64", {"seed": 2**64}, "seed", r"\[0, 18446744073709551615\]"),
    ("order", {"order": "Shuffle"}, "order", "shuffle, sequential, random"),
    ("order-list", {"order": ["shuffle"]}, "order", "one of"),
    ("typing-error", {"sed": 1}, "sed", "unknown field 'sed'; did you mean 'seed'"),
    ("unknown", {"zzzzzz": 1}, "zzzzzz", "unknown field 'zzzzzz'$"),
    *(
        (f"skip-steps-{name}", {"skip_steps": wrong}, "skip_steps", message)
        for name, wrong, message in (
            ("number", 3, "list of .start, stop. pairs, got 3"),
            ("object", {"0": 1}, "list of"),
            ("flat", [0, 1], "got 0"),
            ("reversed", [[0, 1], [9, 5]], r"0 <= start < stop <= 1099511627776, got \[9, 5\]"),
            ("empty-range", [[5, 5]], r"got \[5, 5\]"),
            ("negative", [[-1, 5]], r"got \[-1, 5\]"),
            ("triple", [[0, 1], [1, 2, 3]], r"got \[1, 2, 3\]"),
            ("float", [[0, 1.5]], r"got \[0, 1.5\]"),
            ("boolean", [[False, 5]], r"got \[False, 5\]"),
            ("text", [["0", "5"]], r"got \['0', '5'\]"),
            ("huge", [[0, 2**64]], r"got \[0, 18446744073709551616\]"),
            ("beyond", [[0, 2**40 + 1]], r"got \[0, 1099511627777\]"),
        )
    ),
    ("stages-none", {"stages": []}, "stages", r"begin with from_step 0 and go on with larger ones, got \[\]"),
    ("stages-late", {"stages": [{**STAGE, "from_step": 5}]}, "stages", r"from_step 0.*got \[5\]"),
    ("stages-same", {"stages": [STAGE, {**STAGE, "from_step": 0}]}, "stages", r"got \[0, 0\]"),
    *(
        (f"stages-{name}", {"stages": [STAGE, *({**STAGE, "from_step": k} for k in starts)]}, "stages", "got")
        for name, starts in (("unsorted", (9, 5)), ("duplicate", (5, 5)))
    ),
    *(
        (
            f"from-step-{value}",
            {"stages": [STAGE, {**STAGE, "from_step": value}]},
            "stages[].from_step",
            f"got {value}",
        )
        for value in (-1, True, 1.5, 2**40 + 1)
    ),
    ("stages-object", {"stages": {"a": 1}}, "stages", "list of objects"),
    ("stages-text", {"stages": "abc"}, "stages", "list of objects"),
    ("stage-text", {"stages": [STAGE, "abc"]}, "stages[1]", "must be a JSON object"),
    ("batch-0", {"stages": [{**STAGE, "global_batch_size": 0}]}, "stages[].global_batch_size", "got 0"),
    ("batch-none", {"stages": [{"mixture": {"web": 1}}]}, "global_batch_size", "lacks global_batch_size"),
    ("mixture-empty", {"stages": [{**STAGE, "mixture": {}}]}, "stages[].mixture", "1 to 1024 corpus names"),
    ("mixture-list", {"stages": [{**STAGE, "mixture": ["web"]}]}, "stages[].mixture", "corpus names"),
    (
        "weight-tiny",
        {"stages": [{**STAGE, "mixture": {"web": 1, "code": 1e-6}}]},
        "stages[].mixture.code",
        "less than the smallest share of 1/65536; raise it or leave the source out",
    ),
    (
        "stage-typing-error",
        {"stages": [{**STAGE, "exlude": {}}]},
        "exlude",
        r"stages\[0\] has an unknown field 'exlude'; did you mean 'exclude'",
    ),
    *(
        (
            f"weight-{weight}",
            {"stages": [{**STAGE, "mixture": {"web": weight}}]},
            "stages[].mixture.web",
            "got",
        )
        for weight in (0, -1, True, "1", None, float("nan"), float("inf"))
    ),
    *(
        (
            f"exclude-{name}",
            {"stages": [STAGE, {**STAGE, "from_step": 5, "exclude": wrong}]},
            parameter,
            message,
        )
        for name, wrong, parameter, message in (
            ("list", [[0, 1]], "stages[1].exclude", "must map corpus names to ranges"),
            ("stranger", {"wbe": [[0, 1]]}, "stages[1].exclude", r"names \['wbe'\], which no mixture"),
            ("reversed", {"web": [[0, 1], [9, 5]]}, "stages[1].exclude.web", r"got \[9, 5\]"),
            ("negative", {"web": [[-5, 5]]}, "stages[1].exclude.web", r"got \[-5, 5\]"),
            ("boolean", {"web": [[0, True]]}, "stages[1].exclude.web", r"got \[0, True\]"),
            ("pair", {"web": [5, 9]}, "stages[1].exclude.web", "got 5"),
        )
    ),
    ("fingerprints-list", {"fingerprints": ["a"]}, "fingerprints", "corpus names to strings"),
    ("fingerprints-int", {"fingerprints": {"web": 1}}, "fingerprints", "corpus names to strings"),
    ("fingerprints-other", {"fingerprints": {"code": "x"}}, "fingerprints", "no mixture of the plan uses"),
]


@pytest.mark.parametrize(
    ("change", "parameter", "message"),
    [pytest.param(*mistake, id=name) for name, *mistake in MISTAKES],
)
def test_a_mistake_is_named(change: dict[str, Any], parameter: str, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message) as caught:
        make(**change)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("document", [None, [], "plan", 3, True], ids=repr)
def test_only_an_object_is_a_plan(document: object) -> None:
    with pytest.raises(InvalidPlan, match="plan must be a JSON object"):
        Plan.from_json(document)


@pytest.mark.parametrize("missing", ["seq_len", "stages"])
def test_what_is_required_is_named(missing: str) -> None:
    document = one_source("web", 8, 4)
    del document[missing]
    with pytest.raises(InvalidPlan, match=f"plan lacks {missing}"):
        Plan.from_json(document)


def test_a_plan_does_not_follow_its_document() -> None:
    """Whoever made the plan may change the JSON it was made of; the plan is immutable."""
    document = one_source("web", 8, 4, fingerprints=dict(FINGERPRINTS))
    plan = Plan.from_json(document)
    before = plan.id
    document["fingerprints"]["web"] = "other"
    document["stages"][0]["mixture"]["web"] = 3.0
    document["stages"][0]["mixture"]["code"] = 1.0
    assert (plan.id, plan.sources) == (before, ("web",))
    assert Plan.from_json(json.loads(plan.canonical_json())).id == before
