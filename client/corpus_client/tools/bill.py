"""Bills of materials of a run: what its steps were made of, in a file that anybody can check later.

    bill FILE          plan, sources with fingerprints, what of them was used, the root over all steps
    FILE.leaves        32 bytes for each step, from which proofs are made
    proof              a step and the hashes beside the way from its leaf to the root, see `merkle`

A bill is made of the tokens that a loader of the plan brings, so it says what the plan gives, and a run whose
batches were verified saw. It holds no secret and is not signed: sign the file with what you sign others with.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corpus_client import errors
from corpus_client.tools import boms, merkle, report
from corpus_client.tools.bill_file import (
    Sources,
    described,
    leaves_of,
    open_loader,
    publishing,
    read_leaves,
)

if TYPE_CHECKING:
    from corpus_client.arrays import ArrayLoader


def bill(
    urls: Sources,
    plan: Annotated[Path, typer.Option(help="file with the plan document")],
    out: Annotated[Path, typer.Option(help="file to write; must not exist")],
    stop: Annotated[int, typer.Option(help="training step before which to stop")],
    start: Annotated[int, typer.Option(help="first training step")] = 0,
    cyclonedx: Annotated[Path | None, typer.Option(help="also write a CycloneDX 1.6 ML-BOM")] = None,
    spdx: Annotated[Path | None, typer.Option(help="also write an SPDX 3.0 document")] = None,
    header: report.Header = None,
    token_file: report.TokenFile = None,
    as_json: report.AsJson = False,
) -> None:
    """Write what steps [START, STOP) are made of, with a root that proves each. Goes on where it was ended.

    Example: corpus-client bill localhost:8000 --plan plan.json --stop 1000 --out bill.json
    """

    def made() -> report.Report:
        network = report.read_network("bill", header, token_file)
        for path in (out, cyclonedx, spdx):
            if path is not None:
                report.check_new(path)
        if not 0 <= start < stop:
            raise errors.InvalidArgument(f"a bill needs 0 <= start < stop, got {start} and {stop}")
        with open_loader(urls, plan, network) as loader:
            hashed = _hash_all(loader, out, start, stop)
            content = described(loader, start, stop, merkle.root(read_leaves(hashed)).hex())
        forms = ((cyclonedx, boms.cyclonedx), (spdx, boms.spdx))
        others = {path: form(content) for path, form in forms if path is not None}
        with publishing({**others, out: content}):
            hashed.replace(f"{out}.leaves")
        told = {"plan_id": content["plan_id"], "steps": [start, stop], "root": content["tree"]["root"]}
        return report.Report(
            data=told, shown=[f"root {told['root']} of steps {start} to {stop - 1} in {out}"]
        )

    report.run(made, as_json=as_json)


def _hash_all(loader: ArrayLoader, out: Path, start: int, stop: int) -> Path:
    """Hash the steps into a file, behind the whole leaves that an ended run left; return the file."""
    partial = Path(f"{out}.{loader.plan_id[:16]}-{start}.partial")
    try:
        with partial.open("ab") as file:
            done = min(file.tell() // merkle.HASH_BYTES, stop - start)
            if done:  # the last one again: it must be what the plan gives
                first = start + done - 1
                (leaf,) = leaves_of(loader, first, first + 1)
                if read_leaves(partial)[done - 1] != leaf:
                    raise errors.InvalidArgument(
                        f"{partial}, which an ended run left, does not hold step {first}; remove it"
                    )
            file.truncate(done * merkle.HASH_BYTES)
            for leaf in leaves_of(loader, start + done, stop):
                file.write(leaf)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        with suppress(OSError):
            if partial.stat().st_size < merkle.HASH_BYTES:
                partial.unlink()  # there is nothing to go on from
        if isinstance(error, OSError):
            raise report.unwritable(partial, error) from error
        raise
    return partial
