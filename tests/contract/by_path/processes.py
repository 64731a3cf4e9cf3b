"""The processes of loaders that are given a path, and the lines that their ranks write."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil
import xxhash

from tests.conftest import ServedCorpus
from tests.contract.by_path.ranks import PLAN
from tests.contract.conftest import make_loader
from tests.serving import wait_until

Corpora = dict[str, ServedCorpus]


class Runtime:
    """The folder in which servers of paths lie, and the processes that know of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Return the processes that were started with this folder and whose command has a word."""
        found, mark = [], f"XDG_RUNTIME_DIR={self.folder}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(psutil.Error, OSError):
                if mark in path.read_bytes() and (pid := int(path.parent.name)) != os.getpid():
                    each = psutil.Process(pid)
                    command = " ".join([each.name(), *each.cmdline()])
                    if "resource_tracker" not in command and word in command:
                        found.append(each)
        return found

    def servers(self) -> list[int]:
        """Return the supervisors."""
        return [each.pid for each in self.processes("while-locked") if each.name() != "corpus-worker"]

    def check_nothing_left(self) -> None:
        """Wait until no process and no socket is left, and no child of this one is a zombie."""

        def left() -> list[Any]:
            zombies = []
            for each in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    zombies += [each] if each.status() == psutil.STATUS_ZOMBIE else []
            return [*self.processes(), *self.folder.rglob("socket"), *zombies]

        wait_until(lambda: not left(), lambda: f"left: {left()}", 60)


def expected_lines(url: list[str], rank: int, world_size: int, num_steps: int) -> list[str]:
    """Return what a rank must write, by a server at a URL."""
    with make_loader(
        url, **PLAN, rank=rank, world_size=world_size, dtype=None, num_steps=num_steps
    ) as loader:
        return [f"{batch.step} {xxhash.xxh3_64_hexdigest(batch.tokens.numpy())}" for batch in loader]
