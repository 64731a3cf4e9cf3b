"""Fingerprints: the identity of a corpus by its content, not by path, file name or container format.

    sampled-<hex>  SHA-256 over (num_tokens, dtype) and a few blocks of every shard; O(1)
    full-<hex>     SHA-256 over (num_tokens, dtype) and the digests of all blocks of every shard,
                   which are computed once and kept in a sidecar beside the shards

Offsets of blocks count from the first token, so the same tokens have the same fingerprint in a raw file and
behind a header. A loss mask counts like a shard of dtype bool, or float16 for weights, after its own shard;
without masks, the fingerprint is that of the tokens alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.layout import TokenDtype
from corpus_server.corpus.formats.masks import MASK_DTYPES, MASK_NAMES
from corpus_server.corpus.formats.registry import data_path
from corpus_server.corpus.publish import publishing
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.user_files import parse_json, read_regular, reason_of

SAMPLE_BYTES: Final = 4096
_SAMPLES: Final = 64  # of a corpus
BLOCK_BYTES: Final = 16 << 20  # bytes; 70 KB of digests for 32 GiB, and a bad block is quick to copy again
FINE_BLOCK_BYTES: Final = 2 << 20
"""Bytes of a digest by which parts of a shard are checked as they come from a store; 260 KB for 32 GiB.
Extents of a bounded shuffle's blocks begin and end at multiples of it."""

FINE_DIGITS: Final = 16
"""Hex digits of such a digest."""

_MADE: Final = {"kind": "corpus-hashes", "version": 1, "digest": "xxh3-128", "block_bytes": BLOCK_BYTES}
_FINE: Final = {"digest": "xxh3-64", "block_bytes": FINE_BLOCK_BYTES}
"""In the sidecar's `fine`, which older releases pass over."""


class TokenData(Protocol):
    """What a fingerprint reads of a shard."""

    num_tokens: int
    dtype: TokenDtype

    def read_data(self, offset: int, count: int) -> bytes:
        """Return `count` bytes of token data from byte `offset` of it."""


def sampled_fingerprint(shards: Sequence[TokenData], *, samples: int = _SAMPLES) -> str:
    """Return `sampled-<64 hex>` of the shards in order, reading about `samples` blocks in all."""
    digest = hashlib.sha256(b"corpus-server sampled fingerprint 1\n")
    for shard in shards:
        digest.update(f"{shard.num_tokens} {shard.dtype.name}\n".encode())
        for offset, count in _sample_blocks(shard, samples // len(shards)):
            digest.update(shard.read_data(offset, count))
    return f"sampled-{digest.hexdigest()}"


class SampledIds(NamedTuple):
    """The ids of the blocks that the sampled fingerprint reads."""

    num_tokens: int
    smallest: int
    largest: int


def sample_ids(shards: Sequence[TokenData]) -> SampledIds | None:
    """Return the smallest and largest id of about 64 blocks of 4 KiB; None for an empty corpus."""
    ids = sample_tokens(shards, _SAMPLES)
    return SampledIds(ids.size, int(ids.min()), int(ids.max())) if ids.size else None


def sample_tokens(shards: Sequence[TokenData], num_blocks: int) -> NDArray[np.integer]:
    """Return the tokens of about so many blocks of 4 KiB, evenly spaced: `(n,)`."""
    found = []
    for shard in shards:
        for offset, count in _sample_blocks(shard, num_blocks // len(shards)):
            start, size = (each - each % shard.dtype.itemsize for each in (offset, count))
            found.append(np.frombuffer(shard.read_data(start, size), shard.dtype))
    return np.concatenate(found)


def _sample_blocks(shard: TokenData, num_samples: int) -> list[tuple[int, int]]:
    """Return (offset, size) of blocks evenly spaced over the tokens, the first and last included."""
    num_bytes, num_samples = shard.num_tokens * shard.dtype.itemsize, max(2, num_samples)
    if num_bytes <= num_samples * SAMPLE_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - SAMPLE_BYTES
    return [(last * i // (num_samples - 1), SAMPLE_BYTES) for i in range(num_samples)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHashes:
    """What was recorded of one shard."""

    name: str  # not part of the fingerprint
    num_tokens: int
    dtype: str
    digests: tuple[str, ...]  # xxh3-128 hex of each `BLOCK_BYTES` of token data; the last may be shorter
    fine: str = ""  # xxh3-64 hex of each `FINE_BLOCK_BYTES`, joined; "": recorded by a release without them


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedHashes:
    """The sidecar of a corpus: digests of all blocks, and the sampled fingerprint of the same content."""

    sampled: str
    shards: tuple[ShardHashes, ...]

    @property
    def full(self) -> str:
        """`full-<64 hex>` of the recorded digests."""
        content = [
            {"digests": shard.digests, "dtype": shard.dtype, "num_tokens": shard.num_tokens}
            for shard in self.shards
        ]
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"full-{hashlib.sha256(canonical.encode()).hexdigest()}"

    def to_json(self) -> str:
        """Return the sidecar's text."""
        document: dict[str, Any] = {
            **_MADE,
            "sampled": self.sampled,
            "full": self.full,
            "shards": [
                {name: value for name, value in asdict(shard).items() if name != "fine"}
                for shard in self.shards
            ],
        }
        if all(shard.fine or not shard.num_tokens for shard in self.shards):
            document["fine"] = {**_FINE, "shards": [shard.fine for shard in self.shards]}
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> RecordedHashes:
        """Return the hashes in a sidecar's text; raise ValueError if it is damaged or of another kind."""
        document: dict[str, Any] = parse_json(text)
        try:
            made = {name: document[name] for name in _MADE}
            if made != _MADE:
                raise ValueError(f"unknown kind of sidecar: {made}")
            fine = _fine_digests(document)
            shards = (
                {**shard, "digests": tuple(shard["digests"]), "fine": its}
                for shard, its in zip(document["shards"], fine, strict=True)
            )
            hashes = cls(sampled=document["sampled"], shards=tuple(ShardHashes(**shard) for shard in shards))
            recorded_full = document["full"]
            texts = (text for each in hashes.shards for text in (each.name, each.dtype, *each.digests))
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a shard is not described by text")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"field missing or of the wrong type: {error}") from error
        if hashes.full != recorded_full:
            raise ValueError("its digests do not give the fingerprint that it records")
        return hashes


def _fine_digests(document: dict[str, Any]) -> list[str]:
    """Return the fine digests of the shards in a sidecar's document, each "" if it has none."""
    shards, fine = document["shards"], document.get("fine")
    if fine is None or {name: fine[name] for name in _FINE} != _FINE:  # a later release may have others
        return [""] * len(shards)
    for shard, its in zip(shards, fine["shards"], strict=True):
        num_bytes = shard["num_tokens"] * np.dtype(shard["dtype"]).itemsize
        if len(its) != FINE_DIGITS * -(-num_bytes // FINE_BLOCK_BYTES):
            raise ValueError(f"{shard['name']} has {len(its)} hex digits of fine digests")
    return list(fine["shards"])


def sidecar_path(spec: CorpusSpec) -> Path:
    """Return where the hashes of a corpus are kept: in its folder, or beside its file.

    Each selection of a folder's shards has a sidecar of its own, named after what the user says: after the
    files, the sidecar of a selection that lost one would not be found, and the loss not noticed.
    """
    path = data_path(spec.path)
    stem = "corpus" if path.is_dir() else path.name
    return (path if path.is_dir() else path.parent) / f"{stem}{selection_suffix(spec)}.hashes.json"


def selection_suffix(spec: CorpusSpec) -> str:
    """Return what tells a selection of a folder's shards apart in names of files; "" for all of them."""
    selection = [spec.include, spec.exclude, spec.split, spec.token_range]
    if any(selection[:2]) or spec.token_range is not None:
        return f".{hashlib.sha256(json.dumps(selection).encode()).hexdigest()[:16]}"
    return "" if spec.split is None else f".{spec.split}"


def load_sidecar(spec: CorpusSpec) -> RecordedHashes | None:
    """Return the recorded hashes of a corpus, None if there are none; refuse a damaged sidecar."""
    sidecar = sidecar_path(spec)
    try:
        return RecordedHashes.from_json(read_regular(sidecar))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        what = f"the recorded hashes cannot be read: {reason_of(error)}"
        raise unreadable(sidecar, what, "delete the file or record them again") from error


def save_sidecar(spec: CorpusSpec, hashes: RecordedHashes) -> Path:
    """Publish the hashes of a corpus and return the sidecar's path."""
    sidecar = sidecar_path(spec)
    try:
        with publishing(sidecar) as file:
            file.write(hashes.to_json().encode())
    except OSError as error:
        what = f"the hashes cannot be written: {error.strerror}"
        raise unreadable(sidecar, what, "make room, or record where the folder is writable") from error
    return sidecar


def check_fingerprints(spec: CorpusSpec, shards: Sequence[TokenData]) -> dict[str, str]:
    """Return the known fingerprints of a corpus: kind -> value, `full` if hashes are recorded.

    Refuses content that differs from its recorded hashes.
    """
    sampled = sampled_fingerprint(shards)
    recorded = load_sidecar(spec)
    if recorded is None:
        return {"sampled": sampled}
    if recorded.sampled != sampled:
        remedy = f"run `{spec.command('verify')}` to find the block, or delete "
        remedy += f"{sidecar_path(spec).name} if the change was meant"
        masks = sum(shard.dtype in MASK_DTYPES for shard in shards)
        if masks != (were := sum(shard.dtype in MASK_NAMES for shard in recorded.shards)):
            remedy = (
                f"{were} loss masks were recorded and {masks} are here: record again "
                f"(`{spec.command('verify --record')}`), or choose with mask=yes or mask=no"
            )
        raise unreadable(spec.path, "content differs from its recorded hashes", remedy)
    return {"sampled": sampled, "full": recorded.full}
