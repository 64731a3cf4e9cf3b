"""Document ends in a sidecar, `<shard file>.documents`, for shards whose format has no documents.

Layout, little-endian, 96 bytes of header:

    byte  0  b"CORPDOCS"
          8  <u8 version, 1
         16  <u8 id of the end-of-text token
         24  <u8 num_tokens of the shard
         32  <u8 num_documents
         40  dtype of the shard, ASCII, padded with zero bytes to 8
         48  32 bytes, the shard's fingerprint: sampled, 8 blocks, this shard alone
         80  <u8 xxh3-64 of the ends
         88  <u8 xxh3-64 of bytes 0 to 87
         96  <u8 ends[num_documents]

Document n is the tokens [ends[n - 1], ends[n]) of the shard, its end-of-text token included; the
first begins at 0. No document is empty. The last one ends with the shard, whether an end-of-text
token stands there or not; an empty shard has no documents.

Ends are read from the file by their place and never whole, as in `megatron`: a shard may hold 10^9.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from corpus_server.errors import ReadFailed
from corpus_server.formats.layout import TOKEN_DTYPES, TokenDtype, unreadable
from corpus_server.openfile import OpenFile

SIDECAR_SUFFIX: Final = ".documents"
MAGIC: Final = b"CORPDOCS"
VERSION: Final = 1
HEADER_BYTES: Final = 96
END_DTYPE: Final[np.dtype[np.uint64]] = np.dtype("<u8")

_HEADER: Final = struct.Struct("<8sQQQQ8s32sQ")
_CHECKSUM: Final = struct.Struct("<Q")
_CHUNK_ENDS: Final = 1 << 17
_AGAIN: Final = "run corpus-server index on the corpus again, or delete the file"

Ends = np.ndarray[tuple[int], np.dtype[np.uint64]]


def documents_path(path: Path) -> Path:
    """Return where the document ends of the token file `path` are kept."""
    return path.with_name(path.name + SIDECAR_SUFFIX)


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentsHeader:
    """What a sidecar says about itself and its shard.

    Attributes:
        eot: id of the end-of-text token that was searched for.
        num_tokens, dtype: of the shard.
        num_documents: entries that follow.
        fingerprint: of the shard's content, 32 bytes.
        ends_checksum: xxh3-64 of the entries.
    """

    eot: int
    num_tokens: int
    num_documents: int
    dtype: TokenDtype
    fingerprint: bytes
    ends_checksum: int

    def pack(self) -> bytes:
        """Return the header's bytes."""
        fields = _HEADER.pack(
            MAGIC,
            VERSION,
            self.eot,
            self.num_tokens,
            self.num_documents,
            self.dtype.name.encode(),
            self.fingerprint,
            self.ends_checksum,
        )
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def unpack(cls, file: OpenFile) -> DocumentsHeader:
        """Read and check the header of an open sidecar."""
        head = file.head(HEADER_BYTES)
        if not head.startswith(MAGIC):
            raise unreadable(
                file.path, f"expected it to begin with {MAGIC!r}, got {head[: len(MAGIC)]!r}", _AGAIN
            )
        if len(head) < HEADER_BYTES:
            raise unreadable(file.path, f"{len(head)} bytes end inside the header", _AGAIN)
        _, version, *counts, dtype, fingerprint, ends_checksum = _HEADER.unpack_from(head)
        if version != VERSION:
            raise unreadable(file.path, f"version {version} is unknown (known: {VERSION})", _AGAIN)
        name = dtype.rstrip(b"\0").decode("ascii", "replace")
        if _CHECKSUM.unpack_from(head, _HEADER.size) != (xxhash.xxh3_64_intdigest(head[: _HEADER.size]),) or (
            name not in TOKEN_DTYPES
        ):
            raise unreadable(file.path, "its header is damaged", _AGAIN)
        eot, num_tokens, num_documents = counts
        return cls(
            eot=eot,
            num_tokens=num_tokens,
            num_documents=num_documents,
            dtype=TOKEN_DTYPES[name],
            fingerprint=fingerprint,
            ends_checksum=ends_checksum,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentEnds:
    """An open sidecar that belongs to its shard: a `DocumentIndex`."""

    file: OpenFile
    header: DocumentsHeader

    @classmethod
    def open(cls, path: Path, *, num_tokens: int, dtype: TokenDtype, fingerprint: bytes) -> DocumentEnds:
        """Open the sidecar `path` and check it against the shard beside it, in O(1).

        Raises:
            UnreadableCorpus: it is damaged, or was made for other content.
        """
        file = OpenFile(path)
        try:
            index = cls(file=file, header=DocumentsHeader.unpack(file))
            index._check_size()
            index._check_shard(num_tokens, dtype, fingerprint)
        except BaseException:
            file.close()
            raise
        return index

    @property
    def eot(self) -> int:
        """Id of the end-of-text token."""
        return self.header.eot

    @property
    def num_documents(self) -> int:
        """Number of documents in the shard."""
        return self.header.num_documents

    @property
    def size_bytes(self) -> int:
        """Size of the sidecar."""
        return self.file.size_bytes

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of document `number` in [0, num_documents)."""
        self.file.check_unchanged()
        if number:
            start, stop = (int(end) for end in self._ends(number - 1, 2))
        else:
            start, stop = 0, int(self._ends(0, 1)[0])
        if 0 <= start < stop <= self.header.num_tokens:
            return start, stop
        raise ReadFailed(
            f"{self.file.path.name}: the end of document {number} contradicts its neighbours",
            remedy="run corpus-server index on the corpus again, then restart the server",
        )

    def find_problem(self) -> str | None:
        """Read all ends in bounded memory; return what contradicts itself, or None."""
        name, previous, number = self.file.path.name, 0, 0
        checksum = xxhash.xxh3_64()
        for ends in self._chunks():
            checksum.update(ends.data)
            wrong = np.flatnonzero(ends <= np.concatenate((np.array([previous], END_DTYPE), ends[:-1])))
            if wrong.size:
                return f"{name}: document {number + int(wrong[0])} ends before it begins"
            previous, number = int(ends[-1]), number + ends.size
        if checksum.intdigest() != self.header.ends_checksum:
            return f"{name}: its document ends differ from the ones written; {_AGAIN}"
        return None

    def close(self) -> None:
        """Close the sidecar; a second call does nothing."""
        self.file.close()

    def _ends(self, start: int, count: int) -> Ends:
        itemsize = END_DTYPE.itemsize
        return np.frombuffer(self.file.read(HEADER_BYTES + itemsize * start, itemsize * count), END_DTYPE)

    def _chunks(self) -> Iterator[Ends]:
        bounds = [*range(0, self.num_documents, _CHUNK_ENDS), self.num_documents]
        for start, stop in pairwise(bounds):
            yield self._ends(start, stop - start)

    def _check_size(self) -> None:
        expected_bytes = HEADER_BYTES + END_DTYPE.itemsize * self.num_documents
        if self.file.size_bytes != expected_bytes:
            raise unreadable(
                self.file.path,
                f"{self.num_documents} documents need {expected_bytes} bytes, found {self.file.size_bytes}",
                _AGAIN,
            )
        last = int(self._ends(self.num_documents - 1, 1)[0]) if self.num_documents else 0
        if last != self.header.num_tokens:
            raise unreadable(
                self.file.path,
                f"its last document ends at token {last}, expected {self.header.num_tokens}",
                _AGAIN,
            )

    def _check_shard(self, num_tokens: int, dtype: TokenDtype, fingerprint: bytes) -> None:
        made, here = (self.header.num_tokens, self.header.dtype), (num_tokens, dtype)
        if made != here:
            what = (
                f"made for {made[0]} {made[1].name} tokens, the file beside it holds {here[0]} {here[1].name}"
            )
        elif self.header.fingerprint != fingerprint:
            what = "made for other tokens than the file beside it holds"
        else:
            return
        raise unreadable(self.file.path, what, _AGAIN)
