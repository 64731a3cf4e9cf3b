"""Random plans over everything that docs/arithmetic.md defines, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import Any, Final

import numpy as np

from corpus_server.errors import InvalidPlan
from corpus_server.plan import Plan, Sampler
from tests.packed import PackedCase
from tests.plans import EPOCH_ORDERS, NO_EPOCH_ORDERS, PLAIN_ORDERS, STRIDES, bounded
from tests.second import SecondPlan

PLANS: Final = 1000
PLANS_A_TEST: Final = 50
ORDER_KINDS: Final = ("shuffle", *PLAIN_ORDERS, "bounded", "bounded", "bounded")


class Draw(Random):
    """The random numbers of a seed, where orders are dealt out to the seeds in turn.

    So how many plans have an order follows from the number of orders, and not from chance: a further order
    makes the others rarer, and there is room for eight more.

    Attributes:
        round: how often all orders were dealt out before.
        order_kind: the one whose turn it is.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.round, place = divmod(seed, len(ORDER_KINDS))
        self.order_kind = ORDER_KINDS[place]


def fingerprints(plan: SecondPlan) -> dict[str, str]:
    return {name: f"sampled-{name}" for name in plan.sources}


def rows_of(plan: SecondPlan, step: int) -> list[tuple[int, int]]:
    return [plan.located(step, row) for row in range(plan.global_batch_size(step))]


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


def draw_order(random: Draw) -> Any:
    if random.order_kind != "bounded":
        return random.order_kind
    return bounded(random.choice((1, 2, 7, 100, 5000)), random.choice((1, 2, 3, 8, 600)))


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
    random: Draw, draw_shards: Callable[[Random, int], list[int]] = draw_shards
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


def accepted_plan(random: Draw) -> tuple[dict[str, Any], dict[str, list[int]], Sampler]:
    """Return a random plan that the server accepts."""
    while True:
        document, shard_tokens = draw_plan(random)
        try:
            return document, shard_tokens, sampler_of(document, shard_tokens)
        except InvalidPlan:
            continue


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


def draw_packed_plan(random: Draw) -> PackedCase:
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


def accepted_case(random: Draw, draw: Callable[[Draw], PackedCase]) -> PackedCase:
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
