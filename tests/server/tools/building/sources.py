"""Input files of every kind for tests of `build`, and builds in this process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import zstandard

from corpus_server.tools.building.driver import build, choose_options
from corpus_server.tools.building.job import Job, Part
from corpus_server.tools.building.manifest import Manifest
from corpus_server.tools.building.part import PartResult, build_part

WORDS = ("Grüße", "世界", "x ** 2", "\n\n", "  ", "the", "of", "\t#", "🦆")


def texts(count: int, *, seed: int = 0, most_words: int = 40) -> list[str]:
    """Return different texts of several lengths and scripts."""
    draw = np.random.default_rng(seed)
    return [
        f"{number} " + " ".join(draw.choice(WORDS, size=draw.integers(0, most_words)))
        for number in range(count)
    ]


def lines(rows: Sequence[object], field: str = "text") -> bytes:
    return b"".join(json.dumps({"n": 1, field: row}).encode() + b"\n" for row in rows)


def write_jsonl(path: Path, rows: Sequence[object], field: str = "text") -> Path:
    path.write_bytes(lines(rows, field))
    return path


def write_gzip(path: Path, rows: Sequence[object], field: str = "text") -> Path:
    # Two members, as `cat a.gz b.gz` makes them.
    half = len(rows) // 2
    path.write_bytes(gzip.compress(lines(rows[:half], field)) + gzip.compress(lines(rows[half:], field)))
    return path


def write_zstandard(path: Path, rows: Sequence[object], field: str = "text") -> Path:
    half = len(rows) // 2
    frames = (zstandard.compress(lines(some, field)) for some in (rows[:half], rows[half:]))
    path.write_bytes(b"".join(frames))
    return path


def table(rows: Sequence[object], field: str) -> pa.Table:
    return pa.table({"n": list(range(len(rows))), field: list(rows)})


def write_parquet(path: Path, rows: Sequence[object], field: str = "text") -> Path:
    pa.parquet.write_table(table(rows, field), path, row_group_size=7)
    return path


def write_feather(path: Path, rows: Sequence[object], field: str = "text") -> Path:
    pa.feather.write_feather(table(rows, field), str(path), compression="lz4", chunksize=5)
    return path


def write_arrow_stream(path: Path, rows: Sequence[object], field: str = "text") -> Path:
    """Write the layout that `datasets` keeps on disk."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table(rows, field).schema) as writer:
        writer.write_table(table(rows, field), max_chunksize=4)
    return path


WRITERS: dict[str, Callable[..., Path]] = {
    "a.jsonl": write_jsonl,
    "a.json": write_jsonl,
    "a.jsonl.gz": write_gzip,
    "a.json.zst": write_zstandard,
    "a.parquet": write_parquet,
    "a.feather": write_feather,
    "a.arrow": write_arrow_stream,
}


def in_this_process(job: Job, parts: Sequence[Part], folder: Path) -> Iterator[PartResult]:
    """A `RunParts` without processes; the last part comes first, because order must not count."""
    return (build_part(job.options, part, folder) for part in reversed(parts))


def build_here(
    sources: Sequence[Path], out: Path, *, fresh: bool = False, **options: Any
) -> dict[str | None, Manifest]:
    chosen = choose_options(**{"tokenizer": None, "eot": None, **options})
    return build([str(source) for source in sources], out, chosen, in_this_process, fresh=fresh).corpora


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder with their bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
