"""Identity of a corpus by its content: never by path, file name or container format.

    sampled-<hex>  SHA-256 over (num_tokens, dtype) and a few blocks of every shard; O(1)
    full-<hex>     SHA-256 over (num_tokens, dtype) and the digests of all blocks of every shard,
                   which are computed once and kept in a sidecar beside the shards

Blocks lie at offsets relative to the first token, so the same tokens in a raw file and in an llm.c
file have the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from corpus_server.errors import UnreadableCorpus
from corpus_server.formats import TokenDtype
from corpus_server.publish import publishing

SAMPLE_BYTES: Final = 4096
SAMPLES_PER_CORPUS: Final = 64
BLOCK_BYTES: Final = 16 << 20  # 16 MiB: 70 KB of digests per 32 GiB, and a bad block is soon copied again
FOLDER_SIDECAR: Final = "corpus.hashes.json"
FILE_SIDECAR_SUFFIX: Final = ".hashes.json"

_SIDECAR_KIND: Final = "corpus-hashes"
_SIDECAR_VERSION: Final = 1
_DIGEST: Final = "xxh3-128"


class TokenData(Protocol):
    """What a fingerprint reads of a shard."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""

    @property
    def dtype(self) -> TokenDtype:
        """Their type."""

    def read_data(self, offset: int, count: int) -> bytes:
        """Return `count` bytes of the tokens from byte `offset` of them."""


def sampled_fingerprint(shards: Sequence[TokenData], *, samples: int = SAMPLES_PER_CORPUS) -> str:
    """Return `sampled-<64 hex>` of the shards in order, reading about `samples` blocks in all."""
    digest = hashlib.sha256(b"corpus-server sampled fingerprint 1\n")
    num_samples = max(2, samples // len(shards))
    for shard in shards:
        digest.update(f"{shard.num_tokens} {shard.dtype.name}\n".encode())
        for offset, count in sample_blocks(shard.num_tokens * shard.dtype.itemsize, num_samples):
            digest.update(shard.read_data(offset, count))
    return f"sampled-{digest.hexdigest()}"


def sample_blocks(num_bytes: int, num_samples: int) -> list[tuple[int, int]]:
    """Return (offset, size) of blocks evenly spaced over `num_bytes`, the first and last included."""
    if num_bytes <= num_samples * SAMPLE_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - SAMPLE_BYTES
    return [(last * i // (num_samples - 1), SAMPLE_BYTES) for i in range(num_samples)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHashes:
    """Recorded digests of one shard.

    Attributes:
        name: the shard's name when it was recorded; no part of the fingerprint.
        num_tokens, dtype: what it held.
        digests: xxh3-128 hex of each block of `BLOCK_BYTES` of the tokens, the last one shorter.
    """

    name: str
    num_tokens: int
    dtype: str
    digests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedHashes:
    """The sidecar of a corpus: digests of all blocks, and the sampled fingerprint of that moment."""

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
        document = {
            "kind": _SIDECAR_KIND,
            "version": _SIDECAR_VERSION,
            "digest": _DIGEST,
            "block_bytes": BLOCK_BYTES,
            "sampled": self.sampled,
            "full": self.full,
            "shards": [asdict(shard) for shard in self.shards],
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> RecordedHashes:
        """Return the hashes in a sidecar's text; ValueError if it is damaged or of another kind."""
        document: dict[str, Any] = json.loads(text)
        try:
            made = (document["kind"], document["version"], document["digest"], document["block_bytes"])
            if made != (_SIDECAR_KIND, _SIDECAR_VERSION, _DIGEST, BLOCK_BYTES):
                raise ValueError(f"unknown kind of sidecar: {made}")
            shards = tuple(
                ShardHashes(
                    name=str(shard["name"]),
                    num_tokens=int(shard["num_tokens"]),
                    dtype=str(shard["dtype"]),
                    digests=tuple(shard["digests"]),
                )
                for shard in document["shards"]
            )
            hashes = cls(sampled=str(document["sampled"]), shards=shards)
            recorded_full = document["full"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"field missing or of the wrong type: {error}") from error
        if hashes.full != recorded_full:
            raise ValueError("its digests do not give the fingerprint it names")
        return hashes


def sidecar_path(path: Path) -> Path:
    """Return where the hashes of the corpus `path` (a data file or a folder) are kept."""
    return path / FOLDER_SIDECAR if path.is_dir() else path.with_name(path.name + FILE_SIDECAR_SUFFIX)


def load_sidecar(path: Path) -> RecordedHashes | None:
    """Return the recorded hashes of the corpus `path`, None if there are none.

    Raises:
        UnreadableCorpus: there is a sidecar, but it is damaged.
    """
    sidecar = sidecar_path(path)
    try:
        return RecordedHashes.from_json(sidecar.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UnreadableCorpus(
            f"{sidecar}: the recorded hashes cannot be read: {error}; delete the file or record them again",
            received=str(sidecar),
            remedy="delete the file or record the hashes again",
        ) from error


def save_sidecar(path: Path, hashes: RecordedHashes) -> Path:
    """Publish the hashes of the corpus `path` and return the sidecar's path."""
    sidecar = sidecar_path(path)
    try:
        with publishing(sidecar) as file:
            file.write(hashes.to_json().encode())
    except OSError as error:
        remedy = "make room, or record where the folder may be written to"
        raise UnreadableCorpus(
            f"{sidecar}: the hashes cannot be written: {error.strerror}; {remedy}",
            received=str(sidecar),
            remedy=remedy,
        ) from error
    return sidecar


def check_fingerprints(path: Path, shards: Sequence[TokenData]) -> dict[str, str]:
    """Return the known fingerprints of the corpus `path`: kind -> value, the strongest kind last.

    `full` is there when hashes are recorded; it is trusted after the sample, taken anew, agrees.

    Raises:
        UnreadableCorpus: the content differs from its recorded hashes.
    """
    sampled = sampled_fingerprint(shards)
    recorded = load_sidecar(path)
    if recorded is None:
        return {"sampled": sampled}
    if recorded.sampled != sampled:
        remedy = (
            "run corpus-server verify to find the block, or delete "
            f"{sidecar_path(path).name} if the change was meant"
        )
        raise UnreadableCorpus(
            f"{path}: content differs from its recorded hashes; {remedy}", received=sampled, remedy=remedy
        )
    return {"sampled": sampled, "full": recorded.full}
