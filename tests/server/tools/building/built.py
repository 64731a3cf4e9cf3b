"""Built corpora for tests, made by hand in the layout that `build` writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from corpus_server.corpus.fingerprints import load_sidecar
from corpus_server.corpus.index import index
from corpus_server.corpus.verify import record
from corpus_server.tools.building.manifest import (
    Manifest,
    ManifestShard,
    Origin,
    Source,
    file_digest,
    spec_of,
    write_manifest,
)
from tests.corpora import some_tokens, write_npy

EOT = 0
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "model": {
            "type": "WordLevel",
            "vocab": {f"word{number}": number for number in range(40)},
            "unk_token": "word1",
        },
    }
)


def write_built(
    folder: Path,
    *,
    lengths: tuple[int, ...] = (100, 200),
    dtype: str = "uint16",
    eot: int = EOT,
    tokenizer: str | None = TOKENIZER,
    split: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a built corpus of shards of `lengths` random tokens; `tokenizer` is the text of its file."""
    folder.mkdir(parents=True)
    for number, length in enumerate(lengths):
        tokens = some_tokens(length, dtype=dtype, vocabulary=40, seed=seed * 100 + number)
        write_npy(folder / f"{number:06}.npy", np.append(tokens[1:], eot), dtype=dtype)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
    indexed = index(replace(spec_of(folder), eot=eot))
    record(spec_of(folder))
    hashes = load_sidecar(spec_of(folder))
    assert hashes is not None
    manifest = Manifest(
        split=split,
        fingerprint=hashes.full,
        dtype=dtype,
        eot=eot,
        tokenizer=None if tokenizer is None else source(folder / "tokenizer.json"),
        num_tokens=sum(lengths),
        num_documents=indexed.num_documents,
        shards=tuple(
            ManifestShard(
                name=shard.name,
                num_tokens=length,
                num_documents=shard.num_documents,
                num_bytes=(folder / shard.name).stat().st_size,
            )
            for shard, length in zip(indexed.shards, lengths, strict=True)
        ),
        origins=(Origin(options={"seed": seed}, sources=(), versions={"corpus-server": "0"}),),
    )
    write_manifest(folder, manifest)
    return folder


def source(path: Path) -> Source:
    return Source(path=path.name, num_bytes=path.stat().st_size, digest=file_digest(path))


def tokens_of(folder: Path) -> np.ndarray:
    """Return all tokens of a built corpus."""
    return np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])
