"""The folder that holds shards of object stores as local files.

    CACHE/lock                      locked while room is made and a file is begun
    CACHE/shards/KEY/tokens         a whole shard; KEY names one version of one object
    CACHE/shards/KEY/.tokens.tmp    one that is being staged; whoever writes it has it locked
    CACHE/corpora/...               see `mirror`
    CACHE/boot                      which start of the machine wrote all of this

Any number of processes share it. All locks are `flock`s on open files, so the kernel releases those of a
process that is killed. A shard in use is locked by everyone who has it mapped, and a file is removed only by
someone who has locked it alone. When a shard was last wanted is the modification time of its folder: touching
the file would look like a change to whoever has it mapped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.publish import publishing, remove_stale
from corpus_server.errors import CacheFull, CorpusServerError, UnreadableCorpus

PLANNED_SECONDS: Final = 10.0
"""A shard that somebody wanted so lately is planned for: it makes room only for a request that waits."""

_NAME: Final = "tokens"
_log = logging.getLogger("corpus_server")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class _Kept(NamedTuple):
    """A folder of a shard; ordered by when the shard was last wanted."""

    wanted_seconds: float
    folder: Path
    num_bytes: int


class Cache:
    """The cache folder, as one process sees it; safe to use from several threads.

    Args:
        folder: made if it is missing.
        limit_bytes: of all shards in it, whole or being staged.

    Attributes:
        num_evicted: shards that this process has removed to make room.

    Raises:
        UnreadableCorpus: the folder cannot be written to.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.num_evicted = 0
        self.shards = folder / "shards"
        self.corpora = folder / "corpora"
        try:
            self.shards.mkdir(parents=True, exist_ok=True)
            self.corpora.mkdir(exist_ok=True)
            with self.locked():
                self._empty_after_reboot()
                self._remove_unfinished()
        except OSError as error:
            raise UnreadableCorpus(
                f"the cache folder {folder} cannot be used: {error.strerror}",
                remedy="name a folder that can be written to with --cache-dir",
            ) from error

    def has(self, key: str) -> bool:
        """Tell whether a shard is there, whole."""
        return (self.shards / key / _NAME).exists()

    def open(self, key: str) -> OpenFile | None:
        """Open a shard, which stays until the file is closed; None if it is not there.

        Raises:
            UnreadableCorpus: it is there and cannot be opened, for example for want of descriptors.
        """
        while self.has(key):
            try:
                file = OpenFile(self.shards / key / _NAME)
            except UnreadableCorpus as error:
                if isinstance(error.__cause__, FileNotFoundError):  # it was removed a moment ago
                    continue
                raise
            try:
                fcntl.flock(file.fd, fcntl.LOCK_SH)
                # Between opening and locking, it may have been removed.
                if os.fstat(file.fd).st_nlink:
                    return file
            except OSError as error:
                file.close()
                raise file.unreadable(f"cannot be locked: {error.strerror}", "check its disk") from error
            file.close()
        return None

    def touch(self, key: str, *, planned: bool = True) -> None:
        """Note that a shard is wanted; if not `planned`, that it was until now."""
        seconds = time.time() - (0 if planned else PLANNED_SECONDS)
        with suppress(OSError):
            os.utime(self.shards / key, (seconds, seconds))

    def discard(self, key: str) -> None:
        """Remove a shard that is not what it was when it was staged; whoever has it open keeps it."""
        with suppress(OSError), self.locked():  # the whole cache may have been removed
            _remove(self.shards / key)

    def sync(self, key: str) -> None:
        """Wait until a shard is on the disk. If the disk fails, take the shard away from everybody.

        After a failed write the kernel may forget pages, and read others in their place. Whoever has the file
        mapped finds that it was removed, and serves nothing more of it.
        """
        file = self.open(key)
        if file is None:
            return
        with file:
            try:
                os.fdatasync(file.fd)
            except OSError as error:
                _log.error("the cache's disk did not take shard %s: %s", key, error.strerror)
                with suppress(OSError):
                    (self.shards / key / _NAME).unlink()

    @contextmanager
    def filling(self, key: str, num_bytes: int, *, urgent: bool) -> Iterator[BinaryIO]:
        """Yield a file of a size, which becomes a shard when the block ends without an error.

        Args:
            urgent: a request waits for it, see `PLANNED_SECONDS`.

        Raises:
            CacheFull: there is no room for it: within the limit, or on the disk.
            BlockingIOError: someone else is staging it.
        """
        folder = self.shards / key
        try:
            with ExitStack() as stack:
                with self.locked():
                    folder.mkdir(exist_ok=True)
                    stack.callback(_remove_unfinished, folder)
                    file = stack.enter_context(publishing(folder / _NAME, durable=False))
                    self._make_room(num_bytes, urgent=urgent)
                    file.truncate(num_bytes)  # so that others count it
                if num_bytes:  # all of it now: a full disk shows before anything is fetched
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                yield file
        except BlockingIOError:
            raise
        except OSError as error:
            raise CacheFull(
                f"{num_bytes} bytes of a shard cannot be written to {self.folder}: {error.strerror}",
                remedy="make room on its disk, or give a smaller --cache-bytes",
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one, of all processes, who adds or removes files; for milliseconds."""
        with (self.folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _empty_after_reboot(self) -> None:
        """Empty the cache if the machine was started again: nobody waits until shards are on the disk.

        To wait would make staging as slow as the disk, and halve it where that writes 500 MB/s.
        """
        boot, now = self.folder / "boot", b""
        with suppress(OSError):  # other systems than Linux
            now = _BOOT_ID.read_bytes()
        if boot.exists() and boot.read_bytes() != now:
            for folder in (self.shards, self.corpora):
                shutil.rmtree(folder)
                folder.mkdir()
        boot.write_bytes(now)

    def _make_room(self, num_bytes: int, *, urgent: bool) -> None:
        """Remove the shards wanted longest ago until `num_bytes` more fit."""
        self._remove_unfinished()
        kept = sorted(self._kept())
        excess = sum(each.num_bytes for each in kept) + num_bytes - self.limit_bytes
        now = time.time()
        for each in kept:
            if excess <= 0:
                return
            # A time that is yet to come was written before the clock was set back.
            planned = abs(now - each.wanted_seconds) <= PLANNED_SECONDS
            if (urgent or not planned) and _remove(each.folder):
                self.num_evicted += 1  # one thread at a time: the cache is locked
                excess -= each.num_bytes
        if excess > 0:
            raise CacheFull(
                f"no room for a shard of {num_bytes} bytes: --cache-bytes is {self.limit_bytes}, and all "
                f"that the cache {self.folder} holds is in use or planned",
                remedy="give a larger --cache-bytes",
            )

    def _remove_unfinished(self) -> None:
        for folder in self.shards.iterdir():
            _remove_unfinished(folder)

    def _kept(self) -> list[_Kept]:
        found = []
        for folder in self.shards.iterdir():
            with suppress(FileNotFoundError, NotADirectoryError):
                num_bytes = sum(file.stat().st_size for file in folder.iterdir())
                found.append(_Kept(folder.stat().st_mtime, folder, num_bytes))
        return found


def _remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left."""
    with suppress(OSError):  # someone is writing it, or has just removed it
        remove_stale(folder / _NAME)
    with suppress(OSError):  # there is a shard in it
        folder.rmdir()


def _remove(folder: Path) -> bool:
    """Remove a shard that nobody has in use, and return whether that was done."""
    try:
        with OpenFile(folder / _NAME) as file:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / _NAME).unlink()
        folder.rmdir()
    except (OSError, CorpusServerError):
        return False
    return True
