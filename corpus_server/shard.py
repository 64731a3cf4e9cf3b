"""One file of a corpus: open, checked and mapped."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from corpus_server import mapguard
from corpus_server.errors import ReadFailed, UnreadableCorpus
from corpus_server.fingerprint import sampled_fingerprint
from corpus_server.formats import DocumentIndex, ShardLayout, TokenDtype, recognise_open
from corpus_server.formats.documents import DocumentEnds, documents_path
from corpus_server.openfile import OpenFile

_DIGEST_SAMPLES = 8


class Shard:
    """A mapped token file; use `open`.

    Attributes:
        name: name in the corpus: path relative to its folder (posix), or the file's name.
        path: where the file lies.
        format, dtype, num_tokens, data_offset: see `ShardLayout`.
        documents: document boundaries, or None.
        size_bytes: size of the file.
        tokens: `(num_tokens,) dtype`, read-only view of the map; empty after `close`.
        address: address of `tokens[0]`, 0 for an empty or closed shard.
    """

    def __init__(self, file: OpenFile, layout: ShardLayout, name: str) -> None:
        self._file = file
        self.name = file.name = name
        self.path: Path = layout.path
        self.format: str = layout.format
        self.dtype: TokenDtype = layout.dtype
        self.num_tokens: int = layout.num_tokens
        self.data_offset: int = layout.data_offset
        self.documents: DocumentIndex | None = layout.documents
        self.size_bytes: int = file.size_bytes
        self._map: mmap.mmap | None = None
        self.tokens: np.ndarray[tuple[int], np.dtype[Any]] = np.empty(0, self.dtype)
        self.address = 0
        self._guarded: mapguard.GuardedRange | None = None
        if self.num_tokens:  # an empty file cannot be mapped
            self._map = _map(file)
            self.tokens = np.frombuffer(self._map, self.dtype, count=self.num_tokens, offset=self.data_offset)
            self.address = self.tokens.ctypes.data
            self._guarded = mapguard.guard(self.address - self.data_offset, file.size_bytes)
        self.tokens.flags.writeable = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        name: str | None = None,
        dtype: TokenDtype | None = None,
        in_folder: bool = False,
        sidecar: bool = True,
    ) -> Shard:
        """Open, check and map `path`, in O(1) of the token count.

        Args:
            path: a token file.
            name: name in the corpus; default the file's.
            dtype: what a headerless file holds (None: uint16).
            in_folder: a headerless file needs a name that says so.
            sidecar: open the sidecar of document ends, where the format has none.
        """
        file = OpenFile(path)
        layout = None
        try:
            layout = recognise_open(file, dtype=dtype, in_folder=in_folder)
            shard = cls(file, layout, path.name if name is None else name)
        except BaseException:
            if layout is not None and layout.documents is not None:
                layout.documents.close()
            file.close()
            raise
        if sidecar and shard.documents is None:
            try:
                shard.documents = shard.open_sidecar()
            except BaseException:
                shard.close()
                raise
        return shard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def data_bytes(self) -> int:
        """Size of the tokens in bytes."""
        return self.num_tokens * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """Return the shard's entry in a description."""
        return {
            "name": self.name,
            "format": self.format,
            "num_tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "data_offset": self.data_offset,
            "size_bytes": self.size_bytes,
        }

    def read_data(self, offset: int, count: int) -> bytes:
        """Return `count` bytes of the tokens from byte `offset` of them, read from the file, not the map."""
        return self._file.read(self.data_offset + offset, count)

    def read_data_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tokens from byte `offset` of them, read from the file, not the map."""
        self._file.read_into(self.data_offset + offset, buffer)

    def is_resident(self, token: int) -> bool:
        """Tell whether the page cache holds a token; False where it cannot be known."""
        return self._file.is_resident(self.data_offset + token * self.dtype.itemsize)

    def content_digest(self) -> bytes:
        """Return 32 bytes that follow the content, from a few blocks of it."""
        return bytes.fromhex(sampled_fingerprint([self], samples=_DIGEST_SAMPLES).partition("-")[2])

    def open_sidecar(self) -> DocumentEnds | None:
        """Open the sidecar of document ends beside the file; None if there is none.

        Raises:
            UnreadableCorpus: it is damaged, or was made for other content.
        """
        path = documents_path(self.path)
        if not path.exists():
            return None
        digest = self.content_digest()
        return DocumentEnds.open(path, num_tokens=self.num_tokens, dtype=self.dtype, fingerprint=digest)

    def check_unchanged(self) -> None:
        """Raise if what was copied from the map may not be the file's tokens.

        Raises:
            CorpusChanged: the file's size or modification time differ from opening.
            ReadFailed: a page of the map could not be read; it holds zeros until the shard is reopened.
        """
        self._file.check_unchanged()
        if self._guarded is not None and self._guarded.num_faults:
            # Cut between the two looks, by another thread's fault: only now does the file tell.
            self._file.check_unchanged()
            raise ReadFailed(
                f"{self.name}: the disk did not deliver {self._guarded.num_faults} pages",
                remedy="look at the kernel's log of the machine that holds the shard, run corpus-server "
                "verify, then restart the server",
            )

    def close(self) -> None:
        """Unmap and close; a second call does nothing. Views handed out stay valid as long as they live."""
        self.address = 0
        self.tokens = np.empty(0, self.dtype)
        if self._guarded is not None:
            mapguard.release(self._guarded)
        # Not closed by force: the map goes with its last view.
        self._map = None
        if self.documents is not None:
            self.documents.close()
        self._file.close()


def _map(file: OpenFile) -> mmap.mmap:
    try:
        mapped = mmap.mmap(file.fd, file.size_bytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: it became shorter since it was opened
        raise UnreadableCorpus(
            f"{file.path}: cannot be mapped: {error}",
            received=str(file.path),
            remedy="check that the file is not being written, and the limits ulimit -v and vm.max_map_count",
        ) from error
    # Without it a cold random read of one window reads megabytes ahead.
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped
