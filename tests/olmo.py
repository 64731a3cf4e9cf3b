"""Corpora and plans of the golden rows that OLMo-core and OLMo made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corpus_server.corpus_spec import CorpusSpec
from tests.corpora import spec
from tests.olmo_rows import FIRST, Case, write_files

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "server" / "olmo_rows.json").read_text())
CASES = {name: case for name, case in GOLDEN.items() if name != "writer"}


def case_of(name: str) -> Case:
    said = CASES[name]["case"]
    return Case(**{**said, "lengths": tuple(said["lengths"]), "paths": tuple(said["paths"])})


def document(case: Case, **stage: Any) -> dict[str, Any]:
    order: dict[str, Any] = {"num_epochs": case.num_epochs}
    if case.package == FIRST:
        order["first_epoch"] = 0
    if case.target is not None:
        order["max_target_sequence_length"] = case.target
    if case.paths != tuple(range(len(case.lengths))):
        order["shards"] = list(case.paths)
    return {
        "seq_len": case.instance - 1,
        "seed": case.seed,
        "order": {"olmo": order},
        "stages": [{"global_batch_size": case.batch_size, "mixture": {"web": 1}, **stage}],
    }


def specs(case: Case, folder: Path) -> list[CorpusSpec]:
    """Write the corpus of a case, if it is not there, and return what names it."""
    files = folder / "web"
    if not files.exists():
        files.mkdir()
        write_files(case, files)
    return [spec(files, "web")]
