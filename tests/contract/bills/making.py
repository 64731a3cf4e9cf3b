"""How tests make bills and proofs, and the tree as RFC 6962 defines it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from corpus_client.tools.app import app
from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec

PLAN: dict[str, Any] = {
    "seq_len": 16,
    "seed": 7,
    "stages": [
        {"from_step": 0, "global_batch_size": 12, "mixture": {"web": 0.6, "mixed": 0.4}},
        {"from_step": 9, "global_batch_size": 6, "mixture": {"web": 1.0}, "seq_len": 8},
    ],
    "skip_steps": [[3, 5]],
}
START = 2
STOP = 15


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def naive_root(leaves: Sequence[bytes]) -> bytes:
    """The definition of RFC 6962, 2.1."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while 2 * split < len(leaves):
        split *= 2
    return sha(b"\1", naive_root(leaves[:split]), naive_root(leaves[split:]))


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120", "NO_COLOR": "1"})


def proof_of(made: Path, step: int, folder: Path) -> Path:
    out = folder / f"proof-{step}.json"
    done = run("prove", made, "--step", step, "--out", out)
    assert done.exit_code == 0, done.output
    return out


def fingerprint_of(path: Path) -> str:
    with Catalog.open([CorpusSpec(name="web", path=path)]) as catalog:
        return catalog.corpus("web").fingerprint
