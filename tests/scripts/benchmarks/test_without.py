"""Servers of another commit, and servers with optimisations patched away."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import corpus
from scripts.benchmarks.checkout import checked_out
from scripts.benchmarks.servers import LAUNCHER, batches_path, serving
from scripts.benchmarks.without import TRICKS
from scripts.processes import ROOT, get

PATCHED = [trick.name for trick in TRICKS if trick.patch is not None]


def known(commit: str) -> bool:
    """Whether this is a git checkout that holds a commit."""
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def launch(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from scripts.benchmarks.without import *\n{program}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_trick_of_this_tree_can_be_taken_away() -> None:
    """If this fails, an optimisation was moved or deleted: move or delete its trick."""
    done = launch("for trick in TRICKS: trick.patch and trick.patch()")
    assert done.returncode == 0, done.stderr


def test_a_patch_reaches_modules_that_imported_the_name() -> None:
    done = launch(
        "import corpus_server.catalog, corpus_server.settings\n"
        "replace('corpus_server.settings:CorpusSpec', 'patched')()\n"
        "assert corpus_server.catalog.CorpusSpec == corpus_server.settings.CorpusSpec == 'patched'"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["corpus_server.gone:name", "corpus_server.settings:Settings.gone"])
def test_a_patch_of_what_is_gone_fails_loudly(target: str) -> None:
    done = launch(f"replace({target!r}, None)()")
    assert done.returncode == 1
    assert f"expected an optimisation at {target}, got" in done.stderr


def test_a_server_runs_with_a_patch_and_with_settings(tmp_path: Path) -> None:
    path = corpus.make(tmp_path, 10**5)
    asked = batches_path(corpus=corpus.NAME, seq_len=16, batch_size=4, step=3)
    with (
        serving({corpus.NAME: path}) as plain,
        serving({corpus.NAME: path}, without=PATCHED[0], settings={"gather_threads": 1}) as patched,
    ):
        assert get(plain.url, asked) == get(patched.url, asked)
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in patched.pids]
        assert all(LAUNCHER.stem in command for command in commands)
        assert len(patched.pids) == len(plain.pids)
        assert (patched.state_dir / "corpus.toml").read_text() == "[server]\ngather_threads = 1\n"


@pytest.mark.skipif(not known("HEAD"), reason="this is no git checkout")
def test_another_commit_is_checked_out_and_removed() -> None:
    with checked_out("HEAD") as tree:
        assert (tree / "corpus_server" / "settings.py").exists()
    assert not tree.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(tree) not in listed.stdout


@pytest.mark.skipif(not known("HEAD"), reason="this is no git checkout")
def test_a_commit_that_git_does_not_know_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"git worktree add .* failed: "), checked_out("0" * 40):
        pytest.fail("there is no such commit")
