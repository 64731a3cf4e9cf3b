"""What a build keeps of its input records beside the tokens: the metadata of the documents.

A part leaves the kept fields of its documents in `000012.SPLIT.kept`, in their order. They become the files
of `OUT/documents` when the shards are known: a document that is cut has a row for each of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.formats.layout import Ends
from corpus_server.corpus.metadata.files import files_in
from corpus_server.corpus.metadata.pieces import tables
from corpus_server.corpus.metadata.table import python_rows
from corpus_server.corpus.metadata.write import GROUP_ROWS, write_files
from corpus_server.corpus.selection import METADATA_FOLDER
from corpus_server.extras import optional_package

_NESTED: Final = "metadata"  # where datatrove and Dolma put all fields but `id` and `source`

Kept = tuple[Any, ...]


def kept_fields(record: Mapping[str, Any], keep: Sequence[str]) -> Kept:
    """Return the kept fields of a record, which may lie in its field `metadata`; None for what it lacks."""
    nested = record.get(_NESTED)
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    return tuple(record[name] if name in record else inner.get(name) for name in keep)


def columns_to_read(names: Sequence[str], keep: Sequence[str]) -> list[str]:
    """Return those columns of a file that the kept fields lie in."""
    return [name for name in names if name in keep or (name == _NESTED and not {*keep} <= {*names})]


def kept_rows(batch: Any, keep: Sequence[str]) -> list[Kept]:
    """Return the kept fields of each row of a record batch."""
    names = columns_to_read(batch.schema.names, keep)
    return [kept_fields(row, keep) for row in python_rows(batch.select(names))]


def write_metadata(ends: Iterable[Ends], kept: Sequence[Path], folder: Path, cuts: Iterable[int]) -> None:
    """Write the metadata of a corpus into its folder; files that are there already stay.

    Args:
        ends: of all documents, some at a time.
        kept: the files of the parts.
        cuts: where shards end.
    """
    write_files(folder / METADATA_FOLDER, _taken(tables(kept), _row_numbers(ends, cuts)))


def _row_numbers(ends: Iterable[Ends], cuts: Iterable[int]) -> Iterator[NDArray[np.int64]]:
    """Yield which document of the input each document of the corpus is, ascending, some at a time."""
    inner = np.fromiter(cuts, np.uint64)
    start, first = np.uint64(0), 0
    for some in ends:
        starts = np.concatenate([[start], some[:-1]])
        num_cuts = inner.searchsorted(some, "left") - inner.searchsorted(starts, "right")
        yield np.arange(first, first + some.size).repeat(num_cuts + 1)
        start, first = some[-1], first + some.size


def _taken(rows: Iterator[Any], numbers: Iterator[NDArray[np.int64]]) -> Iterator[Any]:
    """Yield rows by their numbers, which are ascending."""
    arrow = optional_package("pyarrow", extra="build", purpose="metadata of documents")
    held: list[Any] = []
    first = stop = 0  # of the rows that are held
    for some in numbers:
        for begin in range(0, some.size, GROUP_ROWS):
            wanted = some[begin : begin + GROUP_ROWS]
            while stop <= wanted[-1]:
                held.append(next(rows))
                stop += len(held[-1])
            while first + len(held[0]) <= wanted[0]:
                first += len(held.pop(0))
            yield arrow.concat_tables(held).take(arrow.array(wanted - first))


def columns_without_values(folder: Path) -> list[str]:
    """Return the columns of a corpus's metadata that are null for all documents: are they named right?"""
    parquet = optional_package("pyarrow.parquet", extra="build", purpose="metadata of documents")
    missing: dict[str, bool] = {}
    for path in files_in(folder / METADATA_FOLDER):
        footer = parquet.read_metadata(path)
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                has_none = column.statistics is not None and column.statistics.null_count == group.num_rows
                name = column.path_in_schema
                missing[name] = missing.get(name, True) and has_none
    return [name for name, is_missing in missing.items() if is_missing]
