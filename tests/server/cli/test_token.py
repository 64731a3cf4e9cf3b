"""`corpus-server token`: a token is printed once, and its hash is added to a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from corpus_server.admission.access import Access, read_tokens
from tests.serving import run_here


def make(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here("token", file, *arguments)


def test_tokens_are_added_and_only_their_hashes_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    first = make(file, "training", "--scope", "read:web", "--scope", "plans", "--max-plans", "5")
    second = make(file, "ops.v2", "--scope", "metrics", "--expires", "2999-01-01")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    secrets = [made.stdout.strip() for made in (first, second)]
    callers, _ = read_tokens(file)
    digests = [hashlib.sha256(secret.encode()).digest() for secret in secrets]
    assert [callers[digest].name for digest in digests] == ["training", "ops.v2"]
    assert Access(file).caller(f"Bearer {secrets[0]}").max_plans == 5
    assert not any(secret in file.read_text() for secret in secrets)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.toml"]


def test_json_for_machines(tmp_path: Path) -> None:
    made = make(tmp_path / "tokens.toml", "ops", "--scope", "metrics", "--expires", "2999-01-01", "--json")
    assert made.stderr == ""
    said = json.loads(made.stdout)
    assert Access(tmp_path / "tokens.toml").caller(f"Bearer {said['token']}").name == said["name"] == "ops"
    assert (said["scopes"], said["expires"]) == (["metrics"], "2999-01-01 00:00:00+00:00")


def test_who_could_read_the_file_still_can(tmp_path: Path) -> None:
    """A server under another user reads it by its group, and would not start again otherwise."""
    file = tmp_path / "tokens.toml"
    make(file, "one", "--scope", "read:*")
    file.chmod(0o640)
    with contextlib.suppress(PermissionError):
        os.chown(file, -1, 1)
    before = file.stat()
    assert make(file, "two", "--scope", "read:*").returncode == 0
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_a_name_that_the_file_has_already_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    make(file, "training", "--scope", "read:*")
    before = file.read_text()
    made = make(file, "training", "--scope", "plans")
    assert (made.returncode, made.stdout, file.read_text()) == (2, "", before)
    assert made.stderr == (
        f"error: {file} has a token 'training' already; give another name, or remove [tokens.training]\n"
    )


@pytest.mark.parametrize("what", ["folder", "binary", "no folder", "no TOML", "pipe"])
def test_a_file_that_is_none_is_one_line(tmp_path: Path, what: str) -> None:
    file = tmp_path / ("none/tokens.toml" if what == "no folder" else "tokens.toml")
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    elif what != "no folder":
        file.write_bytes(b"\xff" if what == "binary" else b"[")
    made = make(file, "one", "--scope", "plans")
    assert made.returncode == 2
    (line,) = made.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(file) in line
    assert made.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a b", "--scope", "plans"], "name must be"),
        (["one", "--scope", "plans"], "one"),
        (["two", "--scope", "write"], "tokens.toml: [tokens.two] scopes must be a list of"),
        (["two"], "Missing option"),
        (
            ["two", "--scope", "plans", "--expires", "2020-01-01"],
            "error: expires must be a day that is still to come, got '2020-01-01'",
        ),
    ],
)
def test_a_mistake_leaves_the_file_as_it_was(tmp_path: Path, arguments: list[str], said: str) -> None:
    file = tmp_path / "tokens.toml"
    make(file, "one", "--scope", "read:*")
    before = file.read_bytes()
    made = make(file, *arguments)
    assert made.returncode == 2
    assert said in made.stderr
    assert made.stdout == ""
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.toml"]
