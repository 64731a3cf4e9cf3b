"""One open file: header checks, map and later reads all see the same inode.

Opening once leaves no gap between checking a file and mapping it: a file replaced by rename keeps
its old bytes here, and a file changed in place is told by `check_unchanged`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from corpus_server.errors import CorpusChanged, ReadFailed, UnreadableCorpus


class OpenFile:
    """A regular file, open for reading until `close`.

    Attributes:
        path: where it was opened.
        name: what errors call it; the file's name unless set.
        fd: its descriptor, -1 when closed.
        size_bytes: size at opening.
        mtime_ns: time of last modification at opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.fd = -1
        try:
            # O_NONBLOCK: opening a named pipe by mistake must not hang; regular files ignore it.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self.fd)
        except (OSError, ValueError) as error:
            self.close()
            raise _cannot_open(path, error) from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise UnreadableCorpus(f"{path}: expected a regular file, found another kind", received=str(path))
        self.size_bytes = status.st_size
        self.mtime_ns = status.st_mtime_ns

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def head(self, count: int) -> bytes:
        """Return the first `count` bytes, fewer where the file is shorter."""
        return self.read(0, min(count, self.size_bytes))

    def read(self, offset: int, count: int) -> bytes:
        """Return exactly `count` bytes from byte `offset`; both inside the size seen at opening.

        Raises:
            CorpusChanged: the file has become shorter.
            ReadFailed: the disk did not deliver.
        """
        buffer = bytearray(count)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset`, as `read` does; the GIL is released while the disk works."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise ReadFailed(
                    f"{self.name}: reading {len(buffer)} bytes at byte {offset} failed: {error.strerror}",
                    remedy="check the disk or the network mount, then run corpus-server verify",
                ) from error
            if count == 0:
                raise CorpusChanged(
                    f"{self.name}: {self.size_bytes} bytes at opening, now it ends at byte {offset + done}",
                    remedy="put the file back, or restart the server to serve the new one",
                )
            done += count

    def is_resident(self, offset: int) -> bool:
        """Tell whether the page cache holds the byte at `offset`; False where it cannot be known.

        Not by mincore, which tells only the file's owner, nor cachestat, which is the same since Linux 6.14.
        A page that is missing is on its way after the question.
        """
        try:
            return os.preadv(self.fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except (OSError, AttributeError):  # no such flag on this system, or this file system
            return False

    def check_unchanged(self) -> None:
        """Raise CorpusChanged if size or modification time differ from opening."""
        try:
            status = os.fstat(self.fd)
        except OSError as error:
            raise ReadFailed(f"{self.name}: fstat failed: {error.strerror}") from error
        if status.st_size != self.size_bytes:
            what = f"{self.size_bytes} bytes at opening, {status.st_size} now"
        elif status.st_mtime_ns != self.mtime_ns:
            what = "written to since it was opened"
        else:
            return
        raise CorpusChanged(
            f"{self.name}: {what}; a served shard must not change",
            remedy="put the file back, or restart the server to serve the new one",
        )

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _cannot_open(path: Path, error: OSError | ValueError) -> UnreadableCorpus:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    remedy = None
    if isinstance(error, OSError):
        if error.errno == errno.EMFILE:
            remedy = "raise the limit of open files (ulimit -n)"
        elif error.errno == errno.EACCES:
            remedy = "give the server's user the right to read it"
    return UnreadableCorpus(
        f"{path}: cannot be opened: {reason}" + (f"; {remedy}" if remedy else ""),
        received=str(path),
        remedy=remedy,
    )
