"""Write metadata: columns whose types were found piece by piece -> Parquet files of one schema.

The bytes depend on the rows alone: neither on the pieces in which they come nor on interruptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final

from corpus_server.corpus.publish import publishing
from corpus_server.extras import optional_package

GROUP_ROWS: Final = 1 << 14
MAX_COLUMNS: Final = 4096
"""Of 100,000, every document shown took 10 s and 1.5 GB."""
"""Rows of a row group, the least that a reader of one row decodes: about a millisecond a column."""
FILE_ROWS: Final = 1 << 22
"""Rows of a file, which is what an interruption costs."""

EXACT: Final = 1 << 53
"""Whole numbers up to here are floating-point numbers, too. Others become text beside such numbers."""

_PURPOSE: Final = "metadata of documents"


def write_files(folder: Path, tables: Iterable[Any]) -> int:
    """Write tables of one schema, one after another, as the files of a folder; those that exist stay.

    Returns:
        The number of rows.
    """
    parquet = optional_package("pyarrow.parquet", extra="build", purpose=_PURPOSE)
    groups, num_rows = regrouped(tables), 0
    folder.mkdir(exist_ok=True)
    for number in count():
        path, more = folder / f"{number:06}.parquet", islice(groups, FILE_ROWS // GROUP_ROWS)
        if (first := next(more, None)) is None:
            return num_rows
        its = chain([first], more)
        if path.exists():
            num_rows += sum(len(each) for each in its)
            continue
        with (
            publishing(path) as file,
            parquet.ParquetWriter(file, first.schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for each in its:
                writer.write_table(each, row_group_size=GROUP_ROWS)
                num_rows += len(each)
    raise AssertionError  # `count` has no end


def regrouped(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield the same rows in tables of `GROUP_ROWS`, but for the last one."""
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    pending: list[Any] = []
    num_pending = 0
    for table in tables:
        pending.append(table)
        num_pending += len(table)
        if num_pending >= GROUP_ROWS:
            whole = arrow.concat_tables(pending)
            stop = num_pending - num_pending % GROUP_ROWS
            for first in range(0, stop, GROUP_ROWS):
                yield whole.slice(first, GROUP_ROWS).combine_chunks()
            pending, num_pending = [whole.slice(stop)], num_pending - stop
    if num_pending:
        yield arrow.concat_tables(pending).combine_chunks()


def record_batch(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """Return rows of Python's values as a record batch."""
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    return arrow.record_batch([column([row[n] for row in rows]) for n in range(len(names))], [*names])


def column(values: list[Any]) -> Any:
    """Return a column of Python's values: of one type, if they have one, numbers or else text.

    Lists and objects become JSON text, so that records of one field need not have the same keys.
    """
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    if any(isinstance(value, list | dict | tuple) for value in values):
        return arrow.array(map(_text, values), arrow.string())
    with suppress(arrow.ArrowException, OverflowError):
        return arrow.array(values)
    with suppress(OverflowError):
        kinds = {type(value) for value in values}
        is_exact = all(type(value) is not int or abs(value) <= EXACT for value in values)
        if is_exact and float in kinds and kinds <= {int, float, type(None)}:
            return arrow.array(None if value is None else float(value) for value in values)
    return arrow.array(map(_text, values), arrow.string())


def common_schema(schemas: Iterable[Any]) -> Any:
    """Return the schema that the rows of several have: a column of different types becomes text."""
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    fields: dict[str, Any] = {}
    for schema in schemas:
        for field in schema:
            fields[field.name] = _common(arrow, fields.get(field.name, arrow.null()), field.type)
    # A column without a value anywhere has a type, too.
    return arrow.schema(
        (name, arrow.string() if arrow.types.is_null(its) else its) for name, its in fields.items()
    )


def _common(arrow: Any, one: Any, other: Any) -> Any:
    if arrow.types.is_dictionary(other):
        other = other.value_type
    both = [arrow.schema([("column", each)]) for each in (one, other)]
    try:
        return arrow.unify_schemas(both, promote_options="permissive").field(0).type
    except arrow.ArrowException:
        return arrow.string()


def conform(batch: Any, schema: Any) -> Any:
    """Return the rows of a record batch as a table of a schema; a column that it lacks is null."""
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    columns, names = [], frozenset(batch.schema.names)
    for field in schema:
        if field.name not in names:
            columns.append(arrow.nulls(batch.num_rows, field.type))
            continue
        its = batch.column(field.name)
        try:
            columns.append(its.cast(field.type, safe=False))
        except arrow.ArrowException:
            columns.append(arrow.array(map(_text, its.to_pylist()), field.type))
    return arrow.table(columns, schema=schema)


def _text(value: Any) -> str | None:
    """Return a value as text: text as it is, other values as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
