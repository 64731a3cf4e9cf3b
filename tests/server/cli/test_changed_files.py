"""A file that changes while a command reads it: one error, exit code 1, and nothing printed or published."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from corpus_server.corpus.verify import record
from tests.corpora import some_tokens, spec, write_raw
from tests.serving import command, environment, run_here

TOKENS, ENDS, VIEW = "0.bin", "0.bin.documents", "old.view"

# From outside nobody can hit the moment between opening and reading.
CHANGED = """
import os
from corpus_server.corpus.files import OpenFile

opened = OpenFile.map

def map_and_change(self, *given):
    mapped = opened(self, *given)
    if self.path.name == {name!r}:
        size = self.size_bytes
        os.truncate(self.path, {size})
    return mapped

OpenFile.map = map_and_change
"""
CUT, GROWN = "0", "size + 8"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of two shards with documents and recorded hashes, a view of it, and a plan."""
    web = tmp_path / "web"
    web.mkdir()
    for number in range(2):
        write_raw(web / f"{number}.bin", some_tokens(20_000, vocabulary=100, seed=number))
    assert run_here("index", f"{web},eot=0").returncode == 0
    record(spec(web))
    assert run_here("view", "create", web, "--out", tmp_path / VIEW).returncode == 0
    stages = [{"global_batch_size": 4, "mixture": {"web": 1}}]
    (tmp_path / "plan.json").write_text(json.dumps({"seq_len": 16, "stages": stages}))
    (tmp_path / "list").write_text("3\n")
    (tmp_path / "table.csv").write_text("score\n" + "1\n" * _num_documents(web))
    return tmp_path


def _num_documents(web: Path) -> int:
    return int(json.loads(run_here("inspect", web, "--json").stdout)["num_documents"])


def run_while(
    name: str, size: str, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; the file of this name gets this size once the command has mapped it."""
    return subprocess.run(
        command(*words, prelude=f"exec({CHANGED.format(name=name, size=size)!r})"),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(XDG_STATE_HOME=str(folder / "state"), **variables),
        check=False,
    )


def all_files(folder: Path) -> dict[str, bytes]:
    """Return what the files of a folder hold, but for those that are changed."""
    paths = (each for each in folder.rglob("*") if each.is_file())
    return {str(each): each.read_bytes() for each in paths if each.name not in (TOKENS, ENDS, VIEW)}


FIND = "find web --tokens 1,2 -n 2 --processes"
INDEX_METADATA = "index web --metadata table.csv"
VIEW_CREATE = "view create web --out new.view"


@pytest.mark.parametrize(
    ("words", "name", "size"),
    [
        ("inspect web --json", TOKENS, GROWN),
        ("inspect web --stats", TOKENS, CUT),
        ("inspect web --stats", TOKENS, GROWN),
        ("inspect web?view=old.view", VIEW, CUT),
        ("inspect web?view=old.view --json", VIEW, GROWN),
        ("view show old.view", VIEW, GROWN),
        ("verify --record web", TOKENS, GROWN),
        ("index web,eot=0 --force", TOKENS, CUT),
        ("index web,eot=0 --force", TOKENS, GROWN),
        (INDEX_METADATA, TOKENS, GROWN),
        (VIEW_CREATE, TOKENS, GROWN),
        (VIEW_CREATE, ENDS, CUT),
        (VIEW_CREATE, ENDS, GROWN),
        (f"{VIEW_CREATE} --documents list", ENDS, CUT),
        (f"{FIND} 1 --out report --deny denied", TOKENS, GROWN),
        (f"{FIND} 1 --out report --deny denied", ENDS, CUT),
        (f"{FIND} 1 --json", ENDS, GROWN),
        ("export web --plan plan.json --step 0", TOKENS, CUT),
        ("export web --plan plan.json --step 0", TOKENS, GROWN),
        ("plans make plan.json --corpus web", TOKENS, GROWN),
    ],
)
def test_a_command_refuses_what_it_read_of_a_file_that_changed(
    folder: Path, words: str, name: str, size: str
) -> None:
    before = all_files(folder)
    done = run_while(name, size, folder, *words.split())
    assert done.returncode == 1, done
    assert done.stdout == ""
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error:")]
    assert "Traceback" not in done.stderr
    assert f"{name}: " in line
    assert "bytes at opening" in line
    assert "corpus-server verify" in line
    after = all_files(folder)
    after.pop(str(folder / "report" / "web.runs"), None)  # a pass that is repeated goes on with it
    assert after == before


def test_verify_reports_a_file_that_changes_with_all_other_damage(folder: Path) -> None:
    (folder / "web" / "1.bin").write_bytes(bytes(40_000))
    done = run_while(TOKENS, GROWN, folder, "verify", "web", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert {each["shard"] for each in (*found["problems"], *found["bad_blocks"])} >= {TOKENS, "1.bin"}
    assert "40000 bytes at opening, 40008 now" in done.stdout


def test_a_merge_refuses_a_corpus_that_changes(tmp_path: Path) -> None:
    """Its own links are no change."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
        built = run_here("build", tmp_path / f"{name}.txt", "--tokenizer", "bytes", "--out", tmp_path / name)
        assert built.returncode == 0, built.stderr
    assert run_here("merge", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "both").returncode == 0
    done = run_while("000000.npy", GROWN, tmp_path, "merge", "one", "two", "--out", "other")
    assert (done.returncode, done.stdout) == (1, "")
    assert "000000.npy: " in done.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_large_file_that_is_cut_while_it_is_searched(tmp_path: Path, processes: str) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(20 * 10**9)  # holes: takes a minute to search and no space
    words = (
        "find",
        path,
        "--tokens",
        "1,2",
        "-n",
        "2",
        "--processes",
        processes,
        "--out",
        tmp_path / "report",
    )
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        while not _has_mapped(process.pid, path):
            assert process.poll() is None
            time.sleep(0.01)
        path.write_bytes(b"")
        said = process.communicate()
    assert process.returncode == 1, said
    assert said[0] == ""
    assert "large.bin: 20000000000 bytes at opening, " in said[1]
    assert not list((tmp_path / "report").glob("report.*"))


def _has_mapped(pid: int, path: Path) -> bool:
    return str(path) in Path(f"/proc/{pid}/maps").read_text()
