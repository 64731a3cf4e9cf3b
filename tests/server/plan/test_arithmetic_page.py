"""docs/arithmetic.md is complete: an implementation from that page alone agrees with the server.

`tests/second.py` is that implementation. It is compared with the vectors, with the golden rows, and with the
server on random plans over everything that the page defines.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.errors import InvalidPlan
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.dealing import deal
from corpus_server.plan.family import Family, member_keys
from corpus_server.plan.mixture import quantise
from corpus_server.plan.packing import Packing, build
from corpus_server.plan.packing.spread import Class, merge, spread
from corpus_server.plan.permutation import invert, mix64, permute, round_keys, stream_key, uniform
from corpus_server.plan.stratified import Stratified
from corpus_server.work import Budget
from tests import second
from tests.corpora import spec, write_megatron
from tests.packed import PackedCase
from tests.plans import EPOCH_ORDERS, NO_EPOCH_ORDERS, PLAIN_ORDERS, STRIDES
from tests.reference import one_source
from tests.second import SecondPlan
from tests.server.plan import golden
from tests.serving import ROOT

VECTORS: Final = json.loads((ROOT / "docs" / "arithmetic.json").read_text(encoding="utf-8"))
GOLDEN: Final = {
    f"version {version}, {name}": case
    for version, path in golden.TABLES.items()
    for name, case in json.loads(path.read_text(encoding="utf-8")).items()
}
PLANS: Final = 1000
PLANS_A_TEST: Final = 50


def u64(values: list[str] | list[int]) -> np.ndarray:
    return np.array([int(value) for value in values], np.uint64)


def documents_of(shards: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the documents of a source, of which each shard has some lengths, as (first token, tokens)."""
    lengths = list(chain(*shards))
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def numbers(array: np.ndarray) -> list[int]:
    return [int(value) for value in array]


# The vectors


def test_mix() -> None:
    for vector in VECTORS["mix"]:
        assert second.mix(int(vector["x"])) == int(vector["result"])
    assert numbers(mix64(u64([vector["x"] for vector in VECTORS["mix"]]))) == [
        int(vector["result"]) for vector in VECTORS["mix"]
    ]


@pytest.mark.parametrize("vector", VECTORS["key"])
def test_key(vector: dict[str, str]) -> None:
    purpose, seed, name = vector["purpose"], int(vector["seed"]), vector["name"]
    assert second.key(purpose, seed, name) == stream_key(purpose, seed, name) == int(vector["result"])


@pytest.mark.parametrize("vector", VECTORS["round_keys"])
def test_round_keys(vector: dict[str, Any]) -> None:
    """Check the page's round keys. The server keeps others, made from these; `permute` compares those."""
    found = second.round_keys(int(vector["key"]), int(vector["epoch"]))
    assert found == tuple(int(value) for value in vector["result"])


@pytest.mark.parametrize("vector", VECTORS["permute"], ids=lambda vector: vector["n"])
def test_permute_and_invert(vector: dict[str, Any]) -> None:
    n, key, epoch = int(vector["n"]), int(vector["key"]), int(vector["epoch"])
    positions, expected = u64(vector["positions"]), u64(vector["result"])
    assert [second.permute(position, n, key, epoch) for position in numbers(positions)] == numbers(expected)
    assert [second.invert(value, n, key, epoch) for value in numbers(expected)] == numbers(positions)
    keys = round_keys(key, u64([epoch]))
    assert numbers(permute(positions, n, keys)) == numbers(expected)
    assert numbers(invert(expected, n, keys)) == numbers(positions)


@pytest.mark.parametrize("vector", VECTORS["draw"], ids=lambda vector: vector["bound"])
def test_draw(vector: dict[str, Any]) -> None:
    bound, key, counters = int(vector["bound"]), int(vector["key"]), u64(vector["counters"])
    expected = [int(value) for value in vector["result"]]
    assert [second.draw(counter, bound, key) for counter in numbers(counters)] == expected
    assert numbers(uniform(key, counters, bound)) == expected


@pytest.mark.parametrize("vector", VECTORS["units"])
def test_units(vector: dict[str, dict[str, float]]) -> None:
    assert second.units(vector["weights"]) == dict(quantise(vector["weights"])) == vector["result"]


@pytest.mark.parametrize("vector", VECTORS["slots"], ids=lambda vector: vector["seed"])
def test_slots(vector: dict[str, Any]) -> None:
    seed, stage, block = int(vector["seed"]), vector["stage"], int(vector["block"])
    assert [second.slot(offset, block, seed, stage) for offset in vector["offsets"]] == vector["result"]
    assert [second.slots(block, seed, stage)[offset] for offset in vector["offsets"]] == vector["result"]
    keys = round_keys(stream_key("mixture", seed, str(stage)), u64([block]))
    assert numbers(permute(u64(vector["offsets"]), 65536, keys)) == vector["result"]


@pytest.mark.parametrize("vector", VECTORS["joins"], ids=lambda vector: vector["seed"])
def test_joins(vector: dict[str, Any]) -> None:
    seed, stage, units = int(vector["seed"]), vector["stage"], vector["units"]
    expected = list(zip(vector["sources"], map(int, vector["ranks"]), strict=True))
    rows = [int(row) for row in vector["rows"]]
    assert [second.joined(row, units, seed, stage) for row in rows] == expected
    mixture = Stratified(units, stream_key("mixture", seed, str(stage)))
    sources, ranks = mixture.place(u64(rows))
    assert [
        (mixture.names[source], int(rank)) for source, rank in zip(sources, ranks, strict=True)
    ] == expected


@pytest.mark.parametrize("vector", VECTORS["classes"])
def test_classes(vector: dict[str, Any]) -> None:
    assert [list(each) for each in merge(vector["lengths"])] == vector["result"]
    found: Counter[int] = Counter()
    room_of = second.rooms(dict(vector["lengths"]))
    for length, tails in vector["lengths"]:
        found[room_of[length]] += tails
    assert [list(each) for each in sorted(found.items())] == vector["result"]


@pytest.mark.parametrize("vector", VECTORS["patterns"])
def test_patterns(vector: dict[str, Any]) -> None:
    classes = [Class(*each) for each in vector["classes"]]
    found = spread(classes, vector["row_tokens"])
    assert [[list(each.classes), each.rows] for each in found] == vector["result"]
    again = second.spread([(room, size) for room, size in vector["classes"]], vector["row_tokens"])
    assert [[list(numbers), height] for numbers, height in again] == vector["result"]


@pytest.mark.parametrize("vector", VECTORS["rows"], ids=lambda vector: vector["seq_len"])
def test_rows_of_documents(vector: dict[str, Any]) -> None:
    lengths = np.array([length for shard in vector["shards"] for length in shard], dtype=np.int64)
    starts, shard_ends = lengths.cumsum() - lengths, np.cumsum([sum(shard) for shard in vector["shards"]])
    seq_len, block_documents = vector["seq_len"], vector["block_documents"]
    table = build(starts, lengths, shard_ends, seq_len=seq_len, block_documents=block_documents)
    packing = Packing(table, key=int(vector["key"]))
    assert [packing.num_rows, packing.num_classes] == [vector["num_rows"], vector["num_classes"]]
    assert packing.costs(np.arange(packing.num_rows, dtype=np.uint64)).tolist() == vector["costs"]
    shard_tokens = [sum(shard) for shard in vector["shards"]]
    fields, documents = {"block_documents": block_documents}, documents_of(vector["shards"])
    packed = second.DocumentRows(second.Source("web", 0, seq_len, seq_len, fields, shard_tokens, documents))
    packed.key = int(vector["key"])
    assert [packed.n, len(packed.first), packed.costs] == [
        vector[name] for name in ("num_rows", "num_classes", "costs")
    ]
    for row in vector["result"]:
        pieces = packed.pieces_of(row["row"], int(row["epoch"]), [], 0)
        assert [[piece.document, piece.start, piece.tokens] for piece in pieces] == row["pieces"], row
        slots, _ = packing.slots(u64([row["row"]]), u64([row["epoch"]]))
        pieces = packing.pieces_at(slots, u64([row["epoch"]]))
        found = np.stack((packing.documents(pieces), *packing.tokens(pieces)), axis=1)
        assert found.tolist() == row["pieces"], row


@pytest.mark.parametrize("vector", VECTORS["ranks"])
def test_rows_of_ranks(vector: dict[str, Any]) -> None:
    dealt = deal(np.array(vector["costs"]), vector["world_size"])
    assert dealt.reshape(vector["world_size"], -1).tolist() == vector["result"]
    assert second.dealt(vector["costs"], vector["world_size"]) == vector["result"]


@pytest.mark.parametrize("vector", VECTORS["left_out"], ids=lambda vector: vector["family"]["leave_out"])
def test_documents_that_members_leave_out(vector: dict[str, Any]) -> None:
    family = {**vector["family"], "seed": int(vector["family"]["seed"])}
    values = vector.get("values", ())
    source = second.Source(vector["name"], 0, 1, 1, {}, [], [], values=values)
    left_out = second.LeftOut(family, source, lambda unit: (0, 0))
    documents = [int(document) for document in vector["documents"]]
    assert [left_out.leaves_out(document) for document in documents] == vector["result"]
    own = Family.from_json(family)
    keys = member_keys(own.keys([vector["name"]]), own.member)
    numbers = second.numbers_by(values) if values else documents
    signs = own.signs(keys, np.array(numbers, np.uint64))
    assert (signs > 0).tolist() == vector["result"]
    doubled = vector.get("doubled", [False] * len(documents))
    assert (signs < 0).tolist() == doubled == [left_out.what(each) == "doubled" for each in documents]


def test_the_page_has_vectors_of_every_part() -> None:
    parts = {"mix", "key", "round_keys", "permute", "draw", "units", "slots", "classes", "patterns", "rows"}
    assert set(VECTORS) == parts | {"documents", "joins", "left_out", "ranks"}


@pytest.mark.parametrize("order", PLAIN_ORDERS)
def test_the_page_defines_every_order(order: str) -> None:
    assert f'\n| `"{order}"` | ' in (ROOT / "docs" / "arithmetic.md").read_text()


# The golden rows


def fingerprints(plan: SecondPlan) -> dict[str, str]:
    return {name: f"sampled-{name}" for name in plan.sources}


def pieces_of(plan: SecondPlan, step: int) -> list[list[tuple[int, int, int]]]:
    return [plan.pieces(step, row) for row in range(plan.global_batch_size(step))]


def rows_of(plan: SecondPlan, step: int) -> list[tuple[int, int]]:
    return [plan.located(step, row) for row in range(plan.global_batch_size(step))]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_rows(name: str) -> None:
    case = GOLDEN[name]
    are_windows = case["plan"].get("rows", "windows") == "windows"
    plan = (
        SecondPlan(case["plan"], case["shard_tokens"])
        if "shard_tokens" in case
        else PackedCase(case["plan"], case["documents"]).second
    )
    assert plan.id(fingerprints(plan)) == case["id"]
    for shown in case["rows"]:
        rows: list[Any] = (rows_of if are_windows else pieces_of)(plan, shown["step"])
        numbers = [*(len(row) for row in rows), *chain(*chain(*rows))] if not are_windows else chain(*rows)
        assert json.loads(json.dumps(rows[:3])) == shown["first"]
        assert json.loads(json.dumps(rows[-3:])) == shown["last"]
        packed = b"".join(struct.pack("<q", number) for number in numbers)
        assert hashlib.sha256(packed).hexdigest() == shown["sha256"]


# Random plans

NAMES: Final = ("web", "code", "Z", "a", "wéb", "\uffff", "\U0001f600", 'say "it"\\')
SEEDS: Final = (0, 1, 1337, 2**63, 2**64 - 1)
MAX_STEP: Final = 2**40


def draw_shards(random: Random, seq_len: int) -> list[int]:
    """Return the tokens of a source's shards; some shards are too short for a window."""
    sizes = (0, seq_len, seq_len + 1, 2 * seq_len, 100 * seq_len, 3000, 100_000)
    shards = [random.randint(0, random.choice(sizes)) for _ in range(random.randint(1, 5))]
    if random.random() < 0.05:
        shards.append(random.randrange(10**13))
    shards.insert(random.randrange(len(shards) + 1), seq_len + 1 + random.choice((0, 1, seq_len, 5000)))
    return shards


def draw_order(random: Random) -> Any:
    blocks, groups = random.choice((1, 2, 7, 100, 5000)), random.choice((1, 2, 3, 8, 600))
    bounded = {"shuffle": {"block_windows": blocks, "group_blocks": groups}}
    return random.choice(("shuffle", *PLAIN_ORDERS, bounded, bounded, bounded))


def draw_ranges(random: Random, stop: int) -> list[list[int]]:
    """Return ranges in [0, stop): a few short ones, or one or two that leave little."""
    if random.random() < 0.3:
        left = random.randrange(stop)
        length = random.randint(1, max(1, stop // random.choice((2, 10, 50))))
        ranges = [[0, left], [left + length, stop]]
    else:
        starts = [random.randrange(stop) for _ in range(random.randint(1, 6))]
        ranges = [[start, start + random.randint(1, max(1, stop // 20))] for start in starts]
    return [[start, min(stop, end)] for start, end in ranges if start < min(stop, end)]


def draw_weight(random: Random) -> float:
    number = random.randint(1, 9)
    return random.choice((1, number, random.random() + 0.001, 0.1 * number, 65535))


def draw_stage(random: Random, seq_len: int, shard_tokens: Mapping[str, list[int]]) -> dict[str, Any]:
    names = random.sample(sorted(shard_tokens), random.randint(1, len(shard_tokens)))
    parts = random.choice((1, 1, *(part for part in (2, 3, 4, 8) if seq_len % part == 0)))
    stage: dict[str, Any] = {
        "global_batch_size": parts * random.choice((1, 2, 3, 8, 30)),
        "mixture": {name: draw_weight(random) for name in names},
    }
    if parts > 1 or random.random() < 0.1:
        stage["seq_len"] = seq_len // parts
    if random.random() < 0.4:
        among = random.choice((names, names, sorted(shard_tokens)))  # also sources of other stages
        chosen = random.sample(among, random.randint(1, len(among)))
        stage["exclude"] = {name: draw_ranges(random, sum(shard_tokens[name])) for name in chosen}
    return stage


def draw_plan(
    random: Random, draw_shards: Callable[[Random, int], list[int]] = draw_shards
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return the document of a plan and the tokens of its shards; the server may refuse it.

    Where a plan mixes, its seed is mostly one of a few: a block's slots cost 0.05 s in Python, and are kept.
    """
    seq_len = random.choice((1, 2, 3, 6, 8, 8, 12, 24, 64))
    names = random.sample(NAMES, random.choice((1, 1, 2, 3, 4)))
    shard_tokens = {name: draw_shards(random, seq_len) for name in names}
    document: dict[str, Any] = {"seq_len": seq_len, "order": draw_order(random), "stages": []}
    if version := random.choice((1, 2, None)):  # None: the page has its default
        document["version"] = version
    document["seed"] = random.choice(SEEDS) if random.random() < 0.9 else random.getrandbits(64)
    if str(document["order"]) not in STRIDES and random.random() < 0.4:
        document["stride"] = random.randint(1, 3 * seq_len)
    from_step = 0
    for _ in range(random.choice((1, 1, 2, 3, 4))):
        document["stages"].append({"from_step": from_step, **draw_stage(random, seq_len, shard_tokens)})
        from_step += random.randint(1, random.choice((1, 10, 100, 1000, 1000, 10**6)))
    if random.random() < 0.4:
        starts = [random.randrange(random.choice((3, 100, 2000, 10**6))) for _ in range(random.randint(1, 4))]
        document["skip_steps"] = [[start, start + random.randint(1, 50)] for start in starts]
    for field in ("seed", "order"):
        if random.random() < 0.1:
            del document[field]  # the page has its default
    return document, shard_tokens


def draw_steps(random: Random, document: Mapping[str, Any]) -> list[int]:
    """Return steps around the starts of stages, near the beginning, and for some plans far away."""
    starts = [stage["from_step"] for stage in document["stages"]]
    steps = {0, random.randrange(100), *(max(0, random.choice(starts) + around) for around in (-2, -1, 0, 1))}
    if random.random() < 0.3:
        steps.add(random.choice((random.randrange(10**6), random.randrange(MAX_STEP), MAX_STEP)))
    return sorted(steps)


def sampler_of(document: Mapping[str, Any], shard_tokens: Mapping[str, list[int]]) -> Sampler:
    plan = Plan.from_json(document)
    return Sampler(plan.bind({name: f"sampled-{name}" for name in plan.sources}), shard_tokens)


def accepted_plan(random: Random) -> tuple[dict[str, Any], dict[str, list[int]], Sampler]:
    """Return a random plan that the server accepts."""
    while True:
        document, shard_tokens = draw_plan(random)
        try:
            return document, shard_tokens, sampler_of(document, shard_tokens)
        except InvalidPlan:
            continue


@pytest.mark.parametrize("first", range(0, PLANS, PLANS_A_TEST))
def test_random_plans(first: int) -> None:
    for seed in range(first, first + PLANS_A_TEST):
        random = Random(seed)
        document, shard_tokens, sampler = accepted_plan(random)
        case = f"seed {seed}: {json.dumps(document)} over {json.dumps(shard_tokens)}"
        plan = SecondPlan(document, shard_tokens)
        assert plan.canonical_json(fingerprints(plan)) == sampler.plan.canonical_json, case
        assert plan.id(fingerprints(plan)) == sampler.plan.id, case
        for step in draw_steps(random, document):
            rows = rows_of(plan, step)
            found = sampler.locate(step)[0]
            assert [tuple(row) for row in found.tolist()] == rows, f"step {step}, {case}"
            world_size = random.choice([size for size in range(1, len(rows) + 1) if len(rows) % size == 0])
            rank = random.randrange(world_size)
            share = slice(rank * len(rows) // world_size, (rank + 1) * len(rows) // world_size)
            found = sampler.locate(step, rank=rank, world_size=world_size)[0]
            assert [tuple(row) for row in found.tolist()] == rows[share], f"step {step}, rank {rank}, {case}"


def features(document: Mapping[str, Any], shard_tokens: Mapping[str, list[int]]) -> set[str]:
    stages = document["stages"]
    order = document.get("order", "left out")
    found = {f"order {order if isinstance(order, str) else 'bounded'}"}
    found |= {f"{field} left out" for field in ("seed",) if field not in document}
    found |= {field for field in ("stride", "skip_steps") if field in document}
    found |= {field for stage in stages for field in ("seq_len", "exclude") if field in stage}
    if len(stages) > 1:
        found.add("stages")
    if any(len(stage["mixture"]) > 1 for stage in stages):
        found.add(f"mixture of version {document.get('version', 'left out')}")
    if any(min(tokens) <= document["seq_len"] for tokens in shard_tokens.values()):
        found.add("shard without a window")
    return found


def test_random_plans_cover_what_the_page_defines() -> None:
    counts = Counter(feature for seed in range(PLANS) for feature in features(*draw_plan(Random(seed))))
    assert set(counts) == {
        *(
            *(f"order {each}" for each in PLAIN_ORDERS),
            "order bounded",
            "order left out",
            "seed left out",
        ),
        *("stride", "skip_steps", "seq_len", "exclude", "stages", "shard without a window"),
        *(f"mixture of version {each}" for each in (1, 2, "left out")),
    }
    assert min(counts.values()) > PLANS // 20


# Random plans with rows of documents


def draw_lengths(random: Random, seq_len: int, tokens: int) -> list[int]:
    """Return the lengths of documents that fill a shard: many of one length, or alike, or full, or empty."""
    usual, lengths = random.randint(1, 3 * seq_len), []
    while tokens or random.random() < 0.2:
        length = random.choice(
            (0, 1, 2, usual, usual - usual // 512, random.randint(1, 3 * seq_len), seq_len + 1)
        )
        lengths.append(min(length, tokens))
        tokens -= lengths[-1]
    return lengths


def draw_short_shards(random: Random, seq_len: int) -> list[int]:
    """Return the tokens of a source's shards: a few rows each, some none."""
    sizes = (0, 2, 3 * seq_len, 30 * seq_len)
    return [random.randint(1, 3 * seq_len), *(random.choice(sizes) for _ in range(random.randint(0, 3)))]


def draw_packed_plan(random: Random) -> PackedCase:
    """Return a plan with rows of documents; the server may refuse it.

    Weights are equal and stages short, because blocks of mixtures are dear, and tested above.
    """
    document, shard_tokens = draw_plan(random, draw_short_shards)
    if random.random() < 0.1:
        document["seq_len"] = 2048  # so that lengths are merged
        document["stages"] = [
            {k: v for k, v in each.items() if k != "seq_len"} for each in document["stages"]
        ]
        shard_tokens = {name: [100 * tokens for tokens in shards] for name, shards in shard_tokens.items()}
    seq_len = document["seq_len"]
    document.pop("stride", None)
    document["seed"] = random.choice((0, 2**64 - 1))
    if document.get("order") in NO_EPOCH_ORDERS:
        document["order"] = EPOCH_ORDERS[-1]
    apart = random.choice((1, 10, 300))
    has_lengths = random.random() < 0.6
    for number, stage in enumerate(document["stages"]):
        if not has_lengths:
            stage.pop("seq_len", None)
        stage.update(from_step=number * apart, mixture=dict.fromkeys(stage["mixture"], 1))
    block_documents = random.choice(({}, {"block_documents": random.choice((1, 2, 5, 20, 100))}))
    document["rows"] = {"documents": block_documents}
    lengths = {
        name: tuple(tuple(draw_lengths(random, seq_len, tokens)) for tokens in shards)
        for name, shards in shard_tokens.items()
    }
    if random.random() < 0.4:
        document["rows"]["documents"]["begin"] = random.random() < 0.8
    eot_first = random.random() < 0.4
    is_cut = random.random() < 0.5
    opened = {name: draw_open(random, shards) if is_cut else () for name, shards in lengths.items()}
    if not eot_first:
        opened = {name: last_of(shards, opened[name]) for name, shards in lengths.items()}
    return PackedCase(document, lengths, eot_first, opened)


def draw_open(random: Random, shards: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the first document that is not empty of some shards."""
    firsts = accumulate(map(len, shards), initial=0)
    found = [
        first + next(number for number, length in enumerate(lengths) if length)
        for first, lengths in zip(firsts, shards, strict=False)
        if any(lengths)
    ]
    return tuple(number for number in found if random.random() < 0.7)


def last_of(shards: Sequence[Sequence[int]], opened: Sequence[int]) -> tuple[int, ...]:
    """Return the last document that is not empty of those shards, if it has two tokens or more."""
    found, first = list[int](), 0
    for lengths in shards:
        its = [number for number, length in enumerate(lengths, first) if length]
        if its and its[0] in opened and lengths[its[-1] - first] > 1:
            found.append(its[-1])
        first += len(lengths)
    return tuple(found)


def accepted_case(random: Random, draw: Callable[[Random], PackedCase]) -> PackedCase:
    """Return a random plan that the server accepts."""
    while True:
        case = draw(random)
        try:
            case.sampler  # noqa: B018
        except InvalidPlan:
            continue
        return case


def check_id(case: PackedCase, plan: SecondPlan) -> None:
    bound = case.sampler.plan.bind(fingerprints(plan)).with_digests(case.digests)
    assert plan.canonical_json(fingerprints(plan)) == bound.canonical_json
    assert plan.id(fingerprints(plan)) == bound.id


def check_rows(case: PackedCase, plan: SecondPlan, step: int) -> None:
    expected = [plan.pieces(step, row) for row in range(plan.global_batch_size(step))]
    pieces, borders = case.sampler.pieces(step, range(len(expected))).without_empty()
    found = [[tuple(piece) for piece in row.tolist()] for row in np.split(pieces, borders[1:-1])]
    assert found == expected, f"step {step}, {case}"


@pytest.mark.parametrize("vector", VECTORS["documents"], ids=lambda vector: vector["plan"]["seq_len"])
def test_plans_with_rows_of_documents(vector: dict[str, Any]) -> None:
    opened = {name: tuple(numbers) for name, numbers in vector.get("opened", {}).items()}
    case = PackedCase(vector["plan"], vector["lengths"], vector.get("eot_first", False), opened)
    plan = case.second
    check_id(case, plan)
    assert plan.id(fingerprints(plan)) == vector["id"]
    for each in vector["rows"]:
        check_rows(case, plan, each["step"])
        rows = range(plan.global_batch_size(each["step"]))
        assert [[list(piece) for piece in plan.pieces(each["step"], row)] for row in rows] == each["result"]


def test_the_id_holds_digests_of_the_documents_of_files(tmp_path: Path) -> None:
    shards = [[[1, 1, 0], [], [0]], [[2, 0], [1, 2, 1, 0]]]
    for number, texts in enumerate(shards):
        write_megatron(tmp_path / str(number), texts)
    document = one_source("c", 2, 1, rows={"documents": {}})
    case = PackedCase(document, {"c": tuple(tuple(map(len, texts)) for texts in shards)})
    with Catalog.open([spec(tmp_path, eot=0)]) as catalog:
        bound = catalog.bind(Plan.from_json(document), Budget()).plan
    assert case.second.id(bound.fingerprints) == bound.id


@pytest.mark.parametrize("first", range(0, PLANS, PLANS_A_TEST))
def test_random_plans_with_rows_of_documents(first: int) -> None:
    for seed in range(first, first + PLANS_A_TEST):
        random = Random(seed)
        case = accepted_case(random, draw_packed_plan)
        plan = case.second
        check_id(case, plan)
        steps = draw_steps(random, case.document)
        for step in random.sample(steps, min(3, len(steps))):
            if step < 1000 or len(plan.sources) == 1:  # a far block of a mixture is dear
                check_rows(case, plan, step)


# Random plans of families


def draw_family_plan(random: Random) -> PackedCase:
    """Return a plan of a family, with windows or rows of documents; the server may refuse it."""
    case = draw_packed_plan(random).without("exclude")
    fields: dict[str, Any] = {
        "leave_out": random.choice((0.1, 0.5, 0.9, random.random())),
        "member": random.choice((0, 1, random.randrange(2**16))),
    }
    if random.random() < 0.8:
        fields["seed"] = random.choice((0, 7, 2**64 - 1))
    if random.random() < 0.5:
        fields["double"] = fields["leave_out"] * random.choice((1.0, random.random()))
    case = case.with_fields(family=fields)
    if random.random() < 0.3:
        case = case.by("site", distinct=random.choice((2, 30)))
    if random.random() < 0.5:
        return case
    document = {**case.without("seq_len").document, "rows": "windows", "order": draw_order(random)}
    if str(document["order"]) not in STRIDES and random.random() < 0.4:
        document["stride"] = random.randint(1, 3 * document["seq_len"])
    return PackedCase(document, case.lengths, values=case.values)


@pytest.mark.parametrize("first", range(0, PLANS, PLANS_A_TEST))
def test_random_plans_of_families(first: int) -> None:
    for seed in range(first, first + PLANS_A_TEST):
        random = Random(seed)
        case = accepted_case(random, draw_family_plan)
        plan = case.second
        family = {"family": {**case.document["family"], "documents": case.ends_digests}}
        if case.values:
            family["family"]["values"] = case.values_digests
        document = case.with_fields(**family).document
        bound = Plan.from_json(document).bind(fingerprints(plan)).with_digests(case.digests)
        assert plan.canonical_json(fingerprints(plan)) == bound.canonical_json
        for step in draw_steps(random, case.document)[:3]:
            if step < 1000 or len(plan.sources) == 1:
                check_rows(case, plan, step)


def test_random_plans_of_families_cover_what_the_page_defines() -> None:
    counts: Counter[str] = Counter()
    for seed in range(PLANS // 5):
        case = accepted_case(Random(seed), draw_family_plan)
        rows, order = case.document["rows"], case.document.get("order", "shuffle")
        kind = "windows" if rows == "windows" else "documents"
        counts[f"{kind} {order if isinstance(order, str) else 'bounded'}"] += 1
        counts["seed left out"] += "seed" not in case.document["family"]
        counts["by"] += bool(case.values)
        counts["double"] += "double" in case.document["family"]
    windows = {f"windows {each}" for each in (*PLAIN_ORDERS, "bounded")}
    documents = {f"documents {each}" for each in (*EPOCH_ORDERS, "bounded")}
    assert set(counts) == {"seed left out", "by", "double"} | windows | documents
    assert min(counts.values()) > PLANS // 5 // 50


def packed_features(case: PackedCase) -> set[str]:
    found = features(case.document, {})
    block_documents = case.document["rows"]["documents"].get("block_documents")
    found.add("blocks" if block_documents else "block_documents left out")
    found |= {"begin"} if case.document["rows"]["documents"].get("begin") else set()
    found |= {"end-of-text first"} if case.eot_first else set()
    found |= {"open documents"} if any(case.opened.values()) else set()
    for shards in case.lengths.values():
        if any(0 in shard for shard in shards):
            found.add("empty document")
        if any(max(shard, default=0) > 2 * case.document["seq_len"] for shard in shards):
            found.add("document in several pieces")
        if len(shards) > 1:
            found.add("shards")
    if case.document["seq_len"] > 512:
        found.add("merged lengths")
    return found


def test_random_plans_with_rows_of_documents_cover_what_the_page_defines() -> None:
    counts = Counter(
        feature for seed in range(PLANS // 5) for feature in packed_features(draw_packed_plan(Random(seed)))
    )
    assert set(counts) == {
        *(f"order {each}" for each in (*EPOCH_ORDERS, "bounded", "left out")),
        *("skip_steps", "exclude", "stages", "seq_len", "shards", "blocks", "block_documents left out"),
        *(f"mixture of version {each}" for each in (1, 2, "left out")),
        *("empty document", "document in several pieces", "merged lengths"),
        *("begin", "end-of-text first", "open documents"),
    }
    assert min(counts.values()) > PLANS // 5 // 40
