"""`corpus-client prove`: the proof that one step belongs to a bill."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corpus_client import errors
from corpus_client.tools import merkle, report
from corpus_client.tools.bill_file import VERSION, BillFile, publishing, read_bill, read_leaves


def prove(
    bill: BillFile,
    step: Annotated[int, typer.Option(help="training step")],
    out: Annotated[Path, typer.Option(help="file to write; must not exist")],
    as_json: report.AsJson = False,
) -> None:
    """Write the proof that a step belongs to a bill: hashes beside the way from its leaf to the root.

    Example: corpus-client prove bill.json --step 700 --out step-700.json
    """

    def proven() -> report.Report:
        made = read_bill(bill)
        report.check_new(out)
        start, stop = made["steps"]
        if not start <= step < stop:
            raise errors.InvalidArgument(f"step must be in [{start}, {stop}), those of the bill, got {step}")
        leaves = read_leaves(Path(f"{bill}.leaves"))
        if len(leaves) != stop - start or merkle.root(leaves).hex() != made["tree"]["root"]:
            raise errors.InvalidArgument(
                f"{bill}.leaves does not belong to {bill}: its root is another; make the bill anew"
            )
        path = [each.hex() for each in merkle.path(leaves, step - start)]
        proof = {"proof": VERSION, "plan_id": made["plan_id"], "steps": [start, stop], "step": step}
        proof |= {"root": made["tree"]["root"], "path": path}
        with publishing({out: proof}):
            pass
        return report.Report(
            data={"step": step, "num_hashes": len(path)}, shown=[f"{len(path)} hashes in {out}"]
        )

    report.run(proven, as_json=as_json)
