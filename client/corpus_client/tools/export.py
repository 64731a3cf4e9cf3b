"""`corpus-client export`: steps of a plan as a file that other tools read.

Rows come in the order of training, `seq_len + 1` tokens each, as stored:

    bin      rows one after another, nothing else: served again with stride `seq_len + 1`
    npy      `(rows, seq_len + 1)`
    parquet  columns step, row and tokens (a list)
    mds      a folder of MosaicML shards, the same columns (tokens as an array)
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.status import Status

from corpus_client import errors
from corpus_client.tools import report

if TYPE_CHECKING:
    from corpus_client.arrays import ArrayBatch
    from corpus_client.tools.row_files import Batches

Format = Literal["bin", "npy", "parquet", "mds"]


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

    status = Status("exporting", console=Console(stderr=as_json))

    def exported() -> report.Report:
        from corpus_client.arrays import ArrayLoader
        from corpus_client.tools.row_files import WRITERS

        servers, network = report.whole_urls(urls), report.read_network("export", header, token_file)
        if not 0 <= start < stop:
            raise errors.InvalidArgument(f"export needs 0 <= start < stop, got {start} and {stop}")
        report.check_new(out)
        with ArrayLoader(servers, plan=plan, rank=0, world_size=1, num_steps=stop, network=network) as loader:
            if loader.is_masked:
                raise errors.InvalidArgument(
                    "an export holds no loss masks, and corpora of the plan have some; serve with mask=no"
                )
            loader.seek(start)
            try:
                # A sibling, so that the rename stays on one file system.
                with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".export-") as folder:
                    batches = _shown(loader, stop - start, status)
                    num_rows = WRITERS[format_](Path(folder, "part"), batches)
                    Path(folder, "part").rename(out)
            except OSError as error:
                raise report.unwritable(out, error) from error
            told = {"plan_id": loader.plan_id, "start": start, "stop": stop, "num_rows": num_rows}
        return report.Report(data=told, shown=[f"{num_rows:,} rows of steps {start} to {stop - 1} in {out}"])

    report.run(exported, as_json=as_json, status=status)


def _shown(batches: Batches, total: int, status: Status) -> Iterator[ArrayBatch]:
    """Yield the batches; show how many there were, how fast they come and how long it will take."""
    began = time.monotonic()
    for done, batch in enumerate(batches, 1):
        yield batch
        speed = done / (time.monotonic() - began)
        left = (total - done) / speed
        status.update(f"exporting: {done:,} of {total:,} steps, {speed:,.1f} steps/s, {left:,.0f} s left")
