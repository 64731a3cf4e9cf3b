"""docs/arithmetic.md is complete: an implementation from that page alone agrees with the server.

`tests/second.py` is that implementation. Here it is compared with the vectors and with the golden rows; in
`test_random_plans*.py` with the server, on random plans over everything that the page defines.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.plan import Plan
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
from tests.plans import PLAIN_ORDERS
from tests.reference import one_source
from tests.second import SecondPlan
from tests.server.plan import golden
from tests.server.plan.drawn import (
    check_id,
    check_rows,
    fingerprints,
    rows_of,
)
from tests.serving import ROOT

VECTORS: Final = json.loads((ROOT / "docs" / "arithmetic.json").read_text(encoding="utf-8"))
GOLDEN: Final = {
    f"version {version}, {name}": case
    for version, path in golden.TABLES.items()
    for name, case in json.loads(path.read_text(encoding="utf-8")).items()
}


def u64(values: list[str] | list[int]) -> np.ndarray:
    return np.array([int(value) for value in values], np.uint64)


def documents_of(shards: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the documents of a source, of which each shard has some lengths, as (first token, tokens)."""
    lengths = list(chain(*shards))
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def numbers(array: np.ndarray) -> list[int]:
    return [int(value) for value in array]


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


def pieces_of(plan: SecondPlan, step: int) -> list[list[tuple[int, int, int]]]:
    return [plan.pieces(step, row) for row in range(plan.global_batch_size(step))]


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
