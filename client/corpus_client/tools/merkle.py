"""Merkle trees over the steps of a run, hashed as RFC 6962 (Certificate Transparency) hashes its logs.

    digest of a step   see `corpus_client.trained`
    leaf               SHA-256 of 00, the step as 8 bytes, big-endian, and the digest
    node               SHA-256 of 01, the left hash and the right hash

A tree of n leaves splits at the largest power of two below n.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

HASH_BYTES = 32


def leaf_hash(step: int, digest: bytes) -> bytes:
    """Return the leaf of a step."""
    return hashlib.sha256(b"\0" + step.to_bytes(8, "big") + digest).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """Return the root of at least one leaf."""
    return _levels(leaves)[-1][0]


def path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the hashes beside the way from a leaf to the root, the lowest first."""
    found = []
    for level in _levels(leaves)[:-1]:
        if (beside := index ^ 1) < len(level):
            found.append(level[beside])
        index >>= 1
    return found


def root_by_path(leaf: bytes, index: int, num_leaves: int, path: Sequence[bytes]) -> bytes | None:
    """Return the root that a leaf and a path come to (RFC 9162, 2.1.3.2); None: no path has this length."""
    last, hashed = num_leaves - 1, leaf
    for beside in path:
        if last == 0:
            return None
        if index & 1 or index == last:
            hashed = _node(beside, hashed)
            while index and not index & 1:
                index, last = index >> 1, last >> 1
        else:
            hashed = _node(hashed, beside)
        index, last = index >> 1, last >> 1
    return hashed if last == 0 else None


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _levels(leaves: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Return leaves, the nodes above them, and so on up to the root; the last of an odd level moves up."""
    levels = [leaves]
    while len(level := levels[-1]) > 1:
        above = [_node(level[k], level[k + 1]) for k in range(0, len(level) - 1, 2)]
        levels.append([*above, level[-1]] if len(level) % 2 else above)
    return levels
