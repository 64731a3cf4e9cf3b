"""Make the golden rows of order `neox` with GPT-NeoX's own datasets.

    git clone --branch v1.0 https://github.com/EleutherAI/gpt-neox
    python -m tests.neox_rows gpt-neox v1.0 tests/server/neox_rows.json

in an environment with torch, pybind11 and a C++ compiler. GPT-NeoX is no package that can be installed, and
needs GPUs. So its modules of datasets are loaded by themselves, beside a `megatron` that says that this
process is the only one. The tests also call `neox_rows` where CORPUS_GPT_NEOX names such a folder, with cases
by chance.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.megatron_rows import PARTS, Case, digest


def some_case(seed: int) -> Case:
    """Return a case by chance: one to four paths, mostly of several epochs; a single one may be split."""
    random = np.random.default_rng(seed)
    paths = int(random.integers(1, 5))
    is_split = paths == 1 and random.random() < 0.7
    split = ((1.0, 0.0, 0.0), (8.0, 1.0, 1.0), (3.0, 1.0), (969.0, 30.0, 1.0))[
        int(random.integers(4)) if is_split else 0
    ]
    lengths = tuple(
        (*random.integers(0 if split[1] == 0 else 1, 40, int(random.integers(20, 60))).tolist(), 9)
        for _ in range(paths)
    )
    weights = tuple(np.round(random.random(paths) + 0.01, int(random.integers(1, 4))) + 0.01)
    return Case(
        lengths=lengths,
        weights=None if is_split else tuple(map(float, weights)),
        seq_len=int(random.integers(2, 24)),
        num_samples=int(random.integers(1000, 3000)),
        seed=int(random.integers(2**32)),
        split=split,
    )


@functools.cache
def _modules(source: Path) -> tuple[ModuleType, ModuleType, ModuleType]:
    """Return GPT-NeoX's `gpt2_dataset`, `blendable_dataset` and `data_utils`, with its compiled helpers."""
    import pybind11
    import torch

    helpers = Path(tempfile.mkdtemp()) / f"helpers{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{each}" for each in (sysconfig.get_path("include"), pybind11.get_include())]
    code = source / "megatron" / "data" / "helpers.cpp"
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++17", *includes, code, "-o", helpers], check=True)
    alone = SimpleNamespace(get_io_parallel_group=lambda: None)
    names = ("megatron", "megatron.mpu", "megatron.data")
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules["megatron"].__dict__.update(mpu=alone, print_rank_0=lambda *_: None)
    for name in ("indexed_dataset", "samplers", "pairwise_dataset", "online_dataset"):
        stub = ModuleType(f"megatron.data.{name}")
        stub.__getattr__ = lambda name: None  # type: ignore[method-assign]
        sys.modules[stub.__name__] = stub
    torch.distributed.get_rank = lambda group=None: 0
    torch.distributed.get_world_size = lambda group=None: 1
    torch.distributed.all_reduce = lambda *_, **__: None
    torch.cuda.LongTensor = torch.LongTensor
    loaded = []
    for name, path in (
        ("helpers", helpers),
        *(
            (each, source / "megatron" / "data" / f"{each}.py")
            for each in ("gpt2_dataset", "blendable_dataset", "data_utils")
        ),
    ):
        spec = importlib.util.spec_from_file_location(f"megatron.data.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        setattr(sys.modules["megatron.data"], name, module)
        spec.loader.exec_module(module)
        loaded.append(module)
    return loaded[1], loaded[2], loaded[3]


class _Indexed:
    """Documents as GPT-NeoX's indexed dataset has them."""

    def __init__(self, case: Case, path: int) -> None:
        self.sizes = np.array(case.lengths[path], dtype=np.int32)
        self._tokens = np.split(case.tokens(path), np.cumsum(case.lengths[path])[:-1])

    def get(self, number: int, offset: int = 0, length: int | None = None) -> NDArray[np.int32]:
        return self._tokens[number][offset : None if length is None else offset + length]


def neox_rows(case: Case, source: Path, folder: Path) -> NDArray[np.int64]:
    """Return the rows that GPT-NeoX's datasets give, `(rows, seq_len + 1)`, as many as a loader takes.

    Without weights the case is `data_path` with a split, otherwise `train_data_paths`.
    """
    with redirect_stdout(sys.stderr):
        gpt2, blendable, utils = _modules(source)
        given = inspect.signature(gpt2.GPT2Dataset).parameters

        def dataset(path: int, documents: NDArray[np.int32], num_samples: int) -> Any:
            fields: dict[str, Any] = {
                "name": f"train_{path}",
                "data_prefix": str(folder / str(path)),
                "documents": documents,
                "indexed_dataset": _Indexed(case, path),
                "num_samples": num_samples,
                "num_epochs": None,
                "seq_length": case.seq_len,
                "seed": case.seed,
            }
            return gpt2.GPT2Dataset(**{name: value for name, value in fields.items() if name in given})

        if case.weights is None:
            split, part = ",".join(map(str, case.split)), PARTS.index(case.part)
            bounds = utils.get_train_valid_test_split_(split, len(case.lengths[0]))
            found = dataset(0, np.arange(*bounds[part : part + 2], dtype=np.int32), case.num_samples)
        else:
            weights, wanted = utils.get_normalized_weights_and_num_samples(
                list(case.weights), case.num_samples
            )
            every = [
                dataset(path, np.arange(len(case.lengths[path]), dtype=np.int32), number)
                for path, number in enumerate(wanted)
            ]
            found = blendable.BlendableDataset(every, weights)
        rows = [found[row]["text"] for row in range(min(case.num_samples, len(found)))]
    return np.array(rows, dtype=np.int64)


def _documents(seed: int, *counts: int) -> tuple[tuple[int, ...], ...]:
    random = np.random.default_rng(seed)
    return tuple(tuple(random.integers(1, 60, count).tolist()) for count in counts)


GOLDEN: dict[str, Case] = {
    "Pythia's: one path, an epoch and a half": Case(
        lengths=_documents(1, 300), weights=(1.0,), seq_len=16, num_samples=800, seed=1234
    ),
    "one path, split": Case(
        lengths=_documents(2, 201), weights=None, seq_len=8, num_samples=900, seed=7, split=(969.0, 30.0, 1.0)
    ),
    "validation": Case(
        lengths=_documents(3, 333),
        weights=None,
        seq_len=8,
        num_samples=300,
        seed=11,
        split=(8.0, 1.0, 1.0),
        part="valid",
    ),
    "the last sample is not given": Case(
        lengths=((9, 8),), weights=None, seq_len=4, num_samples=4, seed=2**32 - 1
    ),
    "three paths": Case(
        lengths=_documents(4, 60, 50, 40), weights=(0.5, 0.3, 0.2), seq_len=16, num_samples=2000, seed=42
    ),
    "many paths, whose weights round otherwise": Case(
        lengths=_documents(5, *[12] * 11),
        weights=(0.1, 0.7, 0.3, 1.9, 0.2, 0.9, 0.6, 0.35, 1.1, 0.45, 2.3),
        seq_len=5,
        num_samples=6000,
        seed=5,
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Write the golden rows as JSON: a digest of all, and the first ones for people.

    GPT-NeoX's helpers print to standard output.
    """
    warnings.simplefilter("ignore")
    source, version, written = arguments
    found = {}
    for name, case in GOLDEN.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = neox_rows(case, Path(source), Path(folder))
        found[name] = {
            "case": asdict(case),
            "num_rows": len(rows),
            "sha256": digest(rows),
            "first": rows[:2].tolist(),
        }
    lines = [f'"writer": "GPT-NeoX {version}, numpy {np.__version__}"']
    lines += [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in found.items()]
    Path(written).write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
