"""Limit processes by control groups of version 1 or 2: memory with its page cache, and the rate of a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def limited(
    pids: Sequence[int], num_bytes: int, *, path: Path, disk_rate: int | None = None
) -> Iterator[bool]:
    """Limit processes until the block ends; yield whether that was possible: it takes root.

    Args:
        num_bytes: of memory, page cache included.
        path: a file on the disk.
        disk_rate: bytes/s that they may read from the disk.
    """
    device = path.stat().st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    version_1 = {_ROOT / "memory": {"memory.limit_in_bytes": str(num_bytes)}}
    version_2 = {_ROOT: {"memory.max": str(num_bytes)}}
    if disk_rate is not None:
        version_1[_ROOT / "blkio"] = {"blkio.throttle.read_bps_device": f"{disk} {disk_rate}"}
        version_2[_ROOT]["io.max"] = f"{disk} rbps={disk_rate}"
    groups: list[Path] = []
    try:
        yield any(_join(pids, limits, groups) for limits in (version_1, version_2))
    finally:
        for group in groups:
            # A group that holds processes cannot be removed.
            for pid in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()


def _join(pids: Sequence[int], limits: dict[Path, dict[str, str]], groups: list[Path]) -> bool:
    """Put processes into new groups below these; return whether that was possible."""
    try:
        for root, files in limits.items():
            group = root / f"bench-{os.getpid()}-{pids[0]}"
            group.mkdir()
            groups.append(group)
            for name, text in files.items():
                (group / name).write_text(text)
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True
