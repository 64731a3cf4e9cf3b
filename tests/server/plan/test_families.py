"""Members of a family: what they leave out, what comes instead, and look-ups back, against whole runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidParameter, InvalidPlan, ResponseTooLarge
from corpus_server.plan import Plan
from corpus_server.plan.family import member_keys
from corpus_server.plan.questions.diff import changed_fields, compare
from corpus_server.plan.questions.lookup import look_up
from corpus_server.plan.questions.members import sightings_of_members
from corpus_server.plan.questions.usage import count_usage
from corpus_server.work import Budget, Limits
from tests.packed import Held, Lengths, PackedCase, holds, packed_plans
from tests.plans import PLAIN_ORDERS, STRIDES, bounded

STEPS = 16
FAMILY: dict[str, Any] = {"seed": 7, "leave_out": 0.2, "member": 3}


def case_of(lengths: list[list[int]], **fields: Any) -> PackedCase:
    """A member of a family over one source; `lengths` are those of the documents of each shard."""
    stage = {"from_step": 0, "global_batch_size": 8, "mixture": {"a": 1}}
    document = {"seq_len": 8, "family": FAMILY, "stages": [stage], **fields}
    return PackedCase(document, {"a": tuple(map(tuple, lengths))})


def some_lengths(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 24, count).tolist()


def of_member(case: PackedCase, member: int) -> PackedCase:
    return case.with_fields(family={**case.document["family"], "member": member})


def without_family(case: PackedCase) -> PackedCase:
    fields = {name: value for name, value in case.document.items() if name != "family"}
    return PackedCase(fields, case.lengths)


@st.composite
def members(draw: st.DrawFn, *, orders: tuple[str, ...] = ("shuffle", "sequential")) -> PackedCase:
    """Members of families over some dozen documents, whose rows are windows or documents."""
    case = draw(packed_plans(exclude=False, lengths=True))
    distinct = draw(st.sampled_from([None, None, 2, 7]))
    family = {"seed": draw(st.integers(0, 3)), "leave_out": draw(st.sampled_from([0.1, 0.3, 0.6]))}
    if draw(st.booleans()):
        family["double"] = min(0.3, family["leave_out"] * draw(st.sampled_from([0.5, 1.0])))
    case = case.with_fields(family={**family, "member": draw(st.integers(0, 3))})
    if draw(st.booleans()):
        order: Any = draw(st.sampled_from([*orders, "bounded"]))
        if order == "bounded":
            order = bounded(draw(st.integers(1, 12)), draw(st.integers(1, 4)))
        case = case.without("seq_len")
        case = case.with_fields(rows="windows", order=order, seq_len=draw(st.integers(1, 4)))
        if str(order) not in STRIDES:
            case = case.with_fields(stride=draw(st.integers(1, 5)))
    case = case if distinct is None else case.by("site", distinct=distinct)
    return accepted(case)


def accepted(case: PackedCase) -> PackedCase:
    try:
        case.sampler  # noqa: B018
        without_family(case).sampler  # noqa: B018
    except InvalidPlan:
        reject()
    return case


def documents_of(case: PackedCase, held: Held) -> set[tuple[str, int]]:
    """The documents of which a row holds tokens."""
    found = set()
    for shard, start, count in held.pieces:
        if shard < 0 or not count:
            continue
        name, first = case.shards[shard]
        for number, (begin, tokens) in enumerate(Lengths(case.lengths[name]).documents):
            if holds(begin, tokens, first + start, first + start + count):
                found.add((name, number))
    return found


def leaves_out(case: PackedCase, name: str, document: int) -> bool:
    return case.second.left_out[name, case.document["seq_len"]].leaves_out(document)


@settings(deadline=None, max_examples=60)
@given(members(orders=PLAIN_ORDERS))
def test_no_row_holds_a_document_that_is_left_out(case: PackedCase) -> None:
    """Rows that would hold none are those of the plan without a family."""
    for own, plain in zip(case.run(STEPS), without_family(case).run(STEPS), strict=True):
        assert not any(leaves_out(case, *each) for each in documents_of(case, own))
        if not any(leaves_out(case, *each) for each in documents_of(case, plain)):
            assert own == plain


@settings(deadline=None, max_examples=60)
@given(members(), st.data())
def test_a_look_up_finds_every_row_and_no_other(case: PackedCase, data: st.DataObject) -> None:
    name, document = a_document(case, data)
    start, tokens = Lengths(case.lengths[name]).documents[document]
    epochs = data.draw(st.integers(1, 3))
    found = look_up(case.sampler, name, start, start + tokens, Budget(), epochs=epochs)
    expected = [
        (held.plan_step, held.row)
        for held in run_of(case)
        if held.source == name and held.epoch < epochs and (name, document) in documents_of(case, held)
    ]
    assert [(row.plan_step, row.row) for row in found.rows if row.plan_step < STEPS] == expected
    assert not (expected and leaves_out(case, name, document))


def a_document(case: PackedCase, data: st.DataObject) -> tuple[str, int]:
    """A document that is not empty, and its source."""
    name = data.draw(st.sampled_from(sorted(case.sampler.plan.sources)))
    lengths = [length for shard in case.lengths[name] for length in shard]
    document = data.draw(st.integers(0, len(lengths) - 1))
    assume(lengths[document] > 0)
    return name, document


def run_of(case: PackedCase) -> list[Held]:
    """The rows of the first plan steps, skipped ones included."""
    return case.with_fields(skip_steps=[]).run(STEPS)


@settings(deadline=None, max_examples=50)
@given(members(), st.data())
def test_what_members_hold_is_what_each_of_them_holds(case: PackedCase, data: st.DataObject) -> None:
    name, document = a_document(case, data)
    start, tokens = Lengths(case.lengths[name]).documents[document]
    epochs = data.draw(st.integers(1, 3))
    asked = {"epochs": epochs, "limit": 1000}
    found = sightings_of_members(
        case.sampler, name, document, (start, start + tokens), range(1, 6), Budget(), **asked
    )
    assert [each.member for each in found] == [1, 2, 3, 4, 5]
    for each in found:
        try:
            own = of_member(case, each.member)
            sampler = own.sampler
        except InvalidPlan:
            continue  # it leaves out too much
        rows = look_up(sampler, name, start, start + tokens, Budget(), epochs=epochs).rows
        assert each.leaves_out == leaves_out(own, name, document)
        assert each.steps == sorted({row.step for row in rows if row.step is not None})


@settings(deadline=None, max_examples=30)
@given(members(), st.integers(0, 5))
def test_the_difference_of_two_members_is_that_of_their_rows(case: PackedCase, member: int) -> None:
    other = of_member(case, member)
    accepted(other)
    steps = range(STEPS - 3)
    differing = [step for step in steps if case.rows_of(step) != other.rows_of(step)]
    if differing:  # only so many steps: two members of little data may differ in no more of 2^40
        found = compare(case.sampler, other.sampler, Budget(), num_steps=len(differing))
        assert [each.step for each in found.steps] == differing
    fields = [each.field for each in changed_fields(case.sampler.plan, other.sampler.plan, Budget())]
    assert fields == (["family.member"] if member != case.document["family"]["member"] else [])


@settings(deadline=None, max_examples=30)
@given(members())
def test_usage_is_that_of_the_plan_without_a_family(case: PackedCase) -> None:
    """And what one counts in the rows of the member: what comes instead is of the same source."""
    used = [count_usage(each.sampler, 0, STEPS, Budget()) for each in (case, without_family(case))]
    assert used[0] == used[1]
    plain = case.with_fields(skip_steps=[])
    counted = Counter(held.source for held in plain.run(STEPS))
    its = count_usage(plain.sampler, 0, STEPS, Budget()).sources
    assert {name: each.rows for name, each in its.items() if each.rows} == counted


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_members_leave_out_their_share_each_others_of_their_own(share: float) -> None:
    family = Plan.from_json(case_of([[9]], family={"leave_out": share, "member": 0}).document).family
    assert family is not None
    documents = np.arange(20_000, dtype=np.uint64)
    out = [family.signs(member_keys(family.keys(["a"]), member), documents) > 0 for member in range(4)]
    for number, its in enumerate(out):
        assert abs(its.mean() - share) < 0.015
        for other in out[:number]:
            assert abs((its & other).mean() - share**2) < 0.015  # independent of each other


@pytest.mark.parametrize("order", ["shuffle", "sequential", bounded(64, 4)])
def test_each_window_that_is_left_comes_equally_often_in_the_long_run(order: Any) -> None:
    """As the page says: 1 / q times, by a geometric distribution, wherever the window lies."""
    lengths, epochs = [9] * 400, 60  # windows and documents of one length, so all are left out alike
    case = case_of([lengths], order=order, seq_len=8, stride=9, family={**FAMILY, "leave_out": 0.3})
    sampler = case.sampler
    n = int(sampler.num_windows[0])
    pieces = sampler.pieces_at(
        0, np.arange(epochs * n, dtype=np.uint64), np.zeros(epochs * n, np.int64)
    ).places
    windows = (pieces[:, 1] // 9).reshape(epochs, n)
    counts = np.stack([np.bincount(each, minlength=n) for each in windows])
    out = np.array([leaves_out(case, "a", document) for document in range(n)])
    left = 1 - out.mean()
    assert not counts[:, out].any()
    kept = counts[:, ~out]
    assert kept.mean() == pytest.approx(1 / left)
    assert kept.var() == pytest.approx((1 - left) / left**2, rel=0.1)
    shares = Counter(kept.ravel().tolist())
    for times in (1, 2, 3):
        assert shares[times] / kept.size == pytest.approx(left * (1 - left) ** (times - 1), abs=0.02)
    # None is favoured: the sums over the epochs vary as sums of independent numbers do.
    assert kept.sum(axis=0).var() < 1.5 * epochs * (1 - left) / left**2


@pytest.mark.parametrize("rows", ["windows", "documents"])
@pytest.mark.parametrize("order", ["shuffle", bounded(64, 4)])
@pytest.mark.parametrize(("leave_out", "doubled_twice"), [(0.1, 0.85), (0.2, 0.99)])
def test_what_is_doubled_comes_once_or_twice(
    rows: str, order: Any, leave_out: float, doubled_twice: float
) -> None:
    """Documents of one length, each a window or a piece: what each of them becomes, counted over epochs."""
    n, epochs = 1200, 2
    case = case_of([[9] * n], order=order, rows=rows, seq_len=8)
    case = case.with_fields(family={**FAMILY, "leave_out": leave_out, "double": 0.1})
    if rows == "windows":
        case = case.with_fields(stride=9)
    pieces = case.sampler.pieces_at(0, np.arange(epochs * n, dtype=np.uint64), np.zeros(epochs * n, np.int64))
    assert len(pieces.places) == epochs * n  # no slot stays empty
    held = (pieces.places[:, 1] // 9).reshape(epochs, n)
    counts = np.stack([np.bincount(each, minlength=n) for each in held])
    whats = np.array([case.second.left_out["a", 8].what(document) for document in range(n)])
    assert not counts[:, whats == "out"].any()
    assert counts[:, whats == "plain"].min() == 1
    doubled = counts[:, whats == "doubled"]
    assert set(np.unique(doubled)) <= {1, 2}
    for row in range(240):
        assert case.second.pieces_of(row // 8, row % 8) == [tuple(pieces.places[row].tolist())]
    in_groups = rows == "windows" and order != "shuffle"  # where fewer places are looked at
    assert doubled.mean() - 1 > (doubled_twice - 0.2 if in_groups else doubled_twice)


def test_documents_of_one_value_are_left_out_together() -> None:
    case = case_of([some_lengths(200)], rows="documents").by("site", distinct=7)
    values, out = case.values["a"], [leaves_out(case, "a", each) for each in range(200)]
    for value in set(values) - {None}:
        its = {is_out for is_out, each in zip(out, values, strict=True) if each == value}
        assert len(its) == 1
    missing = [number for number, value in enumerate(values) if value is None]
    plain = case_of([some_lengths(200)], rows="documents")
    assert [out[number] for number in missing] == [leaves_out(plain, "a", number) for number in missing]
    assert {out[number] for number in missing} == {True, False}


def test_members_substitute_other_windows() -> None:
    """What stands in for a window differs by member, or their effects would be mixed."""
    case = case_of([[9] * 400], seq_len=8, stride=9, order="sequential")
    first = [of_member(case, member).sampler.locate(0, count=50)[..., 1].ravel() // 9 for member in range(40)]
    stood_in = {int(rows[0]) for rows in first if rows[0] != 0}
    assert len(stood_in) > 4


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ({"leave_out": 0.1}, "lacks member"),
        ({"member": 1}, "lacks leave_out"),
        ({"leave_out": 0.0, "member": 1}, "and below 1"),
        ({"leave_out": 1e-300, "member": 1}, "at least 2\\*\\*-53, the smallest .*, got 1e-300"),
        ({"leave_out": 0.1, "double": 2**-54, "member": 1}, "family.double must be a number of at least 2"),
        ({"leave_out": 1.0, "member": 1}, "and below 1"),
        ({"leave_out": 1, "member": 1}, "and below 1"),
        ({"leave_out": float("nan"), "member": 1}, "and below 1"),
        ({"leave_out": True, "member": 1}, "and below 1"),
        ({"leave_out": 0.1, "member": 65_536}, r"family.member must be an integer in \[0, 65535\]"),
        ({"leave_out": 0.1, "member": -1}, "family.member"),
        ({"leave_out": 0.1, "member": 1, "seed": -1}, "family.seed"),
        ({"leave_out": 0.1, "member": 1, "by": ""}, "the name of a column of metadata"),
        ({"leave_out": 0.1, "member": 1, "by": 3}, "the name of a column of metadata"),
        ({"leave_out": 0.1, "member": 1, "values": {"a": "xxh3-0"}}, "family.values must be left out"),
        ({"double": 0.1, "member": 1}, "lacks leave_out"),
        ({"leave_out": 0.1, "double": 0.0, "member": 1}, "family.double must be a number of at least 2"),
        ({"leave_out": 0.1, "double": 0.2, "member": 1}, "family.double must be at most leave_out, 0.1"),
        ({"leave_out": 0.5, "double": 0.5, "member": 1}, "family.double must be below 1 together with"),
        (3, "family must be a JSON object"),
    ],
)
def test_a_wrong_family_is_refused(family: Any, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        Plan.from_json(case_of([[9]], family=family).document)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"order": {"megatron": {"num_samples": 9}}}, "permutes rows by their numbers, with a family"),
        ({"order": "olmo"}, "permutes rows by their numbers, with a family"),
        (
            {"stages": [{"global_batch_size": 1, "mixture": {"a": 1}, "exclude": {"a": [[0, 9]]}}]},
            r"stages\[0\].exclude is not built together with family",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        Plan.from_json(case_of([[9]], **fields).document)


def test_a_member_that_keeps_too_little_is_refused() -> None:
    """Windows that touch 60 documents each: hardly one is left."""
    case = case_of([[3] * 4000], seq_len=180)
    with pytest.raises(InvalidPlan, match=r"member 3 keeps 0.00% of the windows of 'a'.*at least 1/32"):
        case.sampler  # noqa: B018
    packed = case.with_fields(rows={"documents": {}}).sampler
    assert packed.left_out is not None
    assert 0.7 < packed.left_out.kept[0] < 0.9


def test_a_plan_of_no_family_is_refused() -> None:
    sampler = without_family(case_of([some_lengths(50)])).sampler
    with pytest.raises(InvalidParameter, match="no member of a family"):
        sightings_of_members(sampler, "a", 0, (0, 5), range(5), Budget())


def test_an_order_without_epochs_is_refused() -> None:
    sampler = case_of([some_lengths(50)], order="random").sampler
    with pytest.raises(InvalidParameter, match="cannot be looked up"):
        sightings_of_members(sampler, "a", 0, (0, 5), range(50), Budget())


def test_what_members_hold_is_paid_from_the_budget() -> None:
    sampler = case_of([some_lengths(50)]).sampler
    with pytest.raises(ResponseTooLarge, match="at most 1000 rows"):
        sightings_of_members(sampler, "a", 0, (0, 5), range(1000), Budget(Limits(rows=1000)))
