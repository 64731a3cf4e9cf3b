"""Check out another commit beside this tree, so that its server can be measured in the same run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.processes import ROOT


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Yield a git worktree of a commit in a temporary folder; remove it afterwards.

    Raises:
        SystemExit: git does not know the commit.
    """
    with tempfile.TemporaryDirectory(prefix="bench-before-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", "--force", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
