"""The folder that holds extents of object stores as local files.

    CACHE/lock                       locked while room is made and a file is begun; says how much is there
    CACHE/extents/KEY/tokens         an extent; KEY is OBJECT/START-STOP, of one version of an object
    CACHE/extents/KEY/.tokens.tmp    one that is being staged; whoever writes it has it locked
    CACHE/wrong/KEY                  of an object whose bytes have another MD5 than its store says: this one
    CACHE/corpora/...                see `mirror`
    CACHE/boot                       which start of the machine wrote all of this
    CACHE/limit                      how many bytes it holds; locked by every process that uses the folder
    CACHE/given-up                   8 bytes, others after each extent that was taken away from everybody
    CACHE/room-asked                 8 bytes, others each time that a request found no room for its extents

Any number of processes share it. All locks are `flock`s on open files, so the kernel releases those of a
process that is killed. An extent in use is locked by everyone who has it mapped, and a file is removed only
by someone who has locked it alone. When an extent was last wanted is the modification time of its folder:
touching the file would look like a change to whoever has it mapped.

The sum in the lock file is kept because a look at 4,000 extents takes 20 ms; each look corrects it.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple
from weakref import finalize

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.publish import publishing, remove_stale
from corpus_server.errors import CacheFull, CorpusServerError, UnreadableCorpus
from corpus_server.settings import DEFAULT_EXTENT_BYTES

PLANNED_SECONDS: Final = 10.0
"""An extent that somebody wanted so lately is planned for: it makes room only for a request that waits."""

_SPARE_SHARE: Final = 64
"""Where room is made, a further 64th of the cache is freed: a look at all extents serves for many."""

_NAME: Final = "tokens"
_SIGN_BYTES: Final = 8
_SEALED_SECONDS: Final = 10**9
"""Time of modification of every extent, which every file system can keep: whoever writes to one changes it,
also while no server runs."""

_OF_OTHERS: Final = (
    "it is another user's: have all who share the folder read and write what is in it (chmod -R g+rwX), "
    "or name another folder with --cache-dir"
)

_log = logging.getLogger("corpus_server")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class _Kept(NamedTuple):
    """An extent that is there, whole or being staged; ordered by when it was last wanted."""

    wanted_seconds: float
    key: str
    num_bytes: int


def bytes_of(key: str) -> tuple[int, int]:
    """Return which bytes [start, stop) of its object an extent holds, by its key."""
    start, _, stop = key.rpartition("/")[2].partition("-")
    return int(start), int(stop)


class Cache:
    """The cache folder, as one process sees it; safe to use from several threads.

    Args:
        folder: made if it is missing.
        limit_bytes: of all extents in it, whole or being staged; while other processes use the folder with
            another limit, theirs holds.
        extent_bytes: of each, but for the last ones of files; a multiple of the page size.

    Attributes:
        limit_bytes: which holds.
        num_evicted: extents that this process has removed to make room.
        needed_in: says of keys when their extents are needed next, in any unit; infinity if it does not know.
        on_attached: told of an `Extent` that a copy has mapped, so that somebody unmaps it in the end.

    Raises:
        UnreadableCorpus: the folder cannot be written to.
    """

    def __init__(self, folder: Path, limit_bytes: int, extent_bytes: int = DEFAULT_EXTENT_BYTES) -> None:
        self.folder = folder
        self.extent_bytes = extent_bytes
        self._has_said_changed = False
        self.num_evicted = 0
        self.needed_in: Callable[[Sequence[str]], Iterable[float]] = lambda keys: [math.inf] * len(keys)
        self.on_attached: Callable[[Any], object] = lambda extent: None
        self.extents = folder / "extents"
        self.corpora = folder / "corpora"
        self._wrong = folder / "wrong"
        self._folders = (self.extents, self.corpora, self._wrong)
        try:
            for each in self._folders:
                each.mkdir(parents=True, exist_ok=True)
            self._permissions = folder.stat().st_mode & 0o777
            with self.locked() as lock:
                self._empty_after_reboot()
                self.share(*self._folders, *(folder / name for name in ("lock", "boot")))
                self._count_again(lock)
                self.limit_bytes = self._agreed(limit_bytes)
                self._given_up = self._sign_file("given-up")
                self._room_asked = self._sign_file("room-asked")
        except OSError as error:
            remedy = "name a folder that can be written to with --cache-dir"
            raise UnreadableCorpus(
                f"the cache folder {folder} cannot be used: {_said(error)}",
                remedy=_OF_OTHERS if _is_denied_in(folder, error) else remedy,
            ) from error

    def share(self, *made: Path | int) -> None:
        """Give files and folders that this process has made the permissions of the cache folder.

        Otherwise the umask decides, and servers of several users who share the folder have different ones.
        """
        for each in made:
            with suppress(PermissionError):  # another user made it
                now = os.stat(each).st_mode  # noqa: PTH116 - some are descriptors
                mine = self._permissions if stat.S_ISDIR(now) else self._permissions & 0o666
                if now & 0o777 != mine:
                    os.chmod(each, stat.S_IMODE(now) & ~0o777 | mine)  # noqa: PTH101

    def has(self, key: str) -> bool:
        """Tell whether an extent is there, whole."""
        return os.path.exists(f"{self.extents}/{key}/{_NAME}")  # noqa: PTH110 - thousands are asked for each second

    def keys(self) -> set[str]:
        """Return the keys of all extents, and of those that are being staged."""
        try:
            names = os.listdir(self.extents)  # noqa: PTH208 - a third of the time, of thousands
        except OSError:  # the whole cache was removed
            return set()
        return {key for name in names for key in self._keys_of(name)}

    def _keys_of(self, object_key: str) -> list[str]:
        try:
            names = os.listdir(f"{self.extents}/{object_key}")  # noqa: PTH208
        except OSError:  # its last extent was removed a moment ago
            return []
        return [f"{object_key}/{name}" for name in names]

    def parts_of(self, object_key: str) -> dict[str, tuple[int, int]]:
        """Return the extents of an object that are there: keys, and which bytes [start, stop) each holds."""
        return {key: bytes_of(key) for key in self._keys_of(object_key) if self.has(key)}

    def held(self) -> tuple[int, int]:
        """Return how many extents there are, with those that are being staged, and their bytes."""
        try:
            with self.locked() as lock:
                return len(self.keys()), lock.num_bytes
        except OSError:  # as in `keys`
            return 0, 0

    def open(self, key: str) -> OpenFile | None:
        """Open an extent, which stays until the file is closed; None if it is not there.

        Raises:
            UnreadableCorpus: it is there and cannot be opened, for example for want of descriptors.
        """
        while self.has(key):
            try:
                file = OpenFile(self.extents / key / _NAME)
            except UnreadableCorpus as error:
                if isinstance(error.__cause__, FileNotFoundError):  # it was removed a moment ago
                    continue
                if (path := self.extents / key / _NAME).is_dir():  # nothing that a server makes
                    shutil.rmtree(path, ignore_errors=True)
                    return None
                raise
            try:
                fcntl.flock(file.fd, fcntl.LOCK_SH)
                status = os.fstat(file.fd)
                # Between opening and locking, it may have been removed.
                if status.st_nlink and int(status.st_mtime) == _SEALED_SECONDS:
                    return file
            except OSError as error:
                file.close()
                raise file.unreadable(f"cannot be locked: {error.strerror}", "check its disk") from error
            file.close()
            if status.st_nlink:
                if not self._has_said_changed:  # a cache that was copied by hand has thousands
                    _log.warning("extent %s was changed in the cache: such ones are staged anew", key)
                self._has_said_changed = True
                self.discard(key)
                return None
        return None

    def touch(self, key: str, *, planned: bool = True) -> None:
        """Note that an extent is wanted; if not `planned`, that it was until now."""
        then = time.time() - PLANNED_SECONDS
        with suppress(OSError):  # only the user who made it may say another time than now
            os.utime(f"{self.extents}/{key}", None if planned else (then, then))

    def discard(self, key: str) -> None:
        """Remove an extent that is not what it was when it was staged, unless somebody has it open."""
        with suppress(OSError), self.locked() as lock:  # the whole cache may have been removed
            lock.add(-self._remove(key))

    def sync(self, key: str) -> None:
        """Wait until an extent is on the disk. If the disk fails, take the extent away from everybody.

        After a failed write the kernel may forget pages, and read others in their place.
        """
        file = self.open(key)
        if file is None:
            return
        with file:
            try:
                os.fdatasync(file.fd)
            except OSError as error:
                _log.error("the cache's disk did not take extent %s: %s", key, error.strerror)
                self._revoke(key)

    def mark(self, key: str) -> Path:
        """Return the file that says that an object is wrong."""
        return self._wrong / key

    def wrong_md5(self, key: str) -> str | None:
        """Return the MD5 of an object that was found to be wrong; else None."""
        try:
            return self.mark(key).read_text()
        except OSError:
            return None

    def mark_wrong(self, key: str, md5: str, extents: Iterable[str]) -> None:
        """Note that an object is wrong, and take its extents away from everybody."""
        with suppress(OSError):  # a full disk: it is found out again
            self.mark(key).write_text(md5)
            self.share(self.mark(key))
        for each in extents:
            self._revoke(each)

    def given_up(self) -> bytes:
        """Return what differs from before once any process has taken an extent away from everybody.

        Read after a copy, it says whether each local file must be looked at, at the price of one such look.
        """
        try:
            return os.pread(self._given_up, _SIGN_BYTES, 0)
        except OSError:
            return os.urandom(_SIGN_BYTES)  # nobody knows

    def ask_for_room(self) -> None:
        """Have all processes unmap extents that nobody reads just now, so that a request finds room."""
        with suppress(OSError):
            os.pwrite(self._room_asked, os.urandom(_SIGN_BYTES), 0)

    def room_asked(self) -> bytes:
        """Return what differs from before once any process has asked for room."""
        with suppress(OSError):
            return os.pread(self._room_asked, _SIGN_BYTES, 0)
        return b""

    def _sign_file(self, name: str) -> int:
        """Return the descriptor of a file in which any process tells all others that something happened."""
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o666)
        finalize(self, os.close, file)
        self.share(self.folder / name)
        if os.fstat(file).st_size < _SIGN_BYTES:
            os.pwrite(file, bytes(_SIGN_BYTES), 0)  # now, while the disk has room
        return file

    def _revoke(self, key: str) -> None:
        """Remove an extent. Whoever has it open finds that it was removed, and serves no more of it."""
        with suppress(OSError):
            (self.extents / key / _NAME).unlink()
        with suppress(OSError):  # afterwards: who sees it looks. Random, so that it never comes again
            os.pwrite(self._given_up, os.urandom(_SIGN_BYTES), 0)

    @contextmanager
    def filling(self, key: str, num_bytes: int, *, urgent: bool) -> Iterator[BinaryIO]:
        """Yield a file of a size, which becomes an extent when the block ends without an error.

        Args:
            urgent: a request waits for it, see `PLANNED_SECONDS`.

        Raises:
            CacheFull: there is no room for it: within the limit, or on the disk.
            BlockingIOError: someone else is staging it, or has just done so.
        """
        folder = self.extents / key
        try:
            with self.locked() as lock, ExitStack() as opened:  # nobody counts one that has no room
                folder.mkdir(parents=True, exist_ok=True)
                opened.callback(self._remove_unfinished, key)
                self.share(folder.parent, folder)
                file = opened.enter_context(publishing(folder / _NAME, durable=False))
                self.share(file.fileno())
                if self.has(key):  # to replace it would take it from whoever has it open
                    raise BlockingIOError(f"{key} is there")
                self._make_room(lock, num_bytes, urgent=urgent)
                file.truncate(num_bytes)  # so that others count it
                lock.add(num_bytes)
                begun = opened.pop_all()
            try:
                if num_bytes:  # all of it now: a full disk shows before anything is fetched
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                yield file
                file.flush()
                os.utime(file.fileno(), (_SEALED_SECONDS, _SEALED_SECONDS))
                begun.close()
            except BaseException:
                with ExitStack() as locked:  # else others count it in between
                    with suppress(OSError):
                        locked.enter_context(self.locked()).add(-num_bytes)
                    begun.__exit__(*sys.exc_info())
                raise
        except BlockingIOError:
            raise
        except OSError as error:
            remedy = "make room on its disk, or give a smaller --cache-bytes"
            if not self.extents.is_dir():
                remedy = "somebody removed the folder while the server used it: restart the server"
            elif _is_denied_in(self.folder, error):
                remedy = _OF_OTHERS
            raise CacheFull(
                f"{num_bytes} bytes of an extent cannot be written to {self.folder}: {_said(error)}",
                remedy=remedy,
            ) from error

    @contextmanager
    def locked(self) -> Iterator[_Lock]:
        """Be the only one, of all processes, who adds or removes files; for milliseconds."""
        with (self.folder / "lock").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield _Lock(file)

    def _agreed(self, limit_bytes: int) -> int:
        """Return the limit of all who use the folder, this process from now on, too; the folder is locked.

        With limits of their own, the smallest one would empty the folder, and starve while others plan for
        what they take for room.
        """
        file = os.open(self.folder / "limit", os.O_RDWR | os.O_CREAT, 0o666)
        finalize(self, os.close, file)
        self.share(self.folder / "limit")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody uses the folder
            text = os.pread(file, 32, 0)
            agreed = int(text) if text.isdigit() else limit_bytes
        else:
            agreed = limit_bytes
            os.truncate(file, 0)
            os.pwrite(file, b"%d" % limit_bytes, 0)
        fcntl.flock(file, fcntl.LOCK_SH)  # nobody asks for more: that needs the lock of the folder
        if agreed != limit_bytes:
            _log.warning(
                "the cache folder %s holds at most %d bytes: another process uses it with this limit; "
                "--cache-bytes %d counts once no process uses it",
                *(self.folder, agreed, limit_bytes),
            )
        return agreed

    def _empty_after_reboot(self) -> None:
        """Empty the cache if the machine was started again: nobody waits until shards are on the disk.

        To wait would make staging as slow as the disk, and halve it where that writes 500 MB/s.
        """
        boot, now = self.folder / "boot", b""
        with suppress(OSError):  # other systems than Linux
            now = _BOOT_ID.read_bytes()
        if boot.exists() and boot.read_bytes() != now:
            for folder in self._folders:
                shutil.rmtree(folder)
                folder.mkdir()
        boot.write_bytes(now)

    def _make_room(self, lock: _Lock, num_bytes: int, *, urgent: bool) -> None:
        """Remove extents until `num_bytes` more fit: those needed last, or else those wanted longest ago."""
        if lock.num_bytes + num_bytes <= self.limit_bytes:
            return
        kept = self._count_again(lock)
        needed_in = self.needed_in([each.key for each in kept])
        kept = [each for _, each in sorted(zip((-when for when in needed_in), kept, strict=True))]
        excess = lock.num_bytes + num_bytes - self.limit_bytes
        spare = self.limit_bytes // _SPARE_SHARE
        now = time.time()
        for each in kept:
            if excess <= 0 and (spare := spare - each.num_bytes) < 0:
                return
            # A time that is yet to come was written before the clock was set back.
            planned = abs(now - each.wanted_seconds) <= PLANNED_SECONDS
            if (urgent and excess > 0) or not planned:
                removed = self._remove(each.key)
                self.num_evicted += removed > 0  # one thread at a time: the cache is locked
                excess -= removed
                lock.add(-removed)
        if excess > 0:
            raise CacheFull(
                f"no room for an extent of {num_bytes} bytes: --cache-bytes is {self.limit_bytes}, and all "
                f"that the cache {self.folder} holds is in use or planned",
                remedy="give a larger --cache-bytes to the servers that share the folder, and start all anew",
            )

    def _count_again(self, lock: _Lock) -> list[_Kept]:
        """Remove what killed processes left, and correct the sum of bytes; return all extents."""
        found = []
        for key in self.keys():
            path = f"{self.extents}/{key}"
            with suppress(OSError):  # it was removed, or is nothing of ours
                if (names := os.listdir(path)) != [_NAME]:  # noqa: PTH208 - half of the time
                    self._remove_unfinished(key)
                    names = os.listdir(path)  # noqa: PTH208
                num_bytes = sum(os.stat(f"{path}/{name}").st_size for name in names)  # noqa: PTH116
                found.append(_Kept(os.stat(path).st_mtime, key, num_bytes))  # noqa: PTH116
        lock.num_bytes = sum(each.num_bytes for each in found)
        return found

    def _remove_unfinished(self, key: str) -> None:
        """Remove what a killed process left."""
        with suppress(OSError):  # someone is writing it, or has just removed it
            remove_stale(self.extents / key / _NAME)
        with suppress(OSError):  # there is an extent in it
            self._remove_folder(key)

    def _remove(self, key: str) -> int:
        """Remove an extent that nobody has in use, and return how many bytes that freed."""
        path = self.extents / key / _NAME
        try:
            with OpenFile(path) as file:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                self._remove_folder(key)
                return file.size_bytes
        except (OSError, CorpusServerError):
            return 0

    def _remove_folder(self, key: str) -> None:
        """Remove the empty folder of an extent, and that of its object with the last one."""
        folder = self.extents / key
        folder.rmdir()
        with suppress(OSError):
            folder.parent.rmdir()


class _Lock:
    """The locked file; while it is locked, `num_bytes` in it are those of all extents."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @property
    def num_bytes(self) -> int:
        """Return the sum; more than any limit if the file says none, so that it is counted."""
        text = os.pread(self._file.fileno(), 32, 0)
        return int(text) if text.isdigit() else 2**62

    @num_bytes.setter
    def num_bytes(self, num_bytes: int) -> None:
        os.truncate(self._file.fileno(), 0)
        os.write(self._file.fileno(), b"%d" % max(0, num_bytes))

    def add(self, num_bytes: int) -> None:
        """Add to the sum."""
        self.num_bytes += num_bytes


def _is_denied_in(folder: Path, error: OSError) -> bool:
    """Tell whether something in a folder, which itself may be used, is another user's."""
    denied = isinstance(error, PermissionError) and bool(error.filename)
    is_inside = denied and folder in Path(os.fsdecode(error.filename)).parents
    return is_inside and os.access(folder, os.W_OK | os.X_OK)


def _said(error: OSError) -> str:
    """Return what happened, and to which file if it was not allowed."""
    denied = isinstance(error, PermissionError) and error.filename
    return f"{error.strerror}: {os.fsdecode(error.filename)}" if denied else f"{error.strerror}"
