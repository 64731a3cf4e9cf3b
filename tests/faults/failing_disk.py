"""A folder on a disk that fails on demand: FUSE in a process of its own, which passes everything on.

    python -m tests.faults.failing_disk SOURCE MOUNT FAULT

The file FAULT holds what happens from now on: `eio` (reads fail), `short` (reads return half of what is
there), `enospc` (writes fail), `hang` (reads and look-ups wait until the fault is another), `slow` (they wait
for 2 ms each, as over a network), or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serving import environment, wait_until

ATTRIBUTES = ("st_mode", "st_size", "st_mtime", "st_atime", "st_ctime", "st_uid", "st_gid", "st_nlink")


class FailingDisk:
    """A mounted folder; `fail` says how it fails from now on.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path, fault: Path) -> None:
        self.path = path
        self._fault = fault

    def fail(self, how: str) -> None:
        """Fail as `how` says; nothing: work again."""
        self._fault.write_text(how)


def why_not() -> str | None:
    """Return why no file system can be mounted here, or None."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not there or may not be opened"
    if shutil.which("fusermount3") is None:
        return "fusermount3 (package fuse3) is not installed"
    try:
        import mfusepy  # noqa: F401 - loads libfuse
    except (ImportError, OSError) as error:
        return f"mfusepy cannot be loaded: {error}"
    return None


@contextmanager
def failing_disk(folder: Path) -> Iterator[FailingDisk]:
    """Mount a disk that keeps its files in `folder`/source; unmounted when the block ends."""
    source, mount, fault = folder / "source", folder / "disk", folder / "fault"
    source.mkdir(exist_ok=True)
    mount.mkdir()
    fault.write_text("")
    words = ["-m", "tests.faults.failing_disk", *map(str, (source, mount, fault))]
    process = subprocess.Popen([sys.executable, *words], env=environment(), stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: mount.is_mount() or process.poll() is not None, "no file system was mounted")
        if process.poll() is not None:
            raise RuntimeError("the file system was not mounted; it says why above")
        yield FailingDisk(mount, fault)
    finally:
        fault.write_text("")
        # Lazily: a file may still be open where a test failed.
        subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


def serve(source: str, mount: str, fault: str) -> None:
    """Mount `source` and serve it until it is unmounted."""
    import mfusepy  # needs libfuse, which not every machine has

    class Disk(mfusepy.Operations):  # type: ignore[misc]
        """Every operation is passed on to the same path below `source`."""

        def _check(self, operation: str) -> None:
            # Read anew each time: a few microseconds beside the way through the kernel.
            while (how := Path(fault).read_text()) == "hang" and operation in ("read", "open", "getattr"):
                time.sleep(0.02)
            if how == "slow" and operation in ("read", "open", "getattr"):
                time.sleep(0.002)
            if how == "eio" and operation == "read":
                raise mfusepy.FuseOSError(errno.EIO)
            if how == "enospc" and operation in ("write", "create", "mkdir", "truncate"):
                raise mfusepy.FuseOSError(errno.ENOSPC)
            self.short = how == "short"

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            self._check("getattr")
            status = os.lstat(source + path)
            return {name: getattr(status, name) for name in ATTRIBUTES}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *(each.name for each in Path(source + path).iterdir())]

        def open(self, path: str, flags: int) -> int:
            self._check("open")
            return os.open(source + path, flags)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            self._check("create")
            return os.open(source + path, os.O_RDWR | os.O_CREAT, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            self._check("read")
            data = os.pread(fh, size, offset)
            return data[: len(data) // 2] if self.short else data

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            self._check("write")
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: Any = None) -> None:
            self._check("truncate")
            os.truncate(source + path, length)

        def mkdir(self, path: str, mode: int) -> None:
            self._check("mkdir")
            Path(source + path).mkdir(mode)

        def rmdir(self, path: str) -> None:
            Path(source + path).rmdir()

        def unlink(self, path: str) -> None:
            Path(source + path).unlink()

        def rename(self, old: str, new: str, flags: int = 0) -> None:
            Path(source + old).rename(source + new)

        def link(self, target: str, source_: str) -> None:
            os.link(source + source_, source + target)

        def chmod(self, path: str, mode: int) -> None:
            Path(source + path).chmod(mode)

        def utimens(self, path: str, times: Any = None) -> None:
            os.utime(source + path, times)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def flush(self, path: str, fh: int) -> None:
            self._check("flush")

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            os.fsync(fh)

        def statfs(self, path: str) -> dict[str, int]:
            stats = os.statvfs(source)
            return {name: getattr(stats, name) for name in dir(stats) if name.startswith("f_")}

    mfusepy.FUSE(Disk(), mount, foreground=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
