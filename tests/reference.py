"""The plan's arithmetic once more: plain integers, one row at a time, slow and easy to check by eye.

Written from the documents and not from the code: the network is Black and Rogaway's generalised
Feistel over a grid of height x width cells with cycle walking, the mixing function is splitmix64's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15
TWO64 = 2**64


def mix(value: int) -> int:
    """Splitmix64's output function."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % TWO64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % TWO64
    return value ^ (value >> 31)


def round_hash(value: int) -> int:
    """The upper 56 bits of splitmix64's output before its last xor-shift."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % TWO64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % TWO64
    return value >> 8


def splitmix(state: int, number: int) -> int:
    """The `number`-th output, from 1 on, of splitmix64 started at `state`."""
    return mix((state + number * GOLDEN) % TWO64)


def stream(purpose: str, seed: int, source: str) -> int:
    """Key of a stream: the first 8 bytes of a SHA-256, little-endian."""
    digest = hashlib.sha256(f"corpus-server/1/{purpose}/{seed}/{source}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def shuffled(position: int, size: int, key: int, epoch: int) -> int:
    """Where the keyed permutation of one epoch sends a position of [0, size)."""
    height = math.isqrt(size)
    if height * height < size:
        height += 1
    width = (size + height - 1) // height
    epoch_state = splitmix(key, epoch + 1)
    cell = position
    while True:
        row, column = divmod(cell, width)
        for number in range(1, ROUNDS + 1):
            key_of_round = splitmix(epoch_state, number)
            if number % 2:
                row = (row + round_hash(column ^ key_of_round)) % height
            else:
                column = (column + round_hash(row ^ key_of_round)) % width
        cell = row * width + column
        if cell < size:
            return cell


def drawn(counter: int, bound: int, key: int) -> int:
    """An unbiased draw from [0, bound) by counter: splitmix64 outputs, too large ones skipped."""
    state = splitmix(key, counter + 1)
    number = 1
    while (value := splitmix(state, number)) >= TWO64 - TWO64 % bound:
        number += 1
    return value % bound


def window_of_row(
    plan: Mapping[str, Any], shard_tokens: Sequence[int], step: int, row: int
) -> tuple[int, int]:
    """Return (shard, start) of one global row of a plan with one stage and one source.

    Args:
        plan: the plan's JSON, with `seq_len` and `stages`; the rest may be left out.
        shard_tokens: tokens of each shard.
        step, row: row in [0, global_batch_size).
    """
    (stage,) = plan["stages"]
    (source,) = stage["mixture"]
    order, seed, seq_len = plan.get("order", "shuffle"), plan.get("seed", 0), plan["seq_len"]
    stride = plan.get("stride") or (1 if order == "random" else seq_len)
    counts = [len(range(0, tokens - seq_len, stride)) for tokens in shard_tokens]
    total = sum(counts)
    position = step * stage["global_batch_size"] + row
    key = stream(order, seed, source)
    epoch, sample = divmod(position, total)
    if order == "shuffle":
        sample = shuffled(sample, total, key, epoch)
    elif order == "random":
        sample = drawn(position, total, key)
    shard = 0
    while sample >= counts[shard]:
        sample -= counts[shard]
        shard += 1
    return shard, sample * stride


def batch(
    plan: Mapping[str, Any],
    shards: Sequence[np.ndarray],
    step: int,
    *,
    count: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> np.ndarray:
    """Return the tokens `(count, rows, seq_len + 1)` of a rank, by plain slicing."""
    rows = plan["stages"][0]["global_batch_size"] // world_size
    lengths = [len(shard) for shard in shards]
    found = []
    for k in range(count):
        for row in range(rank * rows, (rank + 1) * rows):
            shard, start = window_of_row(plan, lengths, step + k, row)
            found.append(shards[shard][start : start + plan["seq_len"] + 1].tolist())
    return np.array(found).reshape(count, rows, plan["seq_len"] + 1)


def one_source(corpus: str, seq_len: int, batch_size: int, **fields: Any) -> dict[str, Any]:
    """Return the JSON of a plan over one corpus."""
    return {
        "seq_len": seq_len,
        "stages": [{"from_step": 0, "global_batch_size": batch_size, "mixture": {corpus: 1.0}}],
        **fields,
    }


def chi_square_p_value(observed: np.ndarray) -> float:
    """Return the p-value of counts under equal probabilities.

    By Wilson and Hilferty's approximation (PNAS 17, 1931): the cube root of chi-square over its
    degrees of freedom k is nearly normal with mean 1 - 2/(9k) and variance 2/(9k).
    """
    expected = observed.sum() / observed.size
    freedom = observed.size - 1
    chi_square = float(((observed - expected) ** 2).sum() / expected)
    variance = 2 / (9 * freedom)
    normal = ((chi_square / freedom) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)
    return 0.5 * math.erfc(normal / math.sqrt(2))
