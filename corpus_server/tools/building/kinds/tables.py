"""Tables: each row of a Parquet or Arrow file is a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from corpus_server.corpus.files import OpenFile, unreadable
from corpus_server.corpus.formats.arrow import check_stream
from corpus_server.extras import optional_package
from corpus_server.tools.building.job import BuildOptions, Input, Slice
from corpus_server.tools.building.kept import columns_to_read, kept_rows
from corpus_server.tools.building.kinds.kind import (
    IS_CHAT,
    IS_IDS,
    IS_SEVERAL,
    TOOLS,
    Document,
    Kind,
    field_of,
    no_field,
    pyarrow,
    reading,
)
from corpus_server.tools.building.kinds.masked import mask_fields, with_masks

_ROWS_AT_ONCE: Final = 256  # a batch of an Arrow file may hold gigabytes, and more of them as Python strings


def _read(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    with _opened(piece) as (schema, row, batches):
        name = _column(piece, schema, options)
        top = name if name in schema.names else name.partition(".")[0]
        masks = [each for each in mask_fields(schema.names, options) if _is_list(piece, schema, each)]
        tools = [TOOLS] if options.chat is not None and TOOLS in schema.names else []
        names = {top, *masks, *tools, *columns_to_read(schema.names, options.keep)}
        for batch in batches(list(names)):
            rows = _rows(piece.path, row, _inner(batch.column(top), name[len(top) + 1 :]), options)
            if options.keep:
                both = zip(rows, kept_rows(batch, options.keep), strict=True)
                rows = (document._replace(kept=kept) for document, kept in both)
            for each in tools:
                both = zip(rows, batch.column(each).to_pylist(), strict=True)
                rows = (document._replace(tools=its) for document, its in both)
            if masks:
                rows = with_masks(rows, {each: _lists(batch.column(each)) for each in masks}, options)
            yield from rows
            row += batch.num_rows


def _is_list(piece: Slice, schema: Any, name: str) -> bool:
    found, types = schema.field(name).type, pyarrow(piece.path).types
    return any(check(found) for check in _list_types(types))


def _lists(column: Any) -> list[Any]:
    """Return the values of each row of a column of lists: `(n,)`, empty for null."""
    lengths, values = _lengths(column), column.flatten().to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(lengths)[:-1])


def _lengths(column: Any) -> Any:
    # Not `value_lengths`, which list views have not.
    compute = optional_package("pyarrow.compute", extra="build", purpose="lists of token ids")
    return compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)


def _check(piece: Slice, options: BuildOptions) -> None:
    with _opened(piece) as (schema, *_):
        _column(piece, schema, options)


def _divide(file: Input, _: int) -> Iterator[Slice]:
    if not file.path.lower().endswith(".parquet"):
        yield file.whole()
        return
    # One slice for each group of rows: `plan_parts` puts small ones together.
    with reading(file.path), _parquet(file.path) as parquet:
        groups = parquet.metadata
        sizes = [groups.row_group(number).total_byte_size for number in range(groups.num_row_groups)]
    total = max(1, sum(sizes))
    for number, size in enumerate(sizes):
        # Its share of the file: the sizes are those of the uncompressed columns.
        yield file.slice(number, number + 1, file.num_bytes * size // total)


@contextmanager
def _opened(piece: Slice) -> Iterator[tuple[Any, int, Callable[[list[str]], Iterable[Any]]]]:
    """Yield the schema of a table, the number of its first row here, and what reads columns in batches."""
    if piece.path.lower().endswith(".parquet"):
        with _parquet(piece.path) as parquet:
            first = sum(parquet.metadata.row_group(number).num_rows for number in range(piece.start))
            groups = list(range(piece.start, piece.stop))
            read = parquet.iter_batches
            yield parquet.schema_arrow, first, lambda names: read(_ROWS_AT_ONCE, groups, names)
        return
    arrow = pyarrow(piece.path)
    with arrow.memory_map(piece.path) as file:
        # Either the file format (Feather), or the stream that `datasets` writes.
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if not is_file:
            with OpenFile(Path(piece.path)) as opened:
                check_stream(opened)
        with (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(file) as reader:
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            parts = (
                batch.slice(first, _ROWS_AT_ONCE)
                for batch in batches
                for first in range(0, batch.num_rows, _ROWS_AT_ONCE)
            )
            yield reader.schema, 0, lambda _: parts


def _parquet(path: str) -> Any:
    parquet = optional_package("pyarrow.parquet", extra="build", purpose=path)
    return parquet.ParquetFile(path, page_checksum_verification=True)  # where the writer made checksums


def _column(piece: Slice, schema: Any, options: BuildOptions) -> str:
    """Return the column to read after checking its type."""
    path, name = Path(piece.path), field_of(piece, options)
    types = pyarrow(piece.path).types
    if schema.names.count(name) > 1:
        raise unreadable(path, f"has several columns {name!r}", "rename all but one of them")
    if (found := _type(schema, name, types)) is None:
        raise unreadable(path, *no_field(name, schema.names, options))
    is_list = any(check(found) for check in _list_types(types))
    if options.chat is not None:
        if not is_list or not types.is_struct(found.value_type):
            raise unreadable(path, f"expected lists of messages in column {name!r}, got {found}")
        _check_kept(path, schema, options)
        return name
    holds_ids = is_list and (types.is_integer(found.value_type) or types.is_null(found.value_type))
    if options.column is not None and not (holds_ids or types.is_null(found)):  # of null if all are empty
        raise unreadable(path, f"expected lists of integers in column {name!r}, got {found}")
    text = found.value_type if types.is_dictionary(found) else found
    if options.column is None and not any(check(text) for check in _texts(types)):
        remedy = None
        if is_list:
            remedy = IS_IDS.format(name) if types.is_integer(found.value_type) else IS_SEVERAL
            if types.is_struct(found.value_type):
                remedy = IS_CHAT.format(name)
        elif types.is_struct(found):
            remedy = f"name a field of it: {', '.join(f'{name}.{field.name}' for field in found)}"
        raise unreadable(path, f"expected text in column {name!r}, got {found}", remedy)
    _check_kept(path, schema, options)
    for each in options.mask if options.has_masks else ():
        if each not in schema.names or not _is_list(piece, schema, each):
            what = no_field(each, schema.names, options)[0] if each not in schema.names else None
            raise unreadable(
                path, what or f"expected lists of numbers in column {each!r}, got {schema.field(each).type}"
            )
    return name


def _list_types(types: Any) -> tuple[Callable[[Any], bool], ...]:
    return (
        *(types.is_list, types.is_large_list, types.is_fixed_size_list),
        *(types.is_list_view, types.is_large_list_view),
    )


def _texts(types: Any) -> tuple[Callable[[Any], bool], ...]:
    """Return what tells text, and bytes that nobody marked as text: Spark and fastparquet write such."""
    return (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_binary, types.is_large_binary, types.is_binary_view),
        types.is_null,  # a column without a value
    )


def _type(schema: Any, name: str, types: Any) -> Any:
    """Return the type of a column, or of a field of nested ones: `message.content`; None if there is none."""
    if name in schema.names:
        return schema.field(name).type
    first, _, rest = name.partition(".")
    if first not in schema.names:
        return None
    found = schema.field(first).type
    for part in rest.split(".") if rest else ():
        if not types.is_struct(found) or found.get_field_index(part) < 0:
            return None
        found = found.field(part).type
    return found if rest else None


def _inner(column: Any, path: str) -> Any:
    if not path:
        return column
    compute = optional_package("pyarrow.compute", extra="build", purpose="a nested field")
    return compute.struct_field(column, path.split("."))


def _check_kept(path: Path, schema: Any, options: BuildOptions) -> None:
    """Refuse kept fields that neither the columns nor the fields of a column `metadata` have."""
    names = list(schema.names)
    if "metadata" in names and pyarrow(str(path)).types.is_struct(nested := schema.field("metadata").type):
        names += [field.name for field in nested]
    if missing := [name for name in options.keep if name not in names]:
        what, _ = no_field(missing[0], names, options)
        raise unreadable(path, what, "name fields that all files have with --keep")


def _rows(path: str, first: int, column: Any, options: BuildOptions) -> Iterator[Document]:
    if options.column is None:  # text, or messages
        for number, text in enumerate(column.to_pylist(), first):
            if isinstance(text, bytes):
                try:
                    text = text.decode()
                except UnicodeDecodeError as error:
                    document = Document(path, "row", number, "")
                    yield document.failed(document.unreadable(f"is not UTF-8: {error}", "was it text?"))
                    continue
            yield Document(path, "row", number, text or "")
        return
    arrow = pyarrow(path)
    if arrow.types.is_null(column.type):
        column = column.cast(arrow.list_(arrow.uint32()))
    lengths = _lengths(column)
    values = column.flatten()
    nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) if values.null_count else None
    if arrow.types.is_null(values.type):
        values = values.cast(arrow.uint32())
    flat, stops = values.fill_null(0).to_numpy(), np.cumsum(lengths)
    wrong = set() if nulls is None else set(stops.searchsorted(nulls, side="right").tolist())
    for row, (stop, length) in enumerate(zip(stops.tolist(), lengths.tolist(), strict=True)):
        document = Document(path, "row", first + row, flat[stop - length : stop])
        if row in wrong:
            document = document.failed(document.unreadable("a list of token ids holds a null"))
        yield document


TABLE: Final = Kind(_read, _check, _divide, has_fields=True)
