"""The server of a path is shared, ends with the last loader, and notices files that change."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from corpus_client import (
    errors,
)
from tests.contract.by_path.processes import Corpora, Runtime
from tests.contract.conftest import make_loader
from tests.corpora import some_tokens, write_raw
from tests.serving import environment, wait_until


def test_a_loader_that_cannot_be_made_leaves_no_server(corpora: Corpora, runtime: Runtime) -> None:
    with pytest.raises(errors.ServerError) as caught:
        make_loader(corpora["web"].path, corpus=None, seq_len=10**6)
    runtime.check_nothing_left()
    assert caught.tb is not None  # which keeps the loader


def test_loaders_of_a_path_share_a_server_that_ends_with_the_last(corpora: Corpora, runtime: Runtime) -> None:
    path = corpora["web"].path
    with make_loader(path, corpus=None) as train:
        with make_loader(str(path), corpus=None, order="sequential") as evaluation:
            next(train), next(evaluation)
            (pid,) = runtime.servers()
        next(train)
        assert runtime.servers() == [pid]
        assert train.peek(5).step == 5
    runtime.check_nothing_left()
    assert train.peek(6).step == 6  # of a closed loader: a server for this one question
    runtime.check_nothing_left()


def test_a_dropped_loader_lets_its_server_end(corpora: Corpora, runtime: Runtime) -> None:
    loader = make_loader(corpora["web"].path, corpus=None)
    next(loader)
    del loader
    runtime.check_nothing_left()


def test_folders_of_servers_that_ended_are_removed_a_day_later(
    corpora: Corpora, runtime: Runtime, tmp_path: Path
) -> None:
    """And no other: not that of last night's job, and not that of a server which runs for days."""
    folder, days_ago = runtime.folder / "corpus-server", time.time() - 2 * 86_400

    def folders() -> set[Path]:
        return {each for each in folder.iterdir() if each.is_dir()}

    def made(name: str) -> Path:
        return write_raw(tmp_path / name, some_tokens(1000))

    make_loader(made("ended.bin"), corpus=None).close()
    (ended,) = folders()
    with make_loader(made("runs.bin"), corpus=None) as runs:
        (lives,) = folders() - {ended}
        wait_until(lambda: len(runtime.servers()) == 1, "the first server does not end")
        for each in (ended, lives):
            os.utime(each, (days_ago, days_ago))
        make_loader(made("young.bin"), corpus=None).close()
        (young,) = folders() - {lives}
        next(runs)
    make_loader(made("other.bin"), corpus=None).close()
    assert {lives, young} < folders()


def test_plans_are_found_again_in_the_state_folder(corpora: Corpora) -> None:
    with make_loader(corpora["web"].path, corpus=None) as loader:
        plan_id = loader.plan_id
    (state,) = Path(os.environ["XDG_STATE_HOME"], "corpus-server").iterdir()
    command = [sys.executable, "-m", "corpus_server", "plans", "list", "--state-dir", str(state)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert plan_id[:12] in done.stdout


@pytest.mark.parametrize("way", ["returns", "exits", "raises", "killed", "forks"])
def test_nothing_outlives_a_process(corpora: Corpora, runtime: Runtime, way: str) -> None:
    """`forks`: killed, and survived by a worker that it forked."""
    script = f"""
import os, signal, sys, time
from corpus_client import ArrayLoader
loader = ArrayLoader({str(corpora["web"].path)!r}, seq_len=16, global_batch_size=24)
next(loader)
if {way!r} == "forks" and os.fork() == 0:
    time.sleep(3600)
    os._exit(0)
if {way!r} == "exits": sys.exit(3)
if {way!r} == "raises": raise RuntimeError
if {way!r} in ("killed", "forks"): os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), stdout=subprocess.DEVNULL, check=False
    )
    assert done.returncode == {"exits": 3, "raises": 1, "killed": -9, "forks": -9}.get(way, 0)
    wait_until(lambda: not runtime.servers(), "the server is left")
    for each in runtime.processes():  # the forked worker
        each.kill()


def test_the_port_of_a_configuration_is_for_another_server(corpora: Corpora, tmp_path: Path) -> None:
    """Whoever may connect to a port may read; and the server that it is for may be running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = f'[server]\nport = {port}\n[corpora.web]\npath = "{corpora["web"].path}"\n'
        (tmp_path / "corpus.toml").write_text(config)
        with make_loader(tmp_path / "corpus.toml") as loader:
            next(loader)


def test_files_that_changed_under_another_loader_are_refused_at_once(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", np.arange(5000) % 500)
    with make_loader(path, corpus=None) as first:
        next(first)
        write_raw(path, np.arange(5000) % 499)
        with pytest.raises(errors.LocalCopyMismatch, match="close all loaders of this path"):
            make_loader(path, corpus=None)
    with make_loader(path, corpus=None) as anew:
        next(anew)


def test_a_file_that_changes_in_use_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", np.arange(500_000) % 500)
    with make_loader(path, corpus=None) as loader:
        next(loader)
        write_raw(path, np.arange(400_000) % 499)
        with pytest.raises(errors.LocalCopyMismatch) as caught:
            deque(loader, maxlen=0)
    assert f"{path}" in str(caught.value)
    assert "close all loaders of this path, and make them anew" in str(caught.value)
    assert "copy it again" not in str(caught.value)
