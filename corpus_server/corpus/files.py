"""One open file: header checks, map and later reads all see the same inode.

A file is opened once, so that nobody can exchange it between the check of its header and the map.
A file that is replaced by rename, or deleted, keeps its old bytes here. `check_unchanged` detects a
file that is changed in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final, Protocol, Self

import numpy as np

from corpus_server import watched
from corpus_server.corpus import guard
from corpus_server.errors import CorpusChanged, CorpusServerError, ReadFailed, UnreadableCorpus
from corpus_server.user_files import open_fd

_REOPEN: Final = (
    "check the file with corpus-server verify, then restart the server, or run the command again, to read it "
    "as it is now"
)
_MAP_NORESERVE: Final = 0x4000  # addresses only, no memory
HUGE_PAGE: Final = 2**21


class Closing:
    """A context manager that closes itself."""

    def close(self) -> None:
        """Release what is held; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class OpenFile(Closing):
    """A file of a corpus, open for reading; one descriptor, mapped or not.

    In `stores`, a file in an object store derives from this class and gets its bytes in another way.

    Attributes:
        path, size_bytes: at opening.
        name: of the file in the corpus; the file's own unless set.
        corpus: the name of its corpus, once that is open; errors name both.
        fd: descriptor, -1 when closed.
        is_local: it lies on this machine, and is always mapped.
    """

    is_local: ClassVar = True
    size_bytes: int

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.corpus = ""
        self.fd = -1
        self._guarded: guard.GuardedRange | None = None
        try:
            self.fd, status = open_fd(path)
        except OSError as error:
            what = f"cannot be opened: {error.strerror}"
            raise unreadable(path, what, _open_remedy(error.errno)) from error
        self.size_bytes = status.st_size
        self._opened = status
        self._change: str | None = None  # what `check_unchanged` found first
        self._is_reported = False
        watched.opened(self)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # An attached file may still be read through its map. A process that ends closes its files by itself,
        # and may have taken the names out of this module that `close` needs.
        if self.is_local and not is_ending():
            self.close()

    @property
    def key(self) -> str:
        """Text that changes with the content, as far as that can be told without reading it."""
        status = self._opened
        its = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return " ".join(map(str, its))

    @property
    def full_name(self) -> str:
        """What errors call the file."""
        return f"corpus {self.corpus!r}: {self.name}" if self.corpus else self.name

    def unreadable(self, what: str, remedy: str) -> UnreadableCorpus:
        """Return the error for this file."""
        return unreadable(self.path, what, remedy).about(self.corpus)

    def head(self, count: int) -> bytes:
        """Return the first `count` bytes, or the whole file if it is shorter."""
        return self.read(0, min(count, self.size_bytes))

    def read(self, offset: int, count: int) -> bytes:
        """Return exactly `count` bytes from byte `offset`, which lie inside the size at opening."""
        buffer = bytearray(count)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset`, without the GIL.

        Raises:
            CorpusChanged: the file is not what was opened.
            ReadFailed: the disk, or the store, did not deliver.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise ReadFailed(
                    f"{self.full_name}: reading {len(buffer)} bytes at byte {offset} failed: "
                    f"{error.strerror}",
                    remedy="check the disk or the network mount, then run corpus-server verify",
                ) from error
            if count == 0:
                self._is_reported = True
                raise CorpusChanged(
                    f"{self.full_name}: {self.size_bytes} bytes at opening, now it ends at byte "
                    f"{offset + done}",
                    remedy=_REOPEN,
                )
            done += count

    def map(self, data: range | None = None) -> memoryview:
        """Return a read-only map of the whole file, which must not be empty.

        The file keeps it under guard until `close`; the last view of it unmaps. A command, too, goes on
        after a page that cannot be read: it looks at all files before it shows anything, see `watched`.

        Args:
            data: bytes that will be read; None: any. What lies in an object store can be read in no others,
                and only while an extent of it is held, see `stores`.
        """
        if self._status().st_size < self.size_bytes:
            what = "cannot be mapped: it is shorter than when it was opened"
            raise self.unreadable(what, "check that it is not being written")
        if watched.is_watching():
            guard.install()
        mapped = reserve(self.path, self.size_bytes)
        map_over(self.path, address_of(mapped), len(mapped), self.fd)
        self._guarded = guard.guard(address_of(mapped), self.size_bytes)
        return memoryview(mapped)

    def is_resident(self, offset: int) -> bool:
        """Tell whether the page cache holds the byte at `offset`; False if the system cannot tell.

        `mincore` and, since Linux 6.14, `cachestat` answer only the file's owner. This way has a side
        effect: the kernel starts to read a page that is missing. A fast disk delivers it before the call
        ends, so the thread must not have asked a disk for anything, either.
        """
        try:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock  # blocks asked of disks
            is_there = os.preadv(self.fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
            return is_there and resource.getrusage(resource.RUSAGE_THREAD).ru_inblock == before
        except (OSError, AttributeError):  # the system or this file system has no such flag
            return False

    def drop(self, offset: int, count: int) -> None:
        """Take whole pages of bytes [offset, offset + count) out of the page cache; never fails."""
        with contextlib.suppress(OSError, AttributeError):  # closed meanwhile; not Linux
            os.posix_fadvise(self.fd, offset, count, os.POSIX_FADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raise if bytes copied from the file or its map may be wrong; costs one `fstat`.

        Compares size, modification time and inode change time (ctime). Programs set the modification
        time back (`rsync --inplace -t`, `cp -p`), but none can set the ctime. The ctime also changes with
        permissions, owner and links, and the kernel does not say which it was: a chmod and a rewrite
        between two checks look like a chmod alone, and a sample of the content misses a rewritten
        part. Therefore every new ctime counts as a change, until the file is opened again. The one
        exception is a file that no longer has a name, because replacing a shard by rename must not
        interrupt its readers. `docs/formats.md` lists the changes that stay undetected.

        A page of the map that could not be read holds zeros, and is an error until the file is opened again.
        """
        self._change = self._change or self._find_change()
        num_faults = 0 if self._guarded is None else self._guarded.num_faults
        if num_faults:  # if the file was truncated after the first look, that is the reason to report
            self._change = self._change or self._find_change()
        self._is_reported |= self._change is not None or num_faults > 0
        if self._change is not None:
            detail = f"{self.full_name}: {self._change}; a file must not change while it is read"
            raise CorpusChanged(detail, remedy=_REOPEN)
        if num_faults:
            raise ReadFailed(
                f"{self.full_name}: the disk did not deliver {num_faults} pages",
                remedy="look at the kernel's log of the machine that holds the shard, run corpus-server "
                "verify, then restart the server, or run the command again",
            )

    def unreported(self) -> CorpusServerError | None:
        """Return what `check_unchanged` would raise, unless an error has said it already."""
        if not self._is_reported:
            try:
                self.check_unchanged()
            except CorpusServerError as error:
                self._is_reported = False
                return error
        return None

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check before and after a block that reads the map, also where the block fails.

        Numbers that a changed file holds lead anywhere: an error that they cause says `CorpusChanged`.
        """
        self.check_unchanged()
        try:
            yield
        finally:
            self.check_unchanged()

    def _find_change(self) -> str | None:
        then, now = self._opened, self._status()
        if now.st_size != then.st_size:
            return f"{then.st_size} bytes at opening, {now.st_size} now"
        if now.st_mtime_ns != then.st_mtime_ns:
            return "written to since it was opened"
        if now.st_ctime_ns == then.st_ctime_ns or now.st_nlink == 0:
            return None
        # tmpfs and XFS set the ctime of a file that is being deleted a moment before its link count.
        time.sleep(0.001)
        if self._status().st_nlink == 0:
            return None
        return (
            "its inode changed since it was opened: the file was rewritten with its modification time "
            "restored, or its permissions, owner or links were changed"
        )

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self.fd)
        except OSError as error:
            raise ReadFailed(f"{self.full_name}: fstat failed: {error.strerror}") from error

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            watched.closing(self)
        if self._guarded is not None:
            guard.release(self._guarded)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Files(Protocol):
    """Opens the token files and loss masks of a corpus in an object store."""

    def prepare(self, paths: Sequence[Path]) -> None:
        """Note which files will be opened."""

    def open(self, path: Path) -> OpenFile:
        """Open one of them."""


def reserve(path: Path, num_bytes: int) -> mmap.mmap:
    """Reserve addresses for the map of a file; reading them before `map_over` ends the process.

    Python's own map of a file would duplicate the descriptor, and so halve the number of shards.

    Linux aligns only whole huge pages to huge pages. A gather from a map that is not aligned takes 1.2 times
    as long, so those of large files end beyond the file. The map of the file must be as long, so that it is
    one map.
    """
    if num_bytes >= HUGE_PAGE:
        num_bytes += -num_bytes % HUGE_PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        return mmap.mmap(-1, num_bytes, flags=flags, prot=0)
    except OSError as error:
        raise _unmappable(path, error.errno or 0) from error


def map_over(path: Path, address: int, num_bytes: int, fd: int, offset: int = 0) -> None:
    """Map a file from an offset over addresses that were reserved; the reservation again if `fd` is -1."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    protection = mmap.PROT_READ if fd >= 0 else 0
    if guard.libc().mmap(address, num_bytes, protection, flags | guard.MAP_FIXED, fd, offset) != address:
        raise _unmappable(path, ctypes.get_errno())
    if fd >= 0:
        # Without this hint, a cold read of one window reads megabytes ahead.
        guard.libc().madvise(address, num_bytes, mmap.MADV_RANDOM)


def _open_remedy(code: int | None) -> str | None:
    """Return what to do about a file that cannot be opened."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        errno.EMFILE: f"raise the limit of open files (ulimit -n, LimitNOFILE), which is {limit}: each token "
        "file takes one, and one more if it has a document index",
        errno.ENFILE: "raise the system's limit of open files (sysctl fs.file-max)",
        errno.EACCES: "give the server's user the right to read it",
    }.get(code or 0)


def _unmappable(path: Path, code: int) -> UnreadableCorpus:
    remedy = (
        "each token file takes one map: raise vm.max_map_count (sysctl), and look at the limit of addresses "
        "(ulimit -v)"
    )
    return unreadable(path, f"cannot be mapped: {os.strerror(code)}", remedy)


def address_of(mapped: mmap.mmap) -> int:
    """Return the address at which a map begins."""
    return int(np.frombuffer(mapped, np.uint8, count=1).ctypes.data)


def unreadable(path: Path, what: str, remedy: str | None = None) -> UnreadableCorpus:
    """Return the error for a file that cannot be served: its path, what is wrong, what to do."""
    detail = f"{path}: {what}" if remedy is None else f"{path}: {what}; {remedy}"
    return UnreadableCorpus(detail, received=str(path), remedy=remedy)
