"""Corpora and plans of the golden rows that Megatron-Core made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from corpus_server.corpus_spec import CorpusSpec
from tests.corpora import spec, write_megatron
from tests.megatron_rows import Case

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "server" / "megatron_rows.json").read_text())
CASES = {name: case for name, case in GOLDEN.items() if name != "writer"}

THREE = Case(**CASES["three paths, two epochs"]["case"])


def names(case: Case) -> list[str]:
    """Return names whose order is not the blend's, since a plan's sources are sorted."""
    return [f"{chr(ord('z') - number)}-{number}" for number in range(len(case.lengths))]


def document(case: Case, batch_size: int = 1, **stage: Any) -> dict[str, Any]:
    order: dict[str, Any] = {"num_samples": case.num_samples, "blend": names(case), "split": list(case.split)}
    if case.weights is not None:
        order["weights"] = list(case.weights)
    mixture = dict(zip(names(case), case.weights or (1.0,), strict=True))
    return {
        "seq_len": case.seq_len,
        "seed": case.seed,
        "order": {"megatron": {**order, "part": case.part}},
        "stages": [{"global_batch_size": batch_size, "mixture": mixture, **stage}],
    }


def specs(case: Case, folder: Path) -> list[CorpusSpec]:
    """Write the corpora of a case, if they are not there, and return what names them."""
    found = []
    for number, name in enumerate(names(case)):
        path = folder / f"{name}.bin"
        if not path.exists():  # several catalogs share a folder, and what is served must not be written to
            documents = np.split(case.tokens(number), np.cumsum(case.lengths[number])[:-1])
            write_megatron(folder / name, [each.tolist() for each in documents], dtype="int32")
        found.append(spec(path, name))
    return found
