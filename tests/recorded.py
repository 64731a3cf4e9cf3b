"""Parts of recordings, written without the client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

PLAN_ID = "0" * 64


class Record(NamedTuple):
    """The loss of a row."""

    step: int
    row: int
    source: str
    loss: float


def write_part(
    folder: Path, records: list[Record], *, number: int = 0, described: str = "", **session: Any
) -> Path:
    """Write a part of these records; `session` is what its metadata say of it, `described` their text."""
    said = {"version": 1, "plan": PLAN_ID, "rank": 0, "world_size": 1, "first_step": 0, "began": 0, **session}
    said.setdefault("sources", sorted({record.source for record in records}))
    columns = dict(zip(Record._fields, map(list, zip(*records, strict=True)), strict=True))
    table = pyarrow.table(
        {
            "step": pyarrow.array(columns["step"], "int64"),
            "row": pyarrow.array(columns["row"], "int32"),
            "source": pyarrow.array(columns["source"]).dictionary_encode(),
            "loss": pyarrow.array(columns["loss"], "float32"),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{max(0, said['rank']):05}-part-{number:06}.parquet"
    described = described or json.dumps(said)
    parquet.write_table(table.replace_schema_metadata({"corpus-losses": described}), path)
    return path
