"""Stages that say epochs and tokens: what they come to, by counting the rows of the second implementation."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidPlan
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.chain import parse_document
from corpus_server.plan.draft import Draft
from corpus_server.plan.settling import Settled, settle
from tests.packed import PackedCase
from tests.reference import ReferencePlan

SEQ_LEN = 8
ROWS = {"web": 1000, "code": 400, "math": 30}
STAGE_ROWS = 4  # by which version 2 may miss a share at the end of a stage, docs/arithmetic.md


def shapes(rows: Mapping[str, int]) -> dict[str, list[int]]:
    """One shard of so many windows for each source."""
    return {name: [num * SEQ_LEN + 1] for name, num in rows.items()}


def settled(document: Mapping[str, Any], rows: Mapping[str, int] = ROWS) -> Settled:
    """Return the plan of a document, as a server reads it."""
    draft = parse_document(json.dumps({"seq_len": SEQ_LEN, **document}))
    assert isinstance(draft, Draft)
    return settle(draft, lambda plan: Sampler(plan, shapes(rows)))


def one_stage(batch_size: int = 16, **stage: Any) -> dict[str, Any]:
    return {"stages": [{"global_batch_size": batch_size, **stage}]}


def counted(plan: Plan, num_steps: int, rows: Mapping[str, int] = ROWS) -> Counter[str]:
    """Count the rows of the first steps, one by one, by the second implementation."""
    reference = ReferencePlan(plan.to_json(), shapes(rows))
    return Counter(
        reference.row_of(step, row).source
        for step in range(num_steps)
        for row in range(reference.global_batch_size(step))
    )


def test_epochs_become_weights_and_the_step_at_which_they_are_over() -> None:
    """The plan is that of plain stages, by its id, too; each source comes as often as was asked."""
    found = settled(one_stage(epochs={"web": 1, "code": 2, "math": 0.5}))
    (stage,) = found.plan.to_json()["stages"]
    weights = {"web": 1000, "code": 800, "math": 15}
    plain = {"seq_len": SEQ_LEN, "stages": [{"global_batch_size": 16, "mixture": weights}]}
    assert set(stage) == {"from_step", "global_batch_size", "mixture"}
    assert found.plan.canonical_json == Plan.from_json(plain).canonical_json
    assert found.num_steps == 1815 // 16
    used = counted(found.plan, found.num_steps)
    for name, asked in weights.items():
        assert asked - 16 * asked / 1815 - STAGE_ROWS <= used[name] <= asked + STAGE_ROWS


def test_tokens_are_inputs_and_epochs_of_other_sources_may_stand_beside() -> None:
    """By corpus, or by group; each source in one of the two."""
    group = {"share": 6400, "of": {"web": 3, "code": 1}}
    found = settled(one_stage(tokens={"crawl": group}, epochs={"math": 2}))
    assert (
        found.plan.stages[0].units
        == Plan.from_json(
            {
                "seq_len": SEQ_LEN,
                "stages": [{"global_batch_size": 1, "mixture": {"web": 600, "code": 200, "math": 60}}],
            }
        )
        .stages[0]
        .units
    )
    assert found.num_steps == 860 // 16


@pytest.mark.parametrize(
    ("mixture", "flat"),
    [
        ({"web": {"share": 0.7, "of": {"a": 2, "b": 1}}, "c": 0.3}, {"a": 14, "b": 7, "c": 9}),
        (
            {"x": {"share": 1, "of": {"y": {"share": 3, "of": {"a": 1, "b": 1}}, "c": 1}}},
            {"a": 3, "b": 3, "c": 2},
        ),
        ({"a": {"share": 2, "of": {"a": 5}}, "b": 1}, {"a": 2, "b": 1}),
    ],
)
def test_groups_share_a_number(mixture: dict[str, Any], flat: dict[str, int]) -> None:
    """Nested, too; a group's name is no corpus. In thirds and sevenths, so floats would round."""
    plans = [
        Plan.from_json({"seq_len": 8, "stages": [{"global_batch_size": 1, "mixture": its}]})
        for its in (mixture, flat)
    ]
    assert plans[0].canonical_json == plans[1].canonical_json


def test_a_stage_ends_where_a_source_was_seen_so_often_since_the_start() -> None:
    """By counting rows: the stage has the last step before the one that begins the third pass."""
    stages = [
        {"global_batch_size": 7, "epochs": {"code": 1.5, "web": 0.1}},
        {"global_batch_size": 5, "mixture": {"code": 0.3, "web": 0.7}, "until": {"epochs": {"code": 2}}},
        {"global_batch_size": 16, "mixture": {"math": 1}},
    ]
    found = settled({"stages": stages, "seed": 3})
    first, second, third = found.plan.stages
    assert found.num_steps is None
    assert first.from_step == 0
    assert second.from_step == 700 // 7
    at_end = counted(found.plan, third.from_step)
    assert at_end["code"] <= 800
    plain = found.plan.to_json()
    plain["stages"] = plain["stages"][:2]
    assert counted(Plan.from_json(plain), third.from_step + 1)["code"] > 800


def test_a_run_ends_before_it_has_seen_more_tokens() -> None:
    """All tokens since the start, those of earlier stages included; the batch size changes."""
    stages = [
        {"global_batch_size": 10, "epochs": {"web": 0.5}},
        {"global_batch_size": 16, "mixture": {"web": 1}, "until": {"tokens": 8000}},
    ]
    found = settled({"stages": stages})
    assert found.num_steps == 50 + (1000 - 500) // 16
    assert found.plan.version == 1  # of one source


def test_what_comes_first_ends_a_stage() -> None:
    """Its own epochs, or until."""
    stage = {
        "epochs": {"web": 1, "code": 1},
        "until": {"tokens": {"web": SEQ_LEN * 100}, "epochs": {"code": 5}},
    }
    found = settled(one_stage(4, **stage))
    assert found.num_steps is not None
    assert (
        counted(found.plan, found.num_steps)["web"] <= 100 < counted(found.plan, found.num_steps + 1)["web"]
    )


SMALL = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "e"]), st.tuples(st.integers(3, 400), st.integers(1, 40)), min_size=1
)


@settings(deadline=None, max_examples=30)
@given(SMALL, st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_random_epochs_are_kept_to_a_few_rows(
    asked: dict[str, tuple[int, int]], batch: int, seed: int
) -> None:
    """No source gets more than it should and the rows by which a share may be missed, none much less."""
    rows = {name: num for name, (num, _) in asked.items()}
    epochs = {name: tenths / 10 for name, (_, tenths) in asked.items()}
    wanted = {name: Fraction(num * tenths, 10) for name, (num, tenths) in asked.items()}
    total = sum(wanted.values())
    if min(wanted.values()) < 1 or total < batch or total > 4000:
        return
    found = settled({"seed": seed, **one_stage(batch, epochs=epochs)}, rows)
    assert found.num_steps is not None
    assert 0 <= total - found.num_steps * batch < batch
    used = counted(found.plan, found.num_steps, rows)
    for name, its in wanted.items():
        assert its - batch * its / total - STAGE_ROWS <= used[name] <= its + STAGE_ROWS


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 10**7), min_size=2, max_size=9),
    st.integers(1, 4096),
    st.integers(0, 2**64 - 1),
)
def test_long_stages_become_several_whose_weights_are_next_to_their_shares(
    wanted: list[int], batch: int, seed: int
) -> None:
    """A unit of 1/65536 of 10^7 rows is 150 rows; a source of less than a unit would have none."""
    rows = {f"source-{number}": num for number, num in enumerate(wanted)}
    total = sum(wanted)
    if total < batch:
        return
    found = settled({"seed": seed, **one_stage(batch, epochs=dict.fromkeys(rows, 1))}, rows)
    assert found.num_steps == total // batch
    stages = found.plan.stages
    assert len(stages) <= len(rows)
    sampler = Sampler(found.plan, shapes(rows))
    given = dict(
        zip(found.plan.sources, sampler.timeline.given_before(found.num_steps)[0].tolist(), strict=True)
    )
    most = 2 * STAGE_ROWS if len(stages) == 1 else len(stages) * (STAGE_ROWS + 1)
    for name, asked in rows.items():
        assert asked - asked * batch / total - most <= given.get(name, 0) <= asked + most
        if len(stages) > 1:
            share = 65536 * Fraction(asked, total)
            assert all(abs(stage.units.get(name, 0) - share) < 1 for stage in stages)


def test_a_check_names_the_step_at_which_a_source_was_seen_too_often() -> None:
    """By counting rows: the step before has none too many, the step itself has."""
    mixed = {"mixture": {"web": 3, "math": 1}}
    with pytest.raises(InvalidPlan, match=r"'math' may be seen 2 times, which step (\d+) passes") as refused:
        settled({**one_stage(**mixed), "max_epochs": {"math": 2, "web": 1}, "num_steps": 20})
    step = int(str(refused.value).split("which step ")[1].split()[0])
    assert refused.value.remedy is not None
    assert f"end the run at step {step}" in refused.value.remedy
    found = settled({**one_stage(**mixed), "max_epochs": 2, "num_steps": step})
    assert found.num_steps == step
    # A mixture may miss its share by 4 rows, which is no excess.
    assert counted(found.plan, step)["math"] <= 2 * ROWS["math"] + STAGE_ROWS
    assert counted(found.plan, step + 1)["math"] > 2 * ROWS["math"] + STAGE_ROWS


def test_what_is_asked_may_be_the_most_that_is_allowed() -> None:
    """Also where a source of its own ends exactly with its epochs; one row more is refused."""
    assert settled(
        {**one_stage(10, epochs={"web": 2, "code": 1}), "max_epochs": {"web": 2, "code": 1}}
    ).num_steps
    alone = {**one_stage(10, mixture={"web": 1}), "max_epochs": {"web": 2}}
    assert settled({**alone, "num_steps": 200}).num_steps == 200
    with pytest.raises(
        InvalidPlan, match=r"which step 200 passes; the plan shows 'web' 2.01 times in 201 steps"
    ):
        settled({**alone, "num_steps": 201})


def test_a_plan_without_an_end_passes_any_limit_of_what_it_goes_on_to_show() -> None:
    """Unless its last stage leaves the source out."""
    with pytest.raises(
        InvalidPlan, match="'web' may be seen 3 times, which step 300 passes; the plan has no end"
    ):
        settled({**one_stage(10, mixture={"web": 1}), "max_epochs": 3})
    stages = [
        {"global_batch_size": 10, "epochs": {"web": 3}},
        {"global_batch_size": 10, "mixture": {"code": 1}},
    ]
    found = settled({"stages": stages, "max_epochs": {"web": 3}})
    assert found.num_steps is None


def two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"stages": [{"global_batch_size": 8, **first}, {"global_batch_size": 8, **second}]}


WEB: dict[str, Any] = {"epochs": {"web": 1}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weights and epochs": (one_stage(mixture={"web": 1}, **WEB), r"stages\[0\] must say either mixture"),
    "nothing": (one_stage(until={"tokens": 9}), r"either mixture .* got none"),
    "both of one": (
        one_stage(tokens={"web": 800}, **WEB),
        r"stages\[0\] says both epochs and tokens of \['web'\]",
    ),
    "none at all": (one_stage(epochs={}), "an object of 1 to 1024 corpus names"),
    "zero": (one_stage(epochs={"web": 0}), r"stages\[0\].epochs.web must be a positive number"),
    "true": (one_stage(tokens={"web": True}), r"stages\[0\].tokens.web must be a positive number"),
    "text": (one_stage(tokens={"web": "1e9"}), "must be a positive number"),
    "too much": (one_stage(tokens={"web": 1e30}), "a positive number of at most"),
    "group of epochs": (
        one_stage(epochs={"all": {"share": 1, "of": {"web": 1}}}),
        "because an epoch is one of a corpus",
    ),
    "group without share": (one_stage(tokens={"all": {"of": {"web": 1}}}), "a number, or a group as"),
    "empty group": (one_stage(tokens={"all": {"share": 1, "of": {}}}), r"stages\[0\].tokens.all.of must be"),
    "named twice": (
        one_stage(tokens={"web": 800, "all": {"share": 800, "of": {"web": 1}}}),
        "corpus 'web' is named twice",
    ),
    "deep": (
        one_stage(tokens=json.loads('{"g": {"share": 1, "of": ' * 9 + '{"web": 1}' + "}}" * 9)),
        "nested more than 8 deep",
    ),
    "less than a row": (
        one_stage(epochs={"web": 0.0001}),
        r"stages\[0\].epochs.web must be at least one row",
    ),
    "less than a step": (
        one_stage(64, epochs={"math": 1}),
        r"stages\[0\] would have no step: it asks for 30 rows",
    ),
    "until something": (one_stage(mixture={"web": 1}, until={}), "an object with epochs or tokens"),
    "until a word": (one_stage(mixture={"web": 1}, until={"epoch": 2}), "did you mean 'epochs'"),
    "until a stranger": (
        one_stage(mixture={"web": 1}, until={"epochs": {"code": 2}}),
        r"stages\[0\].until.epochs must be corpora that the stage shows: web, got .code.",
    ),
    "until before": (
        two(WEB, {"mixture": {"web": 1}, "until": {"epochs": {"web": 0.5}}}),
        r"stages\[1\].until.epochs.web is passed in step 62, and its stage begins at step 125",
    ),
    "until tokens before": (
        two(WEB, {"mixture": {"web": 1}, "until": {"tokens": 80}}),
        r"stages\[1\].until.tokens is passed in step \d+, and its stage begins at step 125",
    ),
    "no beginning": (two({"mixture": {"web": 1}}, WEB), r"stages\[1\].from_step is missing"),
    "another beginning": (
        two(WEB, {"mixture": {"web": 1}, "from_step": 9}),
        r"left out, or 125, where the stage",
    ),
    "late start": (one_stage(from_step=5, **WEB), r"stages\[0\].from_step must be left out, or 0"),
    "order without epochs": ({**one_stage(**WEB), "order": "random"}, "needs an order that has epochs"),
    "checked without epochs": (
        {**one_stage(tokens={"web": 800}), "order": "random", "max_epochs": 1},
        "max_epochs needs an order that has epochs",
    ),
    "Megatron's order": (
        {**one_stage(**WEB), "order": {"megatron": {"num_samples": 9}}},
        "mixture alone with order megatron",
    ),
    "skipped": ({**one_stage(**WEB), "skip_steps": [[1, 2]]}, "skip_steps must be left out"),
    "version 1": (
        {**one_stage(epochs={"web": 1, "code": 1}), "version": 1},
        "version must be 2, or left out",
    ),
    "no such corpus": (
        {**one_stage(**WEB), "max_epochs": {"cod": 1}},
        r"max_epochs must be sources of the plan: web",
    ),
    "beyond its end": (
        {**one_stage(**WEB), "num_steps": 1000},
        "num_steps must be at most 62, where the last",
    ),
    "no number of steps": ({**one_stage(**WEB), "num_steps": 0}, r"num_steps must be an integer in \[1"),
    "field of a plan": ({**one_stage(**WEB), "sed": 0}, "plan has an unknown field 'sed'"),
    "field of a stage": (one_stage(epoch={"web": 1}, **WEB), r"stages\[0\] has an unknown field 'epoch'"),
    "parts": (one_stage(3, seq_len=4, **WEB), r"stages\[0\].global_batch_size must be a multiple of 2"),
    "length of packed rows": (
        {**one_stage(5, seq_len=4, **WEB), "rows": "documents"},
        r"stages\[0\].global_batch_size must be a multiple of 2",
    ),
    "no stages": ({"stages": [], "max_epochs": 2}, "stages must be a list of at least one stage"),
    "version 0": ({**one_stage(**WEB), "version": 0}, "version must be a version of the plan arithmetic"),
    "continued": ({**one_stage(**WEB), "parent": "0" * 64}, "no epochs, tokens, until"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_comes_to_no_plan_is_refused_with_what_to_do(name: str) -> None:
    """Each names the field; where the range of it says not enough, there is a remedy."""
    document, message = REFUSED[name]
    with pytest.raises(InvalidPlan, match=message) as refused:
        settled(document)
    assert refused.value.parameter
    says_what_to_do = refused.value.accepted or refused.value.remedy or "; " in str(refused.value)
    assert says_what_to_do or "deep" in name


def test_more_stages_than_a_plan_may_have_are_refused_before_they_are_made() -> None:
    """Each of these becomes as many as it has sources."""
    rows = {f"source-{number}": 10**7 + number for number in range(40)}
    stages = [{"global_batch_size": 1024, "epochs": dict.fromkeys(rows, 1)}] * 20
    with pytest.raises(InvalidPlan, match=r"stages\[12\]: .* come to 520 stages, and a plan may have 512"):
        settled({"stages": stages}, rows)


def test_a_draft_comes_out_of_another_process_as_it_was() -> None:
    """Documents of more than a megabyte are parsed in one."""
    document = {"seq_len": 8, **one_stage(epochs={"web": 1, "code": 0.1}, exclude={"web": [[1, 9]]})}
    draft = parse_document(json.dumps(document))
    assert isinstance(draft, Draft)
    plans = [
        settle(each, lambda plan: Sampler(plan, shapes(ROWS))).plan
        for each in (draft, pickle.loads(pickle.dumps(draft)))
    ]
    assert plans[0].canonical_json == plans[1].canonical_json
    assert plans[0].stages[0].exclude["web"].total == 8


def test_stages_read_in_parts_count_whole_windows() -> None:
    """A stage of half the length shows an epoch in twice the rows."""
    found = settled(one_stage(20, seq_len=4, epochs={"web": 1}))
    assert found.num_steps == 1000 // 10
    assert found.plan.stages[0].seq_len == 4


PACKED = {
    name: (tuple(1 + (n * n + seed) % 23 for n in range(300)), tuple(1 + n * 7 % 19 for n in range(80)))
    for seed, name in enumerate(("web", "code"))
}


def packed(document: Mapping[str, Any]) -> tuple[Settled, PackedCase]:
    """Return what a document with rows of documents comes to, and the case that counts its rows."""
    draft = parse_document(json.dumps({"seq_len": SEQ_LEN, "rows": {"documents": {}}, **document}))
    assert isinstance(draft, Draft)
    found = settle(draft, lambda plan: PackedCase(plan.to_json(), PACKED).sampler)
    return found, PackedCase(found.plan.to_json(), PACKED)


def epochs_of(case: PackedCase, num_steps: int, name: str) -> Fraction:
    """Count rows one by one, by the second implementation, each as a part of an epoch of its length."""
    second, found = case.second, Fraction(0)
    for step in range(num_steps):
        n = second.rows[name, second.seq_len(step)].n
        for row in range(second.global_batch_size(step)):
            found += Fraction(second.epoch(step, row)[0] == name, n)
    return found


@pytest.mark.parametrize("seq_len", [2, 4, 8])
def test_epochs_of_rows_of_documents_count_rows_of_the_stages_length(seq_len: int) -> None:
    """Each prediction comes twice, but for the rows that would begin one more step."""
    found, case = packed(one_stage(8, seq_len=seq_len, epochs={"web": 2}))
    assert found.num_steps is not None
    n = case.second.rows["web", seq_len].n
    assert found.num_steps == 2 * n // 8
    seen = Counter(
        (shard, token)
        for step in range(found.num_steps)
        for row in case.rows_of(step)
        for shard, start, count in row
        if shard >= 0
        for token in range(start, start + count - 1)
    )
    assert set(seen.values()) <= {1, 2}
    every = sum(length - 1 for shard in PACKED["web"] for length in shard)
    assert 2 * every - 8 * seq_len <= seen.total() <= 2 * every


@pytest.mark.parametrize(
    "first", [{"epochs": {"web": 1, "code": 0.5}}, {"tokens": {"web": 900, "code": 300}}]
)
def test_until_adds_up_epochs_of_stages_of_several_lengths(first: dict[str, Any]) -> None:
    second = {"global_batch_size": 4, "mixture": {"web": 1}, "until": {"epochs": {"web": 2}}}
    stages = [{"global_batch_size": 8, "seq_len": 4, **first}, second]
    found, case = packed({"stages": stages, "max_epochs": 2})
    assert found.num_steps is not None
    assert epochs_of(case, found.num_steps, "web") <= 2 < epochs_of(case, found.num_steps + 1, "web")
    with pytest.raises(InvalidPlan, match=r"max_epochs: 'web' may be seen 1\.5 times"):
        packed({"stages": stages, "max_epochs": 1.5})


def test_tokens_are_inputs_in_each_length() -> None:
    found, case = packed(one_stage(16, seq_len=2, tokens={"web": 1000, "code": 600}))
    assert found.num_steps == 1600 // 2 // 16
    rows = Counter(case.second.epoch(step, row)[0] for step in range(found.num_steps) for row in range(16))
    for name, tokens in {"web": 1000, "code": 600}.items():
        # A position of the plan's length is four of these rows; a stage may miss a share by 4 positions.
        assert abs(rows[name] - tokens / 2) <= 4 * STAGE_ROWS + 16
