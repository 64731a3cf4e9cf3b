"""Write rows of batches as files that other tools read, for `export`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from corpus_client import errors
from corpus_client.arrays import ArrayBatch

Batches = Iterable[ArrayBatch]


def write_array(path: Path, batches: Batches, *, has_header: bool) -> int:
    """Write rows of one length, with the header of an NPY file or without."""
    num_rows, window = 0, 0
    described: dict[str, object] = {"fortran_order": False}
    with path.open("wb") as file:
        for batch in batches:
            if window not in (0, batch.tokens.shape[1]):
                raise errors.InvalidArgument(
                    f"rows of one file must have one length, got {window} tokens up to step {batch.step - 1} "
                    f"and {batch.tokens.shape[1]} from there on; export each stage by itself, or as parquet"
                )
            window = batch.tokens.shape[1]
            described["descr"] = np.lib.format.dtype_to_descr(batch.tokens.dtype)
            if has_header and not num_rows:
                np.lib.format.write_array_header_1_0(file, {**described, "shape": (0, window)})
            file.write(batch.tokens.data)
            num_rows += len(batch.tokens)
        if has_header:  # NumPy leaves room for the first axis to grow, so the header keeps its length
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, {**described, "shape": (num_rows, window)})
    return num_rows


def _write_parquet(path: Path, batches: Batches) -> int:
    arrow, parquet = _imported("pyarrow", "pyarrow"), _imported("pyarrow.parquet", "pyarrow")
    num_rows, writer = 0, cast("Any", None)
    for batch in batches:  # at least one
        count, window = batch.tokens.shape
        offsets = arrow.array(np.arange(count + 1, dtype=np.int32) * window)
        tokens = arrow.ListArray.from_arrays(offsets, arrow.array(batch.tokens.reshape(-1)))
        columns = {"step": np.full(count, batch.step), "row": np.arange(count), "tokens": tokens}
        table = arrow.table(columns)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
        num_rows += count
    writer.close()
    return num_rows


def _write_mds(path: Path, batches: Batches) -> int:
    streaming, num_rows, writer = _imported("streaming", "mosaicml-streaming"), 0, cast("Any", None)
    for batch in batches:
        columns = {"step": "int", "row": "int", "tokens": f"ndarray:{batch.tokens.dtype.name}"}
        writer = writer or streaming.MDSWriter(out=str(path), columns=columns)
        for row, tokens in enumerate(batch.tokens):
            writer.write({"step": batch.step, "row": row, "tokens": tokens})
        num_rows += len(batch.tokens)
    writer.finish()
    return num_rows


def _imported(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        message = f"this format needs {package}, which is not installed; pip install {package}"
        raise errors.InvalidArgument(message) from error


WRITERS: Final[dict[str, Callable[[Path, Batches], int]]] = {
    "bin": partial(write_array, has_header=False),
    "npy": partial(write_array, has_header=True),
    "parquet": _write_parquet,
    "mds": _write_mds,
}
"""By format; each returns the number of rows."""
