"""Sidecar of document ends, `<shard file>.documents`, for shards whose format has no documents.

Layout, little-endian, 96 bytes of header:

    byte  0  b"CORPDOCS"
          8  <u8 version, 1
         16  <u8 id of the end-of-text token; 2^64 - 1 if a side file listed the ends
         24  <u8 num_tokens of the shard
         32  <u8 num_documents
         40  dtype of the shard, ASCII, padded with zero bytes to 8
         48  32 bytes, the shard's fingerprint: sampled, 8 blocks, this shard alone
         80  <u8 xxh3-64 of the ends
         88  <u8 xxh3-64 of bytes 0 to 87
         96  <u8 ends[num_documents]

Document n is the tokens [ends[n - 1], ends[n]) of the shard, including its end-of-text token; the
first begins at 0. The last one ends with the shard, with or without an end-of-text token. An empty shard
has no documents.

A shard may hold 10^9 documents, so single ends are read from the file, never all of them at once.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash

from corpus_server.corpus.files import OpenFile, TokenFile
from corpus_server.corpus.formats.ends import CHUNK_ENDS, CumulativeEnds
from corpus_server.corpus.formats.layout import TOKEN_DTYPES, Format, TokenDtype

_MAGIC: Final = b"CORPDOCS"
_VERSION: Final = 1
HEADER_BYTES: Final = 96
_LISTED: Final = 2**64 - 1  # in place of an end-of-text id
END_DTYPE: Final[np.dtype[np.uint64]] = np.dtype("<u8")

_HEADER: Final = struct.Struct("<8sQQQQ8s32sQ")
_SUFFIX: Final = ".documents"
_AGAIN: Final = "run corpus-server index on the corpus again, or delete the file"


def documents_path(path: Path) -> Path:
    """Return where the document ends of the token file `path` are kept."""
    return path.with_name(path.name + _SUFFIX)


class DocumentsHeader(NamedTuple):
    """The header of a sidecar, see the layout above."""

    eot: int | None  # None: a side file listed the ends
    num_tokens: int
    num_documents: int
    dtype: TokenDtype
    fingerprint: bytes
    ends_checksum: int

    def pack(self) -> bytes:
        """Return the header's bytes."""
        eot = _LISTED if self.eot is None else self.eot
        fields = _HEADER.pack(_MAGIC, _VERSION, eot, *self[1:3], self.dtype.name.encode(), *self[4:])
        return fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")

    @classmethod
    def unpack(cls, file: TokenFile) -> DocumentsHeader:
        """Read and check the header of an open sidecar."""
        head = file.head(HEADER_BYTES)
        if not head.startswith(_MAGIC):
            raise file.unreadable(
                f"expected it to begin with {_MAGIC!r}, got {head[: len(_MAGIC)]!r}", _AGAIN
            )
        if len(head) < HEADER_BYTES:
            raise file.unreadable(f"{len(head)} bytes end inside the header", _AGAIN)
        _, version, eot, num_tokens, num_documents, dtype, *digests = _HEADER.unpack_from(head)
        if version != _VERSION:
            raise file.unreadable(f"version {version} is unknown (known: {_VERSION})", _AGAIN)
        name = dtype.rstrip(b"\0").decode("ascii", "replace")
        checksum = xxhash.xxh3_64_intdigest(head[: _HEADER.size]).to_bytes(8, "little")
        if head[_HEADER.size :] != checksum or name not in TOKEN_DTYPES:
            raise file.unreadable("its header is damaged", _AGAIN)
        return cls(None if eot == _LISTED else eot, num_tokens, num_documents, TOKEN_DTYPES[name], *digests)


class DocumentEnds(CumulativeEnds):
    """An open sidecar, checked in O(1) against the tokens, dtype and fingerprint of the shard beside it.

    Raises:
        UnreadableCorpus: it is damaged, or was made for other content.
    """

    remedy = "run corpus-server index on the corpus again, then restart the server"

    def __init__(self, path: Path, num_tokens: int, dtype: TokenDtype, fingerprint: bytes) -> None:
        with ExitStack() as on_error:
            file = on_error.enter_context(OpenFile(path))
            self.header = DocumentsHeader.unpack(file)
            num_documents = self.header.num_documents
            super().__init__(file, at=HEADER_BYTES, num_documents=num_documents, num_tokens=num_tokens)
            self._check(num_tokens, dtype, fingerprint)
            on_error.pop_all()

    def find_problem(self) -> str | None:
        """Read all ends in bounded memory; return the first contradiction, or None."""
        if problem := super().find_problem():
            return problem
        checksum, size = xxhash.xxh3_64(), END_DTYPE.itemsize
        for first in range(0, self.num_documents, CHUNK_ENDS):
            count = min(CHUNK_ENDS, self.num_documents - first)
            checksum.update(self.file.read(HEADER_BYTES + first * size, count * size))
        if checksum.intdigest() != self.header.ends_checksum:
            return f"{self.file.path.name}: its document ends differ from the ones written; {_AGAIN}"
        return None

    def _check(self, num_tokens: int, dtype: TokenDtype, fingerprint: bytes) -> None:
        header = self.header
        expected_bytes = HEADER_BYTES + END_DTYPE.itemsize * self.num_documents
        if self.file.size_bytes != expected_bytes:
            raise self.file.unreadable(
                f"{self.num_documents} documents need {expected_bytes} bytes, found {self.file.size_bytes}",
                _AGAIN,
            )
        last = int(self.ends(self.num_documents - 1, 1)[0]) if self.num_documents else 0
        if last != header.num_tokens:
            raise self.file.unreadable(
                f"its last document ends at token {last}, expected {header.num_tokens}", _AGAIN
            )
        if (header.num_tokens, header.dtype) != (num_tokens, dtype):
            made = f"{header.num_tokens} {header.dtype.name} tokens"
            what = f"made for {made}, the file beside it holds {num_tokens} {dtype.name}"
            raise self.file.unreadable(what, _AGAIN)
        if header.fingerprint != fingerprint:
            raise self.file.unreadable("made for other tokens than the file beside it holds", _AGAIN)


# Not a token format; listed so that folders know the suffix.
FORMAT: Final = Format(
    read=lambda file, dtype, in_folder: None, side_files={f"*{_SUFFIX}": "document boundaries"}
)
