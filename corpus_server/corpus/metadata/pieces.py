"""Rows on their way into metadata: record batches one after another in a file, each with its own schema.

    Arrow stream of one batch | Arrow stream of the next | ...

So nothing need be known of later batches when one is written: a field may first have a value, or another
type, after a million records. `common_schema` of all of them is that of the files that are written then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from corpus_server.corpus.metadata.write import EXACT, common_schema, conform
from corpus_server.extras import optional_package

_PURPOSE: Final = "metadata of documents"


def append(file: BinaryIO, batch: Any) -> None:
    """Write a record batch behind what a file holds."""
    ipc = optional_package("pyarrow.ipc", extra="build", purpose=_PURPOSE)
    options = ipc.IpcWriteOptions(compression="lz4")
    with ipc.new_stream(file, batch.schema, options=options) as writer:
        writer.write_batch(batch)


def read(path: Path) -> Iterator[Any]:
    """Yield the record batches of a file."""
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    ipc = optional_package("pyarrow.ipc", extra="build", purpose=_PURPOSE)
    with arrow.OSFile(str(path)) as file:
        while file.tell() < file.size():
            yield from ipc.open_stream(file)


def tables(paths: Iterable[Path]) -> Iterator[Any]:
    """Yield the rows of files as tables of the one schema that all of them have; reads them twice."""
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    paths, large = list(paths), set[str]()

    def schemas() -> Iterator[Any]:
        for batch in (batch for path in paths for batch in read(path)):
            large.update(_large(batch))
            yield batch.schema

    schema = common_schema(schemas())
    for name in large:
        if arrow.types.is_floating(schema.field(name).type):  # would change the number
            number = schema.get_field_index(name)
            schema = schema.set(number, arrow.field(name, arrow.string()))
    for path in paths:
        for batch in read(path):
            yield conform(batch, schema)


def _large(batch: Any) -> Iterator[str]:
    """Yield the columns with whole numbers that no floating-point number is."""
    compute = optional_package("pyarrow.compute", extra="build", purpose=_PURPOSE)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.type.bit_width == 64 if _is_integer(column.type) else False:
            found = compute.min_max(column).as_py()
            if found["min"] is not None and max(-found["min"], found["max"]) > EXACT:
                yield name


def _is_integer(kind: Any) -> bool:
    arrow = optional_package("pyarrow", extra="build", purpose=_PURPOSE)
    return bool(arrow.types.is_integer(kind))
