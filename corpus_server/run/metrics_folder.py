"""The folder by which a server's workers share what they count, and which other servers use the state folder.

    STATE_DIR/metrics/PID/lock        locked by the supervisor until it ends
                          *.json ...  see `metrics/shared.py`

The kernel releases the lock of a process however it ends, and knows it in every container. So a folder whose
lock is free was left by a server that was killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from corpus_server.errors import InvalidParameter
from corpus_server.user_files import locked_folder, reason_of

_log = logging.getLogger("corpus_server")


@contextmanager
def metrics_folder(state_dir: Path) -> Iterator[Path]:
    """Make the folder of this server's metrics, and remove those that killed servers left; say who is beside.

    It is removed at the end.

    Raises:
        InvalidParameter: the state folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            parent = state_dir / "metrics"
            parent.mkdir(parents=True, exist_ok=True)
            with locked_folder(parent):
                num_others = sum(not _remove_left(each) for each in parent.iterdir())
                folder = _new_folder(parent)
                stack.enter_context(_locked(folder))
        except OSError as error:
            raise InvalidParameter(
                f"state_dir {state_dir} cannot be written: {reason_of(error)}; give another with --state-dir",
                parameter="state_dir",
            ) from error
        if num_others:
            others = f"{num_others} other server{'s' if num_others > 1 else ''}"
            _log.info(
                "state_dir %s is shared with %s: so are plans, tables, and how many plans a token may keep; "
                "unless that is meant, give each server a folder of its own with --state-dir",
                state_dir,
                others,
            )
        try:
            yield folder
        finally:
            # Renamed first: a thread that still adds up an ended worker's counts finds no folder to write to.
            gone = folder.with_name(f"{folder.name}.ended")
            with suppress(OSError):
                shutil.rmtree(folder.rename(gone), ignore_errors=True)


def _remove_left(folder: Path) -> bool:
    """Remove the folder of a server that has ended; return False if it goes on."""
    try:
        with _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    except OSError:  # it has no lock: workers made it anew, which outlived their server or its state folder
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _new_folder(parent: Path) -> Path:
    """Make a folder named for this process; in another container a server may have the same number."""
    for number in count(1):
        folder = parent / (f"{os.getpid()}-{number}" if number > 1 else f"{os.getpid()}")
        with suppress(FileExistsError):
            folder.mkdir()
            (folder / "lock").touch()
            return folder
    raise AssertionError


def _locked(folder: Path) -> IO[bytes]:
    """Return the open file whose lock keeps a folder.

    Raises:
        BlockingIOError: another process has it.
    """
    file = (folder / "lock").open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file
