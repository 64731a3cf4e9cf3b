"""`corpus-client verify-bill`: a bill against the tokens that its plan gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from corpus_client import errors
from corpus_client.network.options import Network
from corpus_client.tools import merkle, report
from corpus_client.tools.bill_file import (
    MAY_LACK,
    VERSION,
    BillFile,
    Sources,
    described,
    digest_at,
    leaves_of,
    open_loader,
    read_bill,
    read_json,
    read_leaves,
)
from corpus_client.user_files import parse_json, read_text

if TYPE_CHECKING:
    from corpus_client.arrays import ArrayLoader

_ABSENT: Final = object()


class NotProven(Exception):
    """What a bill says is not what its plan gives."""


def verify_bill(
    bill: BillFile,
    urls: Sources,
    proof: Annotated[
        Path | None, typer.Option(help="of one step, from `prove`; without it, all steps")
    ] = None,
    trained: Annotated[
        list[Path] | None, typer.Option(help="also compare what ranks wrote that trained; repeatable")
    ] = None,
    header: report.Header = None,
    token_file: report.TokenFile = None,
    as_json: report.AsJson = False,
) -> None:
    """Check a bill against its plan: each field, and the tokens of the step of a proof, or of all steps.

    Prints which fields nobody here knows. Exit code 1: it does not hold.

    Example: corpus-client verify-bill bill.json localhost:8000 --proof step-700.json
    """

    def checked() -> report.Report:
        made, network = read_bill(bill), report.read_network("verify-bill", header, token_file)
        proved = None if proof is None else read_proof(proof, made, bill)
        with open_loader(urls, made["plan"], network) as loader:
            if loader.plan_id != made["plan_id"]:
                raise NotProven(
                    f"{bill} names plan {made['plan_id']}, and its own document is plan {loader.plan_id}"
                )
            not_checked = _check_fields(loader, made)
            told = _check_all(loader, made, bill) if proved is None else _check_step(loader, made, proved)
        if proved is not None and (others := made["tree"]["num_leaves"] - 1):
            not_checked.append(f"tokens of the other steps ({others})")
        if trained:
            told |= _check_trained(trained, made, urls, network)
        leaves = _check_leaves(Path(f"{bill}.leaves"), made)
        shown = [told["said"], *([leaves] if leaves else ()), *told.get("trained", ())]
        return report.Report(
            data={"plan_id": made["plan_id"], **told, "leaves": leaves, "not_checked": not_checked},
            shown=[*shown, f"not checked: {', '.join(not_checked)}"],
        )

    try:
        report.run(checked, as_json=as_json)
    except NotProven as error:
        typer.echo(f"not proven: {error}", err=True)
        raise typer.Exit(1) from error


def _check_fields(loader: ArrayLoader, made: dict[str, Any]) -> list[str]:
    """Compare all but the root with the bill that is made here; return the fields that cannot be compared."""
    not_checked = ["made_by"]
    start, stop = made["steps"]
    right = described(loader, start, stop, made["tree"]["root"])
    for field, said, its in _differences(made, right):
        name = json.dumps(".".join(map(str, field)))[1:-1]  # a terminal obeys no name of the file
        if field == ("made_by",):
            continue
        if _is_unknown(field, said, its):
            not_checked.append(name)
        elif its is _ABSENT:
            raise NotProven(f"{name}: the bill says {_shown(said)}, and bills of its plan have no such field")
        elif said is _ABSENT:
            raise NotProven(f"{name}: the bill lacks it, and it is {_shown(its)}")
        else:
            raise NotProven(f"{name}: the bill says {_shown(said)}, and it is {_shown(its)}")
    return not_checked


def _check_leaves(path: Path, made: dict[str, Any]) -> str | None:
    """Compare the leaves beside a bill, of which proofs are made, with its root; None if there are none."""
    if not path.exists():
        return None
    leaves, number = read_leaves(path), made["tree"]["num_leaves"]
    size, wanted = path.stat().st_size, number * merkle.HASH_BYTES
    if size != wanted:
        raise NotProven(f"{path} has {size} bytes, and {number} leaves have {wanted}: it is of another bill")
    if (root := merkle.root(leaves).hex()) != made["tree"]["root"]:
        raise NotProven(
            f"{path} comes to the root {root}, the bill says {made['tree']['root']}: a proof made of it "
            "would not hold; make the bill again, or remove the file"
        )
    return f"{path} comes to the bill's root"


def _differences(said: Any, its: Any, field: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any, Any]]:
    """Yield fields that differ, with both values; 1, 1.0 and true are not the same."""
    if type(said) is not type(its):
        yield field, said, its
    elif isinstance(said, (dict, list)):
        one, other = (each if isinstance(each, dict) else dict(enumerate(each)) for each in (said, its))
        for name in {**other, **one}:
            yield from _differences(one.get(name, _ABSENT), other.get(name, _ABSENT), (*field, name))
    elif said != its:
        yield field, said, its


def _is_unknown(field: tuple[Any, ...], said: Any, its: Any) -> bool:
    """Say whether one side lacks what not every server knows, or has the other kind of fingerprint."""
    if field[0] != "sources" or len(field) < 3 or field[2] not in MAY_LACK:
        return False
    if len(field) == 3:
        return said is _ABSENT or its is _ABSENT
    kinds = {str(each).partition("-")[0] for each in (said, its)}
    return field[3:] == ("fingerprint",) and kinds == {"sampled", "full"}


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _check_step(loader: ArrayLoader, made: dict[str, Any], proved: dict[str, Any]) -> dict[str, Any]:
    (start, stop), step = made["steps"], proved["step"]
    leaf = merkle.leaf_hash(step, digest_at(loader, step))
    path = [bytes.fromhex(each) for each in proved["path"]]
    root = merkle.root_by_path(leaf, step - start, stop - start, path)
    if root is None:
        raise NotProven(f"the path has {len(path)} hashes, which no step {step} of {stop - start} has")
    if root.hex() != made["tree"]["root"]:
        raise NotProven(
            f"the tokens of step {step} and the proof come to the root {root.hex()}, the bill says "
            f"{made['tree']['root']}: another token, row or step, or a changed proof"
        )
    return {"steps": [step, step + 1], "said": f"step {step} is what the bill says"}


def _check_all(loader: ArrayLoader, made: dict[str, Any], bill: Path) -> dict[str, Any]:
    start, stop = made["steps"]
    leaves = list(leaves_of(loader, start, stop))
    if merkle.root(leaves).hex() != made["tree"]["root"]:
        where, kept = "", Path(f"{bill}.leaves")
        if kept.exists():
            pairs = enumerate(zip(leaves, read_leaves(kept), strict=False))
            differing = (start + number for number, (one, other) in pairs if one != other)
            where = "; {} that differs from {} is {}".format("the first step", kept, next(differing, "none"))
        raise NotProven(f"the tokens of steps {start} to {stop - 1} do not come to the bill's root{where}")
    return {"steps": [start, stop], "said": f"steps {start} to {stop - 1} are what the bill says"}


def _check_trained(
    paths: Sequence[Path], made: dict[str, Any], urls: Sequence[str], network: Network
) -> dict[str, Any]:
    """Compare what ranks wrote with the tokens of their rows."""
    said, (start, stop) = [], made["steps"]
    for place, written in _by_place(paths).items():
        with open_loader(urls, made["plan"], network, place) as loader:
            for step, digest, line in written:
                if not start <= step < stop:
                    raise NotProven(f"{line} is of step {step}, and the bill has steps {start} to {stop - 1}")
                if digest_at(loader, step).hex() != digest:
                    raise NotProven(
                        f"{line}: rank {place[0]} of {place[1]} was trained on other tokens at step {step}"
                    )
        steps = {step for step, _, _ in written}
        if len(steps) <= max(steps) - min(steps):
            gap = next(step for step in range(min(steps), stop) if step not in steps)
            raise NotProven(
                f"rank {place[0]} of {place[1]} has no line of step {gap}, and lines before and after"
            )
        said.append(
            f"rank {place[0]} of {place[1]} was trained on {len(steps)} of the {stop - start} steps, "
            "with the tokens of the bill"
        )
    return {"trained": said}


def _by_place(paths: Sequence[Path]) -> dict[tuple[int, int], list[tuple[int, str, str]]]:
    """Return steps, digests and where they stand of each rank and world size."""
    found: dict[tuple[int, int], list[tuple[int, str, str]]] = {}
    for path in paths:
        try:
            lines = read_text(path).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise errors.InvalidArgument(f"{path} cannot be read: {why}") from error
        for number, text in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                line = parse_json(text)
                place, step = (line["rank"], line["world_size"]), line["step"]
                if not all(isinstance(each, int) for each in (*place, step)):
                    raise ValueError("rank, world_size and step must be whole numbers")
                found.setdefault(place, []).append((step, str(line["digest"]), where))
            except (KeyError, TypeError, ValueError) as error:
                raise errors.InvalidArgument(f"{where} is no line of a TrainedLog: {error}") from error
    return found


def read_proof(path: Path, made: dict[str, Any], bill: Path) -> dict[str, Any]:
    """Return a proof, as far as it is one of a step of this bill."""
    proof = read_json(path, "a proof")
    hashes = proof.get("path")
    is_whole = (
        proof.keys() == {"proof", "plan_id", "steps", "step", "root", "path"}
        and proof["proof"] == VERSION
        and type(proof["step"]) is int
        and isinstance(hashes, list)
        and all(isinstance(each, str) and re.fullmatch("[0-9a-f]{64}", each) for each in hashes)
    )
    if not is_whole:
        raise errors.InvalidArgument(
            f"{path} is no proof of version {VERSION}: make one by corpus-client prove"
        )
    for field, own in (
        ("plan_id", made["plan_id"]),
        ("steps", made["steps"]),
        ("root", made["tree"]["root"]),
    ):
        if proof.get(field) != own:
            raise NotProven(f"{path} is of another bill: its {field} is {proof.get(field)}, of {bill} {own}")
    start, stop = made["steps"]
    if not start <= proof["step"] < stop:
        raise NotProven(f"{path} is of step {proof['step']}, and {bill} has steps {start} to {stop - 1}")
    return proof
