"""Corpora and plans of the golden rows that GPT-NeoX made: those of Megatron's, in order `neox`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import megatron
from tests.megatron_rows import Case

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "server" / "neox_rows.json").read_text())
CASES = {name: case for name, case in GOLDEN.items() if name != "writer"}


def document(case: Case, batch_size: int = 1, **stage: Any) -> dict[str, Any]:
    made = megatron.document(case, batch_size, **stage)
    return {**made, "order": {"neox": made["order"]["megatron"]}}
