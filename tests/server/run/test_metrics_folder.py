"""Servers that share a state folder: each says so, and none takes another one's counts."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from corpus_server.run.metrics_folder import metrics_folder
from tests.conftest import ServedCorpus
from tests.serving import RunningServer


def test_a_server_that_finds_others_on_its_state_folder_says_so(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    one, other = (RunningServer({"web": corpora["web"].path}, tmp_path / name) for name in ("one", "other"))
    one.state_dir = other.state_dir = tmp_path / "state"
    says = f"state_dir {tmp_path / 'state'} is shared with 1 other server"
    with one:
        assert "is shared with" not in one.log()
        one.restart()  # what it left is no other server
        assert "is shared with" not in one.log()
        with other:
            assert other.log().count(says) == 1
            one.restart()
            assert one.log().count(says) == 1
            names = {each.name for each in (tmp_path / "state" / "metrics").iterdir()}
            assert names == {str(one.pid), str(other.pid)}


def test_a_folder_stays_as_long_as_its_server_lives_in_whatever_container(tmp_path: Path) -> None:
    """Process numbers of another container mean nothing here, or another process."""
    parent = tmp_path / "metrics"
    for name in ("999999999", str(os.getpid()), "1", "999999998"):
        (parent / name).mkdir(parents=True)
    (parent / "1" / "lock").touch()  # of a killed server
    held = [(parent / name / "lock").open("wb") for name in ("999999999", str(os.getpid()))]
    for each in held:
        fcntl.flock(each, fcntl.LOCK_EX)
    with metrics_folder(tmp_path) as folder:
        names = {"999999999", str(os.getpid()), f"{os.getpid()}-2"}
        assert {each.name for each in parent.iterdir()} == names
        assert folder.name == f"{os.getpid()}-2"
    assert {each.name for each in parent.iterdir()} == names - {folder.name}
    for each in held:
        each.close()
    with metrics_folder(tmp_path) as folder:
        assert [each.name for each in parent.iterdir()] == [str(os.getpid())]
