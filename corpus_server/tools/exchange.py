"""Plans of others: read from a file, a URL or the Hugging Face Hub, and given to a server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import urlopen

from corpus_server.corpus_spec import HUB
from corpus_server.errors import (
    CorpusServerError,
    FingerprintMismatch,
    InvalidParameter,
    InvalidPlan,
    StoreFailed,
    counted,
    printable,
)
from corpus_server.plan_store.saved import SavedPlan, read_saved
from corpus_server.tools.hub import Say, snapshot
from corpus_server.user_files import read_given, reason_of

MAX_BYTES: Final = 256 * 2**20
"""Of a saved plan. A chain of 100,000 stages of 64 sources has about 200 MB."""
MAX_LINKS: Final = 256
"""Stages that are posted together."""
_SECONDS: Final = 60

Ask = Callable[[str, bytes | None], Any]
"""Asks a server for the JSON at a path; a body is posted."""


def read_plan(where: str, say: Say) -> SavedPlan:
    """Return the saved plan of a file, an http(s) URL, or `hf://datasets/ORG/NAME/run.json`.

    Raises:
        InvalidPlan: it is none, or was changed.
        InvalidParameter, StoreFailed, UnreadableCorpus: it cannot be read, and why.
    """
    try:
        if where.startswith(("http://", "https://")):
            text = _downloaded(where)
        elif (match := HUB.match(where)) is not None:
            text = _from_hub(where, match[0], where[match.end() :].strip("/"), say)
        else:
            text = read_given(Path(where), max_bytes=MAX_BYTES)
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{where} is not UTF-8 text: {error}", parameter="file") from error
    except OSError as error:
        raise InvalidParameter(f"{where}: {reason_of(error)}", parameter="file") from error
    try:
        return read_saved(text)
    except InvalidPlan as error:
        raise error.in_file(where) from error


def load_plan(saved: SavedPlan, ask: Ask) -> str:
    """Make a saved plan known to a server; return its id.

    Raises:
        FingerprintMismatch: the server lacks corpora; the error names them and where they can be had.
    """
    firsts = range(0, len(saved.links), MAX_LINKS)
    documents = [saved.plan, *(_joined(saved.links[first : first + MAX_LINKS]) for first in firsts)]
    made = None
    try:
        for document in documents:
            made = ask("/v1/plans", json.dumps(document, separators=(",", ":")).encode())["id"]
    except CorpusServerError as error:
        if lacking := list(_lacking(saved, ask("/v1/corpora", None)["corpora"])):
            raise FingerprintMismatch(
                "the server lacks corpora of the plan: " + "; ".join(lacking),
                parameter="fingerprints",
                remedy="serve them under the names that the plan has, and load it again",
            ) from error
        raise
    if made != saved.id:
        what = f"the server makes plan {made} of the documents of {saved.id}"
        raise InvalidPlan(what, remedy="load it on a server of the release that saved it")
    return saved.id


def _lacking(saved: SavedPlan, served: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield for each corpus that a server lacks its name, its fingerprint and how to come by it."""
    by_name = {each["name"]: set(each["fingerprints"].values()) for each in served}
    for name, fingerprint in saved.fingerprints.items():
        if fingerprint in by_name.get(name, ()):
            continue
        others = [each for each, its in by_name.items() if fingerprint in its]
        about = saved.corpora.get(name, {})
        tokens = (
            f", {counted(about['num_tokens'], 'token')}" if isinstance(about.get("num_tokens"), int) else ""
        )
        has = "has other content under that name" if name in by_name else "has no corpus of that name"
        if others:
            how = f"it is served as {others[0]!r}: serve it as {name!r}"
        elif isinstance(address := about.get("address"), str):
            terms = f" (license {about['license']})" if isinstance(about.get("license"), str) else ""
            how = printable(f"corpus-server serve {shlex.quote(f'{name}={address}')}{terms}")
        else:
            how = "the file does not say where it can be had: ask who saved it"
        yield f"{name!r} ({fingerprint}{tokens}): the server {has}; {how}"


def _joined(links: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the document that stands for several links, one after another."""
    joined: dict[str, Any] = {"parent": links[0]["parent"], "stages": []}
    for link in links:
        joined["stages"] += link.get("stages", [])
        for field in ("fingerprints", "lengths"):
            if link.get(field):
                joined[field] = {**joined.get(field, {}), **link[field]}
    return joined


def _downloaded(url: str) -> str:
    try:
        with urlopen(url, timeout=_SECONDS) as response:
            content: bytes = response.read(MAX_BYTES + 1)
    except HTTPError as error:
        remedy = "check the address; a server with access tokens: plans save with CORPUS_TOKEN, then the file"
        raise StoreFailed(f"{url}: {error.code} {error.reason}", remedy=remedy) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise StoreFailed(f"{url}: {why}", remedy="check the address and the network") from error
    _check_size(len(content))
    return content.decode()


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise InvalidParameter.expected("file", f"a saved plan of at most {MAX_BYTES} bytes", num_bytes)


def _from_hub(where: str, repository: str, name: str, say: Say) -> str:
    found = snapshot(repository)
    if name not in found.sizes:
        files = [each for each in sorted(found.sizes) if each.endswith(".json")]
        there = ", ".join(files[:5]) or "none"
        accepted = f"hf://datasets/ORG/NAME/PATH of a file; JSON files of {found.url}: {there}"
        raise InvalidParameter.expected("file", accepted, where)
    _check_size(found.sizes[name])
    found.fetch([name], say)
    return (found.folder / name).read_text(encoding="utf-8")
