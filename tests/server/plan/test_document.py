"""The plan document: one canonical spelling, and every mistake named."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from corpus_server.errors import InvalidPlan
from corpus_server.plan import BoundedShuffle, MegatronOrder, Plan, Stage, document
from corpus_server.plan.amounts import MAX_SOURCES
from corpus_server.plan.document import MAX_RANGES_IN_FORCE, MAX_STAGE_SOURCES, MAX_STAGES
from tests.plans import PLAIN_ORDERS, Case, small_plans
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
        '"stride":1024,"version":1}'
    )
    assert plan.canonical_json == expected
    assert plan.id == hashlib.sha256(expected.encode()).hexdigest()


@given(case=small_plans(orders=(*PLAIN_ORDERS, "bounded")))
def test_the_canonical_json_is_the_sorted_one_without_spaces(case: Case) -> None:
    plan = Plan.from_json(case.document)
    assert plan.canonical_json == json.dumps(plan.to_json(), sort_keys=True, separators=(",", ":"))
    assert Plan.parse(plan.canonical_json) == plan


@pytest.mark.parametrize(
    "spelled",
    [
        {"version": 1},
        {"stride": 1024},
        {"seed": 0},
        {"order": "shuffle"},
        {"skip_steps": []},
        {"fingerprints": FINGERPRINTS},
        {"stages": [{"global_batch_size": 512, "mixture": {"web": 1}}]},
        {"stages": [{"global_batch_size": 512, "mixture": {"web": 1}, "seq_len": 1024}]},
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
        {"order": {"shuffle": {"block_windows": 16384, "group_blocks": 64}}},
        {"fingerprints": {"web": "sampled-" + "1" * 64}},
        {"stages": [{"global_batch_size": 511, "mixture": {"web": 1}}]},
        {"stages": [{"global_batch_size": 512, "mixture": {"web": 1}, "seq_len": 512}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_a_row_changes_the_id(change: dict[str, Any]) -> None:
    changed = make(**change)
    assert changed.bind(changed.fingerprints or FINGERPRINTS).id != make().bind(FINGERPRINTS).id


def test_the_stride_of_random_is_one() -> None:
    assert make(order="random").stride == 1
    assert make(order="random", stride=1).stride == 1


def test_only_a_bound_plan_has_an_id() -> None:
    with pytest.raises(InvalidPlan, match="bound"):
        _ = make().id


@pytest.mark.parametrize("version", [0, 3, "1", 1.0, True], ids=repr)
def test_a_version_that_is_not_known_is_refused_by_name(version: object) -> None:
    with pytest.raises(InvalidPlan, match=rf"server knows \(1, 2\), got {version!r}") as caught:
        make(version=version)
    assert (caught.value.parameter, caught.value.received, caught.value.accepted) == (
        "version",
        version,
        "1, 2",
    )
    assert "release that knows" in str(caught.value.remedy)


def test_the_default_of_the_version_is_the_newest_where_a_stage_mixes_sources() -> None:
    """Plans of one source have the same rows in both versions, and keep their ids."""
    mixed = {"global_batch_size": 8, "mixture": {"web": 1, "code": 1}}
    assert make().version == 1
    assert make(stages=[mixed]).version == 2
    assert (
        make(stages=[{"global_batch_size": 8, "mixture": {"web": 1}}, {"from_step": 3, **mixed}]).version == 2
    )
    assert make(stages=[mixed], version=1).version == 1


BOUNDS = {"block_windows": 16384, "group_blocks": 64}
STAGE = {"global_batch_size": 1, "mixture": {"web": 1}}
MISTAKES: list[tuple[str, object, str, str]] = [
    ("seq-len-true", {"seq_len": True}, "seq_len", "got True"),
    ("seq-len-text", {"seq_len": "8"}, "seq_len", "got '8'"),
    ("stride-random", {"order": "random", "stride": 2}, "stride", "stride must be 1"),
    ("order", {"order": "Shuffle"}, "order", "one of shuffle, "),
    ("order-list", {"order": ["shuffle"]}, "order", "one of"),
    ("order-empty", {"order": {}}, "order", "block_windows"),
    ("order-other", {"order": {"random": {}}}, "order", "got {'random'"),
    ("order-text", {"order": {"shuffle": "all"}}, "order.shuffle", "must be a JSON object, got str"),
    ("order-lacks", {"order": {"shuffle": {"block_windows": 8}}}, "group_blocks", "lacks group_blocks"),
    (
        "order-unknown",
        {"order": {"shuffle": {"block_window": 8, "group_blocks": 8}}},
        "block_window",
        "did you mean 'block_windows'",
    ),
    *(
        (
            f"order-{name}-{value}",
            {"order": {"shuffle": {**BOUNDS, name: value}}},
            f"order.shuffle.{name}",
            told,
        )
        for name, value, told in (
            ("group_blocks", 8.0, "got 8.0"),
            ("group_blocks", None, "got None"),
        )
    ),
    ("typing-error", {"sed": 1}, "sed", "unknown field 'sed'; did you mean 'seed'"),
    ("of-a-stage", {"global_batch_size": 8}, "global_batch_size", "it belongs into each of `stages`$"),
    ("of-a-draft", {"epochs": {"web": 1}}, "epochs", "it belongs into each of `stages`$"),
    ("of-a-url", {"corpus": "web"}, "corpus", "`mixture` of each of `stages` says it$"),
    ("unknown", {"zzzzzz": 1}, "zzzzzz", "unknown field 'zzzzzz'$"),
    *(
        (f"skip-steps-{name}", {"skip_steps": wrong}, "skip_steps", message)
        for name, wrong, message in (
            ("number", 3, "list of .start, stop. pairs, got 3"),
            ("flat", [0, 1], "got 0"),
            ("reversed", [[0, 1], [9, 5]], r"0 <= start < stop <= 1099511627776, got \[9, 5\]"),
            ("negative", [[-1, 5]], r"got \[-1, 5\]"),
            ("float", [[0, 1.5]], r"got \[0, 1.5\]"),
            ("boolean", [[False, 5]], r"got \[False, 5\]"),
            ("beyond", [[0, 2**40 + 1]], r"got \[0, 1099511627777\]"),
        )
    ),
    ("stages-none", {"stages": []}, "stages", r"with from_step 0 first, and then larger ones, got \[\]"),
    ("stages-late", {"stages": [{**STAGE, "from_step": 5}]}, "stages", r"from_step 0.*got \[5\]"),
    *(
        (f"stages-{name}", {"stages": [STAGE, *({**STAGE, "from_step": k} for k in starts)]}, "stages", "got")
        for name, starts in (("unsorted", (9, 5)), ("duplicate", (5, 5)))
    ),
    *(
        (
            f"from-step-{value}",
            {"stages": [STAGE, {**STAGE, "from_step": value}]},
            "stages[1].from_step",
            f"got {value}",
        )
        for value in (-1, True, 1.5, 2**40 + 1)
    ),
    *(
        (f"length-{value}", {"stages": [{**STAGE, "seq_len": value}]}, "stages[0].seq_len", message)
        for value, message in (
            (0, "got 0"),
            (True, "got True"),
            (1000, "a divisor of the plan's seq_len 1024, got 1000"),
            (2048, "a divisor of the plan's seq_len 1024, got 2048"),
        )
    ),
    (
        "length-batch",
        {"stages": [{**STAGE, "seq_len": 256, "global_batch_size": 510}]},
        "stages[0].global_batch_size",
        "a multiple of 4, the rows of 256 tokens that make one window of 1024, got 510",
    ),
    ("stages-object", {"stages": {"a": 1}}, "stages", "list of objects"),
    ("stage-text", {"stages": [STAGE, "abc"]}, "stages[1]", "must be a JSON object"),
    ("batch-none", {"stages": [{"mixture": {"web": 1}}]}, "global_batch_size", "lacks global_batch_size"),
    ("mixture-empty", {"stages": [{**STAGE, "mixture": {}}]}, "stages[0].mixture", "1 to 1024 corpus names"),
    ("mixture-list", {"stages": [{**STAGE, "mixture": ["web"]}]}, "stages[0].mixture", "corpus names"),
    (
        "weight-tiny",
        {"stages": [{**STAGE, "mixture": {"web": 1, "code": 1e-6}}]},
        "stages[0].mixture.code",
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
            "stages[0].mixture.web",
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
            ("pair", {"web": [5, 9]}, "stages[1].exclude.web", "got 5"),
        )
    ),
    (
        "olmo-batch-0",
        {"order": {"olmo": {"global_batch_size": 0}}},
        "order.olmo.global_batch_size",
        r"an integer in \[1, 1048576\], got 0",
    ),
    (
        "olmo-no-shards",
        {"order": {"olmo": {"shards": []}}},
        "order.olmo.shards",
        r"a list of 1 to 1048576 integers in \[0, 1048576\), got \[\]",
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


def stage_with(**fields: Any) -> Stage:
    return Stage(**{"global_batch_size": 1, "mixture": {"web": 1}, **fields})


INTEGERS: list[tuple[str, int, int, Callable[..., object]]] = [
    ("seq_len", 1, 2**20, make),
    ("stride", 1, 2**40, make),
    ("seed", 0, 2**64 - 1, make),
    ("stages[].from_step", 0, 2**40, stage_with),
    ("stages[].global_batch_size", 1, 2**20, stage_with),
    ("stages[].seq_len", 1, 2**20, stage_with),
    ("order.shuffle.block_windows", 1, 2**40, lambda **fields: BoundedShuffle(group_blocks=1, **fields)),
    ("order.shuffle.group_blocks", 1, 2**16, lambda **fields: BoundedShuffle(block_windows=1, **fields)),
    ("order.megatron.num_samples", 1, 2**31, MegatronOrder),
]


@pytest.mark.parametrize(
    ("name", "low", "high", "kind"), [pytest.param(*each, id=each[0]) for each in INTEGERS]
)
def test_an_integer_has_bounds(name: str, low: int, high: int, kind: Callable[..., object]) -> None:
    field = name.rpartition(".")[2]
    for value in (low, high):
        kind(**{field: value})
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidPlan) as caught:
            kind(**{field: value})
        accepted = f"an integer in [{low}, {high}]"
        assert caught.value.detail == f"{name} must be {accepted}, got {value}"
        found = caught.value.parameter, caught.value.accepted, caught.value.received
        assert found == (name, accepted, value)


TWO = {"blend": ["web", "code"], "weights": [1, 3]}
TWO_STAGES = [{**STAGE, "mixture": {"code": 3, "web": 1}}, {**STAGE, "from_step": 5}]


def megatron(order: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"order": {"megatron": {"num_samples": 9, **order}}, **fields}


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (megatron({}), {"blend": ["web"]}),
        (megatron({}, seed=2**32 - 1, stride=1024), {"blend": ["web"]}),
        (megatron({"weights": [7]}), {"blend": ["web"], "weights": [7.0]}),
        (megatron(TWO, stages=TWO_STAGES[:1]), {"blend": ["web", "code"], "weights": [1.0, 3.0]}),
        (
            megatron(TWO, stages=[{**each, "mixture": {"web": 0.25, "code": 0.75}} for each in TWO_STAGES]),
            {"blend": ["web", "code"], "weights": [1.0, 3.0]},
        ),
    ],
    ids=["alone", "bounds", "weight", "blend", "stages"],
)
def test_a_plan_in_megatrons_order(change: dict[str, Any], order: dict[str, Any]) -> None:
    """A plan of one source fills in its blend."""
    expected = {"num_samples": 9, "split": [1.0], "part": "train", **order}
    assert make(**change).to_json()["order"] == {"megatron": expected}


CARRIED = (
    " cannot be carried by order megatron: Megatron's samples have one length, and none has a substitute; "
    "leave it out, or use order shuffle"
)


@pytest.mark.parametrize(
    ("change", "parameter", "message"),
    [
        (
            megatron({}, seed=2**32),
            "seed",
            "seed must be an integer in [0, 4294967295], got 4294967296",
        ),
        (
            megatron({}, stride=1023),
            "stride",
            "stride must be left out or seq_len (1024) with order megatron, got 1023",
        ),
        (
            megatron({}, stages=TWO_STAGES),
            "order.megatron.blend",
            "order.megatron.blend must be the corpora in the order of Megatron's blend, which decides the "
            "rows, got []",
        ),
        (
            megatron(TWO, stages=TWO_STAGES),
            "stages[1].mixture",
            "stages[1].mixture must be the weights of order.megatron, which hold for the whole run: "
            "{'code': 49152, 'web': 16384} of 65536, got {'web': 65536}",
        ),
        (
            megatron({}, stages=[STAGE, {**STAGE, "from_step": 5, "seq_len": 512, "global_batch_size": 2}]),
            "stages[1].seq_len",
            "stages[1].seq_len" + CARRIED,
        ),
        (
            megatron({}, stages=[{**STAGE, "exclude": {"web": [[0, 1]]}}]),
            "stages[0].exclude",
            "stages[0].exclude" + CARRIED,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_megatrons_order_cannot_carry_is_refused(
    change: dict[str, Any], parameter: str, message: str
) -> None:
    with pytest.raises(InvalidPlan) as caught:
        make(**change)
    assert (caught.value.detail, caught.value.parameter) == (message, parameter)


def test_a_plan_does_not_follow_its_document() -> None:
    """Whoever made the plan may change the JSON it was made of; the plan is immutable."""
    document = one_source("web", 8, 4, fingerprints=dict(FINGERPRINTS))
    plan = Plan.from_json(document)
    before = plan.id
    document["fingerprints"]["web"] = "other"
    document["stages"][0]["mixture"]["web"] = 3.0
    document["stages"][0]["mixture"]["code"] = 1.0
    assert (plan.id, plan.sources) == (before, ("web",))
    assert Plan.from_json(json.loads(plan.canonical_json)).id == before


def staged(number: int, **fields: Any) -> list[dict[str, Any]]:
    return [{**STAGE, "from_step": k, **fields} for k in range(number)]


def test_a_plan_has_a_bounded_number_of_stages() -> None:
    assert len(make(stages=staged(MAX_STAGES)).stages) == MAX_STAGES
    stages = [Stage(from_step=k, global_batch_size=1, mixture={"web": 1}) for k in range(MAX_STAGES + 1)]
    for posted in (lambda: make(stages=staged(MAX_STAGES + 1)), lambda: Plan(seq_len=8, stages=(*stages,))):
        with pytest.raises(InvalidPlan) as caught:
            posted()
        error = caught.value
        assert error.detail == "a plan may have at most 512 stages, got 513"
        assert (error.parameter, error.received, error.accepted) == ("stages", 513, "at most 512")
        assert error.remedy == "join neighbouring stages; exclusions of several stages may stand in one"


def test_a_stage_has_a_bounded_number_of_sources() -> None:
    mixture = {f"c{n}": 1.0 for n in range(MAX_SOURCES)}
    assert len(Stage(global_batch_size=1, mixture=mixture).mixture) == MAX_SOURCES
    for wrong in ({**mixture, "more": 1.0}, {}):
        with pytest.raises(InvalidPlan, match=f"an object of 1 to {MAX_SOURCES} corpus names and numbers"):
            Stage(global_batch_size=1, mixture=wrong)


def test_stages_times_sources_are_bounded() -> None:
    """Also where each stage names few of the plan's sources."""
    number = MAX_STAGE_SOURCES // MAX_STAGES
    mixture = {f"source-{k}": 1 for k in range(number)}
    assert len(make(stages=staged(MAX_STAGES, mixture=mixture)).sources) == number
    mixture["one-more"] = 1
    stages = staged(MAX_STAGES, mixture={"one-more": 1})
    stages[0] = {**stages[0], "mixture": mixture}
    for wrong in (staged(MAX_STAGES, mixture=mixture), stages):
        with pytest.raises(InvalidPlan) as caught:
            make(stages=wrong)
        error = caught.value
        assert error.detail == (
            "a plan may have at most 32768 stages times the sources that any of them uses, got 33280"
        )
        assert (error.parameter, error.received, error.accepted) == ("stages", 33280, "at most 32768")
    assert len(make(stages=stages[: MAX_STAGES // 2]).sources) == number + 1


def test_exclusions_that_stages_repeat_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that adds one range keeps those of the stages before it; one that adds none keeps none."""
    assert MAX_RANGES_IN_FORCE == 3 * 2**20
    monkeypatch.setattr(document, "MAX_RANGES_IN_FORCE", 2 + 5 + 6)
    names = {"mixture": {"web": 1, "code": 1}}
    stages = staged(4, **names)
    stages[0]["exclude"] = {"web": [[0, 1], [5, 6]]}
    stages[1]["exclude"] = {"web": [[2, 3]], "code": [[0, 1], [2, 3]]}
    stages[3]["exclude"] = {"web": [[8, 9]]}
    assert make(stages=stages).stages[3].exclude
    stages[3]["exclude"] = {"web": [[8, 9], [11, 12]]}
    with pytest.raises(InvalidPlan) as caught:
        make(stages=stages)
    accepted = "at most 13 ranges summed over the stages that add some"
    error = caught.value
    assert error.detail == f"stages[].exclude must be {accepted}, got 14"
    assert (error.parameter, error.received, error.accepted) == ("stages[].exclude", 14, accepted)
    assert error.remedy == "exclude the ranges in fewer stages, or join neighbouring ranges"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("text", ["{}", "no JSON"])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool, text: str) -> None:
    """Also when the document is refused."""
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(InvalidPlan):
            Plan.parse(text)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_field_given_twice_is_found_among_many() -> None:
    """In time that does not grow with the square of their number."""
    many = ",".join(f'"source-{k}":1' for k in range(200_000))
    with pytest.raises(InvalidPlan, match="'last' is given twice"):
        Plan.parse(f'{{"mixture":{{{many},"last":1,"last":1}}}}')


def test_a_long_value_is_named_by_its_beginning() -> None:
    for change in (
        {"order": "x" * 10**6},
        {"x" * 10**6: 1},
        {"skip_steps": "x" * 10**6},
        {"stages": "x" * 10**6},
    ):
        with pytest.raises(InvalidPlan) as caught:
            make(**change)
        assert len(caught.value.detail) < 1000
