"""The files of a plan's table: written once, and mapped while they are those that its manifest says.

STATE_DIR/tables/KEY/table.json         what decides the table, and digests of its files
                     begins.npy ...     KEY: digest of what decides it
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import xxhash

from corpus_server.plan.tables import Job, Table

FORMAT: Final = 5
"""Of the files; another one gets other keys, so that no process reads what it does not know."""

MANIFEST: Final = "table.json"

_log = logging.getLogger(__name__)


class TableInUse:
    """A table of a plan, mapped or in memory.

    Attributes:
        table: its arrays.
        num_bytes: of memory; 0 if it is mapped.

    Args:
        files: that are mapped, and what each was when its digest was compared.
    """

    def __init__(
        self, table: Table, num_bytes: int, files: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> None:
        self.table, self.num_bytes, self._files = table, num_bytes, files

    def is_changed(self) -> bool:
        """Tell whether a mapped file was written since. One that was replaced or removed is still whole."""
        for path, identity in self._files.items():
            try:
                about = os.stat(path)  # noqa: PTH116 - half the time of Path.stat, for 16 files at each request
            except FileNotFoundError:
                continue
            if (about.st_dev, about.st_ino) == identity[:2] and _identity(about) != identity:
                return True
        return False


def write_table(folder: Path, job: Job, table: Table) -> None:
    """Write the files of a table to a folder that nobody reads yet."""
    for name, array in zip(job.table._fields, table, strict=True):
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    with (folder / MANIFEST).open("w") as file:
        file.write(_described(job, folder))
        file.flush()
        os.fsync(file.fileno())


def mapped_table(path: Path, job: Job) -> TableInUse | None:
    """Map the table in a folder and note its use; None if it is not there, damaged or another one."""
    try:
        names = [str(path / f"{name}.npy") for name in job.table._fields]
        files = {name: _identity(Path(name).stat()) for name in names}
        arrays = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
        if (path / MANIFEST).read_text() != _described(job, path):
            raise ValueError(f"its files are not those of {MANIFEST}, or those of another table")
        os.utime(path)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, FileNotFoundError) and not path.exists():
            return None
        _log.warning("a damaged table is built again: %s: %s", path, error)
        shutil.rmtree(path, ignore_errors=True)
        return None
    # Plain arrays: those of class memmap cost more at each use.
    return TableInUse(job.table(*(array.view(np.ndarray) for array in arrays)), 0, files)


def _described(job: Job, folder: Path) -> str:
    """Return what decides a table and what its files hold, so that no other numbers are taken for it."""
    files = [folder / f"{name}.npy" for name in job.table._fields]
    digests = [_file_digest(file, _identity(file.stat())) for file in files]
    return json.dumps({**_decides(job), "files": digests}, sort_keys=True)


@lru_cache(4096)
def _file_digest(path: Path, identity: tuple[int, ...]) -> str:
    """Read a file, once while it is the same one: plans of many seeds share a table of gigabytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _decides(job: Job) -> dict[str, Any]:
    return {"format": FORMAT, "table": job.table.__qualname__, **job.decides}


def key_of(job: Job) -> str:
    """Return the digest of what decides the table."""
    return hashlib.sha256(json.dumps(_decides(job), sort_keys=True).encode()).hexdigest()
