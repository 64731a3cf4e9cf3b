"""Make the golden rows of order `megatron` with Megatron-Core itself.

    python -m tests.megatron_rows > tests/server/megatron_rows.json

in an environment with `megatron-core==0.16.1` (and torch). The tests also call `megatron_rows` where
Megatron-Core is installed, with cases by chance.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A blend whose every token differs from every other one."""

    lengths: tuple[tuple[int, ...], ...]  # of the sequences of each path
    weights: tuple[float, ...] | None
    seq_len: int
    num_samples: int
    seed: int
    split: tuple[float, ...] = (1.0, 0.0, 0.0)
    part: str = "train"

    def tokens(self, path: int) -> NDArray[np.int32]:
        """Return the tokens of a path: their number over all paths."""
        first = sum(map(sum, self.lengths[:path]))
        return np.arange(first, first + sum(self.lengths[path]), dtype=np.int32)


def some_case(seed: int) -> Case:
    """Return a case by chance: one to four paths, mostly of several epochs."""
    random = np.random.default_rng(seed)
    paths = int(random.integers(1, 5))
    # Megatron never ends where a part of the split has no tokens.
    split = ((1.0, 0.0, 0.0), (8.0, 1.0, 1.0), (3.0, 1.0))[int(random.integers(3))]
    least, most = (0, 40) if split[1] == 0 else (1, 40)
    lengths = tuple(
        (*random.integers(least, most, int(random.integers(20, 60))).tolist(), 9) for _ in range(paths)
    )
    weights = tuple(np.round(random.random(paths) + 0.01, int(random.integers(1, 4))) + 0.01)
    return Case(
        lengths=lengths,
        weights=None if paths == 1 and random.random() < 0.5 else tuple(map(float, weights)),
        seq_len=int(random.integers(1, 24)),
        num_samples=int(random.integers(1, 3000)),
        seed=int(random.integers(2**32)),
        split=split,
    )


def megatron_rows(case: Case, folder: Path) -> NDArray[np.int64]:
    """Return the rows of Megatron-Core's dataset: `(num_samples, seq_len + 1) int64`."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    class Tokenizer:
        vocab_size, eod, pad, special_tokens_dict = 2**31 - 1, 2**31 - 2, -1, {"eod": 2**31 - 2}
        unique_identifiers: dict[str, Any] = {}  # noqa: RUF012

    for number, lengths in enumerate(case.lengths):
        builder = IndexedDatasetBuilder(f"{folder}/{number}.bin", dtype=np.int32)
        for tokens in np.split(case.tokens(number), np.cumsum(lengths)[:-1]):
            builder.add_document(tokens, [tokens.size])
        builder.finalize(f"{folder}/{number}.idx")
    config = GPTDatasetConfig(
        random_seed=case.seed,
        sequence_length=case.seq_len,
        blend=([f"{folder}/{n}" for n in range(len(case.lengths))], case.weights and list(case.weights)),
        split=",".join(map(str, case.split)),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=Tokenizer(),
    )
    sizes = [case.num_samples] * 3
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[
        PARTS.index(case.part)
    ]
    rows = [dataset[row] for row in range(case.num_samples)]
    return np.array([[*each["tokens"].tolist(), int(each["labels"][-1])] for each in rows], dtype=np.int64)


def digest(rows: NDArray[np.int64]) -> str:
    """Return the SHA-256 of rows."""
    return hashlib.sha256(np.ascontiguousarray(rows, dtype="<i8").tobytes()).hexdigest()


def _documents(seed: int, *counts: int) -> tuple[tuple[int, ...], ...]:
    random = np.random.default_rng(seed)
    return tuple(tuple(random.integers(1, 60, count).tolist()) for count in counts)


GOLDEN: dict[str, Case] = {
    "one path, less than an epoch": Case(
        lengths=_documents(1, 50), weights=None, seq_len=16, num_samples=60, seed=1234
    ),
    "one path, two epochs, the last by itself": Case(
        lengths=_documents(2, 50), weights=None, seq_len=16, num_samples=120, seed=7
    ),
    "one path, two epochs together": Case(
        lengths=_documents(2, 50), weights=None, seq_len=16, num_samples=172, seed=7
    ),
    "one path with a weight": Case(
        lengths=_documents(3, 40), weights=(1.0,), seq_len=8, num_samples=290, seed=5
    ),
    "three paths, two epochs": Case(
        lengths=_documents(4, 60, 50, 40), weights=(0.5, 0.3, 0.2), seq_len=16, num_samples=400, seed=42
    ),
    "many rows of unequal weights": Case(
        lengths=_documents(5, 30, 20, 30),
        weights=(30.0, 69.9, 0.1),
        seq_len=4,
        num_samples=5000,
        seed=2**32 - 1,
    ),
    "equal weights": Case(
        lengths=_documents(6, 30, 30, 30), weights=(1.0, 1.0, 1.0), seq_len=8, num_samples=300, seed=0
    ),
    # Megatron divides weights by their sum twice; the second time changes last bits, and so rows 12 and 13.
    "weights whose last bits count": Case(
        lengths=_documents(8, 30, 30, 30), weights=(0.9, 1.0, 0.2), seq_len=8, num_samples=300, seed=5
    ),
    "validation": Case(
        lengths=_documents(7, 300, 200),
        weights=(2.0, 1.0),
        seq_len=8,
        num_samples=100,
        seed=11,
        split=(90.0, 9.0, 1.0),
        part="valid",
    ),
}


def main(arguments: Sequence[str] = ()) -> None:
    """Print the golden rows as JSON: a digest of all, and the first ones for people."""
    warnings.simplefilter("ignore")
    found = {}
    for name, case in GOLDEN.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = megatron_rows(case, Path(folder))
        found[name] = {"case": asdict(case), "sha256": digest(rows), "first": rows[:2].tolist()}
    from megatron.core import __version__

    lines = [f'"writer": "megatron-core {__version__}"']
    lines += [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in found.items()]
    print("{" + ",\n".join(lines) + "}")


if __name__ == "__main__":
    main(sys.argv[1:])
