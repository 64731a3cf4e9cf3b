"""Servers of files that are staged, `file://`: what is mapped, what makes room, what counts as changed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.server.stores.served import metrics
from tests.serving import WITHOUT_PRIVILEGES, Response, RunningServer, command, environment, wait_until
from tests.stores import once_staged

pytest.importorskip("obstore")


def test_a_reader_that_stalls_gets_the_rest_of_what_is_on_this_machine(tmp_path: Path) -> None:
    """Its extents are unmapped meanwhile, so that they could make room for those that others wait for."""
    (tmp_path / "web").mkdir()
    content = write_raw(tmp_path / "web" / "0.bin", some_tokens(10**7)).read_bytes()
    options = ("--cache-dir", str(tmp_path / "cache"), "--extent-bytes", str(2**20))
    with RunningServer({"web": f"file://{tmp_path}/web"}, tmp_path, arguments=options) as server:
        target = "/v1/corpora/web/tokens?start=0&count=10000000&format=raw"
        wait_until(lambda: server.get(target).body == content)  # all of it is on this machine then
        with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n".encode())
            begin = connection.recv(4096)
            time.sleep(4)  # longer than extents stay mapped that nobody asks for
            with connection.makefile("rb") as rest:
                body = (begin + rest.read()).partition(b"\r\n\r\n")[2]
        assert body == content


@pytest.mark.parametrize("workers", [1, 2])
def test_a_plan_whose_extents_fill_the_cache_makes_room_for_the_request_of_another(
    tmp_path: Path, workers: int
) -> None:
    """Also where somebody has just read them, so that they are mapped, in any process."""
    corpora = {}
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        write_raw(tmp_path / name / "0.bin", some_tokens(2 * 10**6, seed=seed))
        corpora[name] = f"file://{tmp_path / name}"
    options = ("--cache-dir", str(tmp_path / "cache"), "--extent-bytes", "65536")
    options = (*options, "--cache-bytes", str(30 * 65536))
    with RunningServer(corpora, tmp_path, workers=workers, arguments=options) as server:
        plans = {}
        for name in corpora:
            stages = [{"global_batch_size": 4, "mixture": {name: 1}}]
            posted = server.post_plan({"seq_len": 16, "order": "sequential", "stages": stages})
            plans[name] = str(posted.json()["id"])
        for step in range(3):
            asked = {"plan": plans["a"], "step": step}
            assert once_staged(lambda asked=asked: server.get("/v1/batches", **asked)).status == 200
        wait_until(lambda: metrics(server)["corpus_cache_bytes"] == 30 * 65536)
        for start in [*range(0, 30 * 32768, 32768)] * workers:
            its = {"start": start, "count": 32768, "format": "raw"}
            response = once_staged(lambda its=its: server.get("/v1/corpora/a/tokens", **its))
            assert response.status == 200
        expected = (tmp_path / "b" / "0.bin").read_bytes()[:34]
        # Until the rank of `a` counts as gone, which takes longer, there was no room.
        wait_until(
            lambda: server.get("/v1/batches", plan=plans["b"], step=0).body[:34] == expected, seconds=30
        )


@pytest.mark.parametrize("modified", [1, -(10**9)])
def test_a_file_that_was_rewritten_in_place_is_another_one_whatever_its_time_of_modification(
    tmp_path: Path, modified: int
) -> None:
    """`rsync --inplace -t`, or `tar` with a fixed time: inode, size and time stay, and the ctime does not."""
    path = tmp_path / "web" / "0.bin"
    path.parent.mkdir()
    old, new = (some_tokens(10**6, seed=seed).tobytes() for seed in range(2))
    options = ("--cache-dir", str(tmp_path / "cache"), "--extent-bytes", "65536")

    def write(content: bytes, modified: int) -> None:
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(content)
        os.utime(path, (modified, modified))

    def ask(start: int) -> Response:
        return server.get("/v1/corpora/web/tokens", start=start, count=10_000, format="raw")

    write(old, modified)
    with RunningServer({"web": f"file://{path.parent}"}, tmp_path, arguments=options) as server:
        wait_until(lambda: ask(0).body == old[:20_000])
        write(new, modified - 10**8 if modified < 0 else modified)
        wait_until(lambda: ask(500_000).json()["type"] == "corpus-changed")
    with RunningServer({"web": f"file://{path.parent}"}, tmp_path, arguments=options) as server:
        wait_until(lambda: ask(0).body == new[:20_000], seconds=30)


@pytest.mark.parametrize(
    ("closed", "said"),
    [
        ("web", "that the server's user may read what is there"),
        ("home", "name a folder that can be written to with --cache-dir"),
    ],
)
def test_what_the_user_may_not_do_is_no_matter_of_the_network(tmp_path: Path, closed: str, said: str) -> None:
    for name in ("web", "home"):
        (tmp_path / name).mkdir()
    write_raw(tmp_path / "web" / "0.bin", some_tokens(1000))
    words = command("inspect", f"file://{tmp_path}/web")
    (tmp_path / closed).chmod(0)
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{WITHOUT_PRIVILEGES}; import os, sys; os.execv(sys.argv[1], sys.argv[1:])",
                *words,
            ],
            env=environment(HOME=str(tmp_path / "home")),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        (tmp_path / closed).chmod(0o755)
    assert done.returncode == 2, done.stderr
    assert "Permission denied" in done.stderr
    assert said in done.stderr
