"""Files of bills: making, reading, writing and hashing what `bill`, `prove` and `verify-bill` share."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from corpus_client import __version__, errors
from corpus_client.network.options import Network
from corpus_client.tools import merkle, report
from corpus_client.user_files import parse_json, read_text

if TYPE_CHECKING:
    from corpus_client.arrays import ArrayLoader

VERSION: Final = 1
LEAF: Final = (
    "SHA-256(00, step as 8 bytes big-endian, SHA-256(tokens as little-endian uint32, row after row))"
)
MAY_LACK: Final = ("dtype", "num_documents", "tokenizer_identity", "view", "license", "address")
"""Fields of a source that not every server of its content knows."""
_AHEAD: Final = 8
"""Steps that are hashed or wait for it, each of which is in memory."""

BillFile = Annotated[Path, typer.Argument(metavar="BILL", help="file of `corpus-client bill`")]
Sources = Annotated[
    list[str],
    typer.Argument(metavar="URLS", help=f"{report.URLS}; or a path of the corpus, or NAME=PATH of each"),
]


def open_loader(
    urls: Sequence[str], plan: Path | dict[str, Any], network: Network, place: tuple[int, int] = (0, 1)
) -> ArrayLoader:
    """Make a loader of a plan's tokens; `place` is a rank and the world size."""
    from corpus_client.arrays import ArrayLoader  # 0.15 s of CPU, with NumPy and httpx

    return ArrayLoader(_servers_of(urls), plan=plan, rank=place[0], world_size=place[1], network=network)


def digest_at(loader: ArrayLoader, step: int) -> bytes:
    """Return the digest of the tokens that a loader gives at a step."""
    from corpus_client.trained import step_digest

    return step_digest(loader.peek(step).tokens)


def _servers_of(urls: Sequence[str]) -> str | list[str] | dict[str, str]:
    """Return URLs, one path of a corpus, or paths by name."""
    named = [url.partition("=") for url in urls]
    if all(is_named and "/" not in name for name, is_named, _ in named):
        return {name: path for name, _, path in named}
    return urls[0] if len(urls) == 1 else report.whole_urls(urls)


def leaves_of(loader: ArrayLoader, start: int, stop: int) -> Iterator[bytes]:
    """Yield the leaves of steps; SHA-256 releases the GIL, and runs beside the next steps' way here."""
    from corpus_client.trained import step_digest

    loader.seek(start)
    waiting: deque[tuple[int, Future[bytes]]] = deque()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        for step in range(start, stop):
            batch = next(loader)
            waiting.append((step, pool.submit(step_digest, batch.tokens)))
            if len(waiting) > _AHEAD:
                yield _leaf(*waiting.popleft())
        while waiting:
            yield _leaf(*waiting.popleft())


def _leaf(step: int, digest: Future[bytes]) -> bytes:
    return merkle.leaf_hash(step, digest.result())


def described(loader: ArrayLoader, start: int, stop: int, root: str) -> dict[str, Any]:
    """Return the bill of steps [start, stop) whose leaves have this root: 64 hex digits.

    All else is the server's word of the plan and its corpora. If a corpus has other content by now, that of
    the plan is described as far as the plan knows it.
    """
    from corpus_client.network import control

    plan, plan_id = loader.plan, loader.plan_id
    with loader._connect() as replicas:
        used = replicas.ask(control.get(f"/v1/plans/{plan_id}/usage?since={start}&step={stop}"))
        bound = replicas.ask(control.get(f"/v1/plans/{plan_id}/file"))["corpora"]
        corpora = {name: replicas.ask(control.get(f"/v1/corpora/{name}")) for name in loader.sources}
        stages = replicas.ask(control.get(f"/v1/plans/{plan_id}"))["stages"]
    excluded = [
        {"from_step": stage["first_step"], "windows": stage["excluded_windows"]}
        for stage in stages
        if any(stage["excluded_windows"].values()) and (stage["first_step"] or 0) < stop
    ]
    sources = {}
    for name, corpus in corpora.items():
        fingerprint = plan["fingerprints"][name]
        is_same = fingerprint in corpus["fingerprints"].values()
        known = {**(corpus if is_same else {}), **bound[name]}
        sources[name] = {
            "fingerprint": fingerprint,
            "fingerprint_kind": fingerprint.partition("-")[0],
            "num_tokens": known["num_tokens"],
            **{field: known[field] for field in MAY_LACK if known.get(field) is not None},
            "used": used["sources"][name],
        }
    return {
        "bill": VERSION,
        "made_by": f"corpus-client {__version__}",
        "plan_id": plan_id,
        "plan": plan,
        "steps": [start, stop],
        "sources": sources,
        "skipped": used["skipped"],
        "excluded": excluded,
        "tree": {"hash": "RFC 6962, SHA-256", "leaf": LEAF, "num_leaves": stop - start, "root": root},
    }


def read_bill(path: Path) -> dict[str, Any]:
    """Return a bill, as far as it is one."""
    made = read_json(path, "a bill")
    steps, tree = made.get("steps"), made.get("tree")
    is_whole = (
        made.get("bill") == VERSION
        and isinstance(made.get("plan"), dict)
        and isinstance(made.get("plan_id"), str)
        and _are_steps(steps)
        and isinstance(tree, dict)
        and tree.get("leaf") == LEAF
        and isinstance(tree.get("root"), str)
    )
    if not is_whole:
        raise errors.InvalidArgument(
            f"{path} is no bill of version {VERSION}: make one by corpus-client bill"
        )
    return made


def _are_steps(steps: Any) -> bool:
    return (
        isinstance(steps, list)
        and len(steps) == 2
        and all(isinstance(step, int) for step in steps)
        and 0 <= steps[0] < steps[1]
    )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file; `what` it should be, for the error."""
    try:
        found = parse_json(read_text(path))
    except OSError as error:
        raise errors.InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise errors.InvalidArgument(f"{path} is not JSON, so it is not {what}: {error}") from error
    if not isinstance(found, dict):
        raise errors.InvalidArgument(f"{path} is not {what}: it holds no JSON object")
    return found


def read_leaves(path: Path) -> list[bytes]:
    """Return the whole leaves in a file."""
    size = merkle.HASH_BYTES
    try:
        content = path.read_bytes()
    except OSError as error:
        raise errors.InvalidArgument(
            f"{path}, the leaves of the bill, cannot be read: {error.strerror}"
        ) from error
    return [content[at : at + size] for at in range(0, len(content) - size + 1, size)]


@contextmanager
def publishing(contents: Mapping[Path, dict[str, Any]]) -> Iterator[None]:
    """Write files, of which all get their names when the block ends without an error, or none does.

    Fields come in order of their names, so that equal bills are equal files.
    """
    parts = {path: path.with_name(f".{path.name}.part") for path in contents}
    path = Path()
    try:
        for path, content in contents.items():
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            parts[path].write_text(text, encoding="utf-8")
        yield
        for path, part in parts.items():
            part.replace(path)
    except OSError as error:
        raise report.unwritable(path, error) from error
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()
