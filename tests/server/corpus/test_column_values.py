"""What stands for the values of a column of metadata, against one value after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus_server.corpus.metadata.table import DocumentTable
from corpus_server.corpus.metadata.values import hashed_values
from tests.second import numbers_by

TEXTS = [None if n % 7 == 3 else f"{n * n % 50}.org" for n in range(600)]
LONG = [f"{n:04}" * 800 for n in range(1500)]  # of a row group larger than a dictionary may get
NUMBERS = [None if n % 11 == 5 else n * n % 13 - 4 for n in range(300)]


def hashes_of(folder: Path, files: Sequence[Any], **options: Any) -> list[int]:
    """The hashes of column `site` over some files of metadata."""
    paths = [folder / f"{number}.parquet" for number in range(len(files))]
    for path, columns in zip(paths, files, strict=True):
        pq.write_table(pa.table(columns), path, **options)
    count = sum(len(pa.table(each)) for each in files)
    with DocumentTable(paths, count) as table:
        return [int(each) for each in hashed_values(table, "site")]


@pytest.mark.parametrize("row_group_size", [64, 10**6])
@pytest.mark.parametrize(
    "values",
    [TEXTS, LONG, NUMBERS, [True, None, False] * 5, [None] * 9, pa.array(TEXTS).dictionary_encode()],
    ids=["texts", "long texts", "numbers", "booleans", "nulls", "coded"],
)
def test_a_column_is_hashed_value_by_value(tmp_path: Path, values: Any, row_group_size: int) -> None:
    found = hashes_of(
        tmp_path, [{"site": values, "other": range(len(values))}], row_group_size=row_group_size
    )
    assert found == numbers_by(values.to_pylist() if isinstance(values, pa.Array) else values)


def test_files_of_other_types_and_without_the_column_count_on(tmp_path: Path) -> None:
    """The number of a text's digits is that text; documents without a value have their own numbers."""
    files = [{"site": TEXTS}, {"site": NUMBERS}, {"other": [0.5] * 40}, {"site": ["7", "8"]}]
    found = hashes_of(tmp_path, files, row_group_size=64)
    assert found == numbers_by([*TEXTS, *NUMBERS, *[None] * 40, "7", "8"])
