"""The golden rows of each version, `golden_rows_1.json` and `golden_rows_2.json`: made once, never changed.

    python -m tests.server.plan.golden      adds new cases to the tables; refuses to change one

Versions differ in mixtures alone, so the table of version 2 has only plans that mix.

A row that differs from the table is a bug in the code, not in the table: trainings are running on these rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from corpus_server.plan import ROWS, Plan, Sampler
from corpus_server.plan.document import VERSIONS
from tests.packed import PackedCase, rows_of
from tests.plans import EPOCH_ORDERS, PLAIN_ORDERS

TABLES = {version: Path(__file__).with_name(f"golden_rows_{version}.json") for version in VERSIONS}
SHOWN_ROWS = 3

Document = dict[str, Any]
ShardTokens = dict[str, list[int]]
Lengths = dict[str, list[list[int]]]
"""Tokens of each document of each shard."""

ONE_SHARD = {"web": [100_001]}
MANY_SHARDS = {"web": [8, 3_000, 0, 9, 70_000, 1, 12_345]}
VAST = {"web": [10**12 + 7, 10**11]}
THREE = {"web": [40_001, 9, 5_000], "code": [30_000], "math": [700, 20_001]}
HUNDREDS = {f"source-{k:03}": [500 + 13 * k, 9 + k] for k in range(300)}
STEPS = [0, 1, 7, 8191, 10**8, 2**40]
DOCUMENTS: Lengths = {
    "web": [[7 * k % 29 for k in range(400)], [], [40, 0, 3, *range(20)], [0]],
    "code": [[3 + k % 7 for k in range(200)], [100]],
}


def cases() -> Iterator[tuple[str, Document, ShardTokens | Lengths, list[int]]]:
    """Yield (name, plan document, tokens of each shard or of its documents, training steps)."""
    for order in PLAIN_ORDERS:
        for name, tokens in (("one shard", ONE_SHARD), ("many shards", MANY_SHARDS), ("vast", VAST)):
            for seed in (0, 1337, 2**64 - 1):
                yield f"{order}, {name}, seed {seed}", plan([stage()], order=order, seed=seed), tokens, STEPS
        if order in EPOCH_ORDERS:
            for stride in (1, 9, 24):
                document = plan([stage()], order=order, stride=stride)
                yield f"{order}, stride {stride}", document, MANY_SHARDS, STEPS
        yield from mixtures(order)
        yield from exclusions(order)
        yield f"{order}, all together", *all_together(order), [0, 49, 50, 119, 120, 121, 500, 10**8]
    yield from bounded()
    yield from curricula()
    yield from rows_of_kinds()
    yield from families()


def families() -> Iterator[tuple[str, Document, Lengths, list[int]]]:
    """Yield members of families: windows in each order, and rows of documents."""
    bounded_order = {"shuffle": {"block_windows": 7, "group_blocks": 3}}
    steps = [0, 1, 7, 29, 30, 10**8]
    for rows in ("windows", "documents"):
        for order in (*(EPOCH_ORDERS if rows == "documents" else PLAIN_ORDERS), bounded_order):
            stages = [
                stage(size=12, mixture={"web": 2, "code": 1}),
                stage(30, size=20, mixture={"code": 1, "web": 1}),
            ]
            for leave_out, member, double in ((0.1, 0, None), (0.5, 65_535, None), (0.3, 5, 0.2)):
                family = {"seed": 7, "leave_out": leave_out, "member": member}
                family |= {} if double is None else {"double": double}
                fields = {"order": order, "rows": rows, "seed": 42, "seq_len": 7, "family": family}
                yield (
                    f"family, {rows}, {order}, leave out {leave_out}"
                    + ("" if double is None else f", double {double}"),
                    plan(stages, **fields),
                    DOCUMENTS,
                    steps,
                )


def rows_of_kinds() -> Iterator[tuple[str, Document, Lengths, list[int]]]:
    """Yield plans with each kind of rows but windows, which the cases above have.

    Rows of eight tokens, because a kind may divide them.
    """
    bounded_order = {"shuffle": {"block_windows": 7, "group_blocks": 3}}
    for kind in ROWS:
        if kind.name == ROWS.default.name or kind.required():
            continue
        for order in (*(EPOCH_ORDERS if kind.is_permuted else PLAIN_ORDERS), bounded_order):
            mixes = [
                stage(size=12, mixture={"web": 2, "code": 1}),
                stage(
                    9, size=20, mixture={"code": 1, "web": 1}, exclude={"web": [[50, 700], [4_000, 4_001]]}
                ),
                stage(31, size=6, mixture={"web": 1}, exclude={"web": [[800, 2_000]], "code": [[3, 90]]}),
            ]
            for seed in (0, 2**64 - 1):
                alone = plan([stage(size=16)], order=order, rows=kind.name, seed=seed, seq_len=7)
                yield f"rows {kind.name}, {order}, seed {seed}", alone, DOCUMENTS, STEPS
            fields = {"order": order, "rows": kind.name, "seed": 42, "seq_len": 7}
            together = plan(mixes, **fields, skip_steps=[[0, 3], [12, 20]])
            yield f"rows {kind.name}, {order}, all together", together, DOCUMENTS, [0, 6, 7, 22, 23, 10**8]
            if kind.own_lengths:
                changing = [
                    stage(size=12, mixture={"web": 2, "code": 1}, seq_len=2),
                    stage(
                        90, size=20, mixture={"code": 1, "web": 1}, exclude={"web": [[50, 700]]}, seq_len=4
                    ),
                    stage(400, size=6, mixture={"web": 1}),
                    stage(900, size=8, mixture={"code": 1, "web": 3}, seq_len=2),
                ]
                fields = {"order": order, "rows": kind.name, "seed": 42, "seq_len": 8}
                document = plan(changing, **fields, skip_steps=[[0, 3], [95, 97]])
                steps = [0, 86, 87, 394, 395, 894, 895, 10**8]
                yield f"rows {kind.name}, {order}, lengths", document, DOCUMENTS, steps


def curricula() -> Iterator[tuple[str, Document, ShardTokens, list[int]]]:
    """Yield plans whose stages read the windows of 8 inputs in parts of 1, 2, 4 and whole."""
    for order in (*PLAIN_ORDERS, {"shuffle": {"block_windows": 100, "group_blocks": 8}}):
        stages = [
            stage(size=32, mixture={"web": 2, "code": 1}, seq_len=1),
            stage(50, size=40, mixture={"math": 1, "web": 1}, exclude={"web": [[100, 2_000]]}, seq_len=2),
            stage(140, size=6, mixture={"code": 1}, seq_len=4),
            stage(5000, size=6, mixture={"math": 1, "code": 5, "web": 1}, exclude={"math": [[0, 600]]}),
            stage(6000, size=64, mixture={"math": 1, "code": 1}, seq_len=2),
        ]
        document = plan(stages, order=order, seed=42, skip_steps=[[0, 3], [45, 60]])
        steps = [0, 41, 42, 100, 121, 122, 4981, 4982, 5981, 5982, 10**8]
        yield f"{order}, lengths", document, THREE, steps


def bounded() -> Iterator[tuple[str, Document, ShardTokens, list[int]]]:
    """Yield plans of bounded shuffles: one group, a short last block, one block a group, long groups."""
    for block_windows, group_blocks in ((16_384, 64), (100, 8), (7, 1), (1, 600)):
        order = {"shuffle": {"block_windows": block_windows, "group_blocks": group_blocks}}
        name = f"shuffle {group_blocks} x {block_windows}"
        for size, tokens in (("one shard", ONE_SHARD), ("many shards", MANY_SHARDS), ("vast", VAST)):
            yield f"{name}, {size}", plan([stage()], order=order, seed=1337), tokens, STEPS
        for case, document, tokens, steps in (*mixtures(order), *exclusions(order)):
            if "300" not in case:
                yield case.replace(str(order), name), document, tokens, steps
        yield f"{name}, all together", *all_together(order), [0, 49, 50, 119, 120, 121, 500, 10**8]


def mixtures(order: Any) -> Iterator[tuple[str, Document, ShardTokens, list[int]]]:
    """Yield plans of several sources and stages; 64 rows a step make 1,024 steps a block."""
    two = {"web": 0.7, "code": 0.3}
    steps = [0, 1, 1023, 1024, 5000, 10**8, 2**40]
    yield f"{order}, two sources", plan([stage(size=64, mixture=two)], order=order), THREE, steps
    tiny = {"web": 65_535, "math": 1}
    yield f"{order}, smallest share", plan([stage(size=64, mixture=tiny)], order=order), THREE, steps
    many = {name: 1 + k / 7 for k, name in enumerate(HUNDREDS)}
    yield f"{order}, 300 sources", plan([stage(size=256, mixture=many)], order=order), HUNDREDS, [0, 255, 256]
    stages = [
        stage(size=64, mixture=two),
        stage(700, size=96, mixture={"web": 1, "code": 1, "math": 2}),  # in the middle of a block
        stage(3000, size=96, mixture={"math": 1}),
        stage(3001, size=5, mixture={"code": 3, "web": 1}),
    ]
    steps = [0, 699, 700, 701, 2999, 3000, 3001, 30_000, 10**8]
    yield f"{order}, four stages", plan(stages, order=order), THREE, steps


def exclusions(order: Any) -> Iterator[tuple[str, Document, ShardTokens, list[int]]]:
    """Yield plans that exclude a little, most, and more from stage to stage."""
    for name, ranges in (
        ("a little", [[80, 300], [5_000, 5_001]]),
        ("most", [[0, 97_000], [98_000, 100_001]]),
    ):
        document = plan([stage(size=16, exclude={"web": ranges})], order=order)
        yield f"{order}, exclude {name}", document, ONE_SHARD, [0, 1, 2, 100, 781, 782, 10**8]
    stages = [
        stage(size=16, exclude={"web": [[0, 4_000]]}),
        stage(
            20, size=16, mixture={"web": 1, "code": 1}, exclude={"web": [[6_000, 41_000]], "code": [[9, 99]]}
        ),
        stage(40, size=16, mixture={"code": 1}, exclude={"code": [[8_000, 30_000]]}),
    ]
    document = plan(stages, order=order)
    yield f"{order}, exclude more and more", document, THREE, [0, 19, 20, 21, 39, 40, 300, 10**8]


def all_together(order: Any) -> tuple[Document, ShardTokens]:
    """Return a plan with stages, exclusions and skipped steps, its first ones included."""
    stages = [
        stage(size=48, mixture={"web": 2, "code": 1}),
        stage(60, size=32, mixture={"math": 1, "web": 1}, exclude={"web": [[100, 2_000]]}),
        stage(140, size=48, mixture={"math": 1, "code": 5, "web": 1}, exclude={"math": [[0, 600]]}),
    ]
    skip_steps = [[0, 3], [53, 60], [135, 145], [10**6, 10**7]]
    return plan(stages, order=order, seed=42, skip_steps=skip_steps), THREE


def stage(from_step: int = 0, size: int = 6, **fields: Any) -> Document:
    """Return a stage; without a mixture of `web` alone."""
    return {"from_step": from_step, "global_batch_size": size, "mixture": {"web": 1}, **fields}


def plan(stages: list[Document], **fields: Any) -> Document:
    """Return a plan with windows of 9 tokens; the table says of which version."""
    return {"seq_len": 8, "stages": stages, **fields}


def sampler_of(case: Document) -> Sampler:
    """Return the sampler of a case of a table: its plan, bound to made-up fingerprints."""
    made = Plan.from_json(case["plan"])
    made = made.bind({name: f"sampled-{name}" for name in made.sources})
    if "shard_tokens" in case:
        return Sampler(made, case["shard_tokens"])
    packed = PackedCase(made.to_json(), case["documents"])
    if made.family is not None:
        made = made.changed(family=replace(made.family, documents=packed.ends_digests))
        packed = PackedCase(made.to_json(), case["documents"])
    if made.tabled is not None:
        packed = PackedCase(made.with_digests(packed.digests).to_json(), case["documents"])
    return packed.sampler


def rows(sampler: Sampler, step: int) -> Document:
    """Return the first and last rows of a step, and the SHA-256 of all as `<i8`.

    A window is its shard and start token. Another row is a list of pieces, each with its tokens; the SHA-256
    is then of the number of pieces of each row and of all pieces.
    """
    if sampler.is_window:
        located = sampler.locate(step)[0]
        shown, hashed = located.tolist(), [located]
    else:
        pieces = sampler.pieces(step, range(sampler.check_part(step))).without_empty()
        shown = [[list(piece) for piece in row] for row in rows_of(pieces)]
        hashed = [np.diff(pieces.borders), pieces.places]
    return {
        "step": step,
        "first": shown[:SHOWN_ROWS],
        "last": shown[-SHOWN_ROWS:],
        "sha256": hashlib.sha256(b"".join(each.astype("<i8").tobytes() for each in hashed)).hexdigest(),
    }


def table(version: int) -> Document:
    """Return the whole table of a version by name of the case."""
    made = {}
    for name, document, shards, steps in cases():
        if version > 1 and all(len(each["mixture"]) == 1 for each in document["stages"]):
            continue
        versioned = {"version": version, **document}
        field = "documents" if document.keys() & {"rows", "family"} else "shard_tokens"
        case = {"plan": versioned, field: shards}
        sampler = sampler_of(case)
        made[name] = {**case, "id": sampler.plan.id, "rows": [rows(sampler, step) for step in steps]}
    return made


def main() -> None:
    """Write the tables."""
    for version, path in TABLES.items():
        made = table(version)
        kept = json.loads(path.read_text()) if path.exists() else {}
        if changed := [name for name in kept if made.get(name) != kept[name]]:
            raise SystemExit(f"these rows are frozen and would change: {', '.join(changed)}")
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in made.items())
        path.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
