"""Make the golden rows of order `olmo` with OLMo-core and OLMo themselves.

    python -m tests.olmo_rows > tests/server/olmo_rows.json

in an environment with `ai2-olmo-core==3.0.0` and `ai2-olmo==0.6.0` (and torch). The tests also call
`olmo_rows` where one of the two is installed, with cases by chance.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.megatron_rows import digest

CORE, FIRST = "olmo_core", "olmo"
"""OLMo-core's loader, and that of the first OLMo, which counts epochs from 0."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run over files in which every token differs from every other one."""

    lengths: tuple[int, ...]  # tokens of each file
    paths: tuple[int, ...]  # the files in the run's order, one maybe several times
    instance: int  # tokens of an instance
    batch_size: int  # instances
    seed: int
    num_epochs: int = 1
    world_size: int = 1
    target: int | None = None  # max_target_sequence_length
    package: str = CORE

    def tokens(self, file: int) -> NDArray[np.uint16]:
        """Return the tokens of a file: their number over all files."""
        first = sum(self.lengths[:file])
        return np.arange(first, first + self.lengths[file], dtype=np.uint16)


def some_case(seed: int, package: str = CORE) -> Case:
    """Return a case by chance: one to five files, mostly of several epochs, maybe a file twice."""
    random = np.random.default_rng(seed)
    num_files, world_size = int(random.integers(1, 6)), int(random.choice([1, 2, 4]))
    instance, each = int(random.integers(2, 9)), int(random.integers(1, 4))
    lengths = random.integers(0, 300, num_files)
    lengths[0] += 12 * each * world_size * instance  # so that there is a batch
    paths = np.concatenate((random.permutation(num_files), random.integers(0, num_files, 1)))
    return Case(
        lengths=tuple(lengths.tolist()),
        paths=tuple(paths[: num_files + int(random.integers(2))].tolist()),
        instance=instance,
        batch_size=each * world_size,
        seed=int(random.integers(2**40)),
        num_epochs=int(random.integers(1, 4)),
        world_size=world_size,
        target=instance * int(random.integers(1, 5)) if package == CORE and random.random() < 0.5 else None,
        package=package,
    )


def file_name(number: int) -> str:
    return f"part-{number:03d}.npy"


def write_files(case: Case, folder: Path) -> None:
    for number in range(len(case.lengths)):
        case.tokens(number).tofile(folder / file_name(number))


def olmo_rows(case: Case, folder: Path) -> NDArray[np.int64]:
    """Return the batches of each rank, as the package's own loader gives them.

    `(ranks, batches, rows, tokens)`.
    """
    write_files(case, folder)
    make = _of_core if case.package == CORE else _of_first
    ranks = [
        [batch for epoch in range(case.num_epochs) for batch in make(case, folder, rank, epoch)]
        for rank in range(case.world_size)
    ]
    return np.array(ranks, dtype=np.int64)


def _of_core(case: Case, folder: Path, rank: int, epoch: int) -> Iterator[list[list[int]]]:
    from olmo_core.data import DataCollator, NumpyFSLDataset
    from olmo_core.data.data_loader import NumpyDataLoaderBase

    dataset = NumpyFSLDataset(
        *(folder / file_name(number) for number in case.paths),
        sequence_length=case.instance,
        max_target_sequence_length=case.target,
        pad_token_id=0,
        eos_token_id=0,
        vocab_size=2**16,
    )
    loader = NumpyDataLoaderBase.wrap_numpy_dataset(
        dataset,
        global_batch_size=case.batch_size * case.instance,
        collator=DataCollator(pad_token_id=0),
        work_dir=folder,
        seed=case.seed,
        dp_world_size=case.world_size,
        dp_rank=rank,
        num_threads=0,
    )
    loader.reshuffle(epoch + 1, in_memory=True)
    for batch in loader:
        yield batch["input_ids"].tolist()
    loader.reset()


def _of_first(case: Case, folder: Path, rank: int, epoch: int) -> Iterator[list[list[int]]]:
    import torch
    from olmo.data import IterableDataset, MemMapDataset

    own = MemMapDataset(*(folder / file_name(number) for number in case.paths), chunk_size=case.instance)
    # Where the length is known, as it is here, OLMo asks for no credentials of a store.
    own._mmap_offsets = _offsets(case)
    dataset = IterableDataset(
        own,
        case.batch_size,
        seed=case.seed,
        epoch=epoch,
        drop_last=True,
        world_size=case.world_size,
        rank=rank,
        fs_local_rank=0,
        num_threads=0,
    )
    rows = case.batch_size // case.world_size
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=rows, drop_last=True, collate_fn=lambda its: [each["input_ids"] for each in its]
    )
    for batch in loader:
        yield [tokens.tolist() for tokens in batch]


def _offsets(case: Case) -> list[tuple[int, int]]:
    ends = np.cumsum([0, *(case.lengths[number] // case.instance for number in case.paths)]).tolist()
    return list(pairwise(ends))


GOLDEN: dict[str, Case] = {
    "an epoch, the last instances left out": Case(
        lengths=(10, 7), paths=(0, 1), instance=3, batch_size=2, seed=0
    ),
    "three epochs over two ranks": Case(
        lengths=(200, 31, 3, 90),
        paths=(0, 1, 2, 3),
        instance=4,
        batch_size=6,
        seed=34521,
        num_epochs=3,
        world_size=2,
    ),
    "files in another order, one twice": Case(
        lengths=(100, 60, 80), paths=(2, 0, 1, 0), instance=5, batch_size=4, seed=7, num_epochs=2
    ),
    "instances that stay together": Case(
        lengths=(150, 90, 20),
        paths=(0, 1, 2),
        instance=4,
        batch_size=4,
        seed=2**40,
        num_epochs=2,
        world_size=4,
        target=12,
    ),
    "the first OLMo": Case(
        lengths=(200, 100),
        paths=(0, 1),
        instance=4,
        batch_size=8,
        seed=6198,
        num_epochs=2,
        world_size=4,
        package=FIRST,
    ),
}


def main(arguments: Sequence[str] = ()) -> None:
    """Print the golden rows as JSON: a digest of all, and the first ones for people."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, case in GOLDEN.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = olmo_rows(case, Path(folder))
        first = rows[0, 0, :2].tolist()
        found[name] = {"case": asdict(case), "shape": rows.shape, "sha256": digest(rows), "first": first}
    packages = [f"{name} {version(name)}" for name in ("ai2-olmo-core", "ai2-olmo", "numpy")]
    lines = [f'"writer": "{", ".join(packages)}"']
    lines += [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in found.items()]
    print("{" + ",\n".join(lines) + "}")


if __name__ == "__main__":
    main(sys.argv[1:])
