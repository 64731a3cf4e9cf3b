"""`corpus-client export`: steps of a plan as a file that other tools read.

Rows come in the order of training, `seq_len + 1` tokens each, as stored:

    bin      rows one after another, nothing else: served again with stride `seq_len + 1`
    npy      `(rows, seq_len + 1)`
    parquet  columns step, row and tokens (a list)
    mds      a folder of MosaicML shards, the same columns (tokens as an array)
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import typer

from corpus_client import errors
from corpus_client.arrays import ArrayBatch, ArrayLoader
from corpus_client.tools import report

Format = Literal["bin", "npy", "parquet", "mds"]
Batches = Iterable[ArrayBatch]


def export(
    urls: Annotated[list[str], typer.Argument(help=report.URLS)],
    plan: Annotated[Path, typer.Option(help="file with the plan document")],
    out: Annotated[Path, typer.Option(help="file to write, for mds a folder; must not exist")],
    stop: Annotated[int, typer.Option(help="training step before which to stop")],
    start: Annotated[int, typer.Option(help="first training step")] = 0,
    format_: Annotated[Format, typer.Option("--format", help="of the file")] = "npy",
    header: report.Header = None,
    token_file: report.TokenFile = None,
    as_json: report.AsJson = False,
) -> None:
    """Write the global batches of steps [START, STOP) to a file, which appears when it is complete.

    Example: corpus-client export localhost:8000 --plan plan.json --stop 100 --out steps.npy
    """

    def exported() -> report.Report:
        servers, network = report.whole_urls(urls), report.read_network("export", header, token_file)
        if out.exists() or not 0 <= start < stop:
            exists = " (it exists)" if out.exists() else ""
            raise errors.InvalidArgument(
                f"export needs a new file and 0 <= start < stop, got {out}{exists}, {start}, {stop}"
            )
        with ArrayLoader(servers, plan=plan, rank=0, world_size=1, num_steps=stop, network=network) as loader:
            if loader.is_masked:
                raise errors.InvalidArgument(
                    "an export holds no loss masks, and corpora of the plan have some; serve with mask=no"
                )
            loader.seek(start)
            # A sibling, so that the rename stays on one file system.
            with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".export-") as folder:
                num_rows = _WRITERS[format_](Path(folder, "part"), loader)
                Path(folder, "part").rename(out)
            told = {"plan_id": loader.plan_id, "start": start, "stop": stop, "num_rows": num_rows}
        return report.Report(data=told, shown=[f"{num_rows:,} rows of steps {start} to {stop - 1} in {out}"])

    report.run(exported, as_json=as_json)


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


_WRITERS: dict[Format, Callable[[Path, Batches], int]] = {
    "bin": partial(write_array, has_header=False),
    "npy": partial(write_array, has_header=True),
    "parquet": _write_parquet,
    "mds": _write_mds,
}
