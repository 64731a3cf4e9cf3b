"""A file system that fails under a real server: rows 14 and 16 of the catalogue."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import some_tokens, write_raw
from tests.faults.failing_disk import FailingDisk, failing_disk, why_not
from tests.serving import (
    RunningServer,
    ask,
    check_problem,
    command,
    environment,
    run_here,
    wait_until,
)
from tests.stores import WebServer

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no FUSE here: {why_not()}")

NUM_TOKENS = 8_000_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path) as disk:
        yield disk


def plan(server: RunningServer, seed: int = 0) -> str:
    document = {
        "seq_len": 64,
        "seed": seed,
        "stages": [{"global_batch_size": 16, "mixture": {"web": 1}}],
    }
    return str(server.post_plan(document).json()["id"])


@pytest.mark.parametrize(("how", "slug"), [("eio", "read-failed"), ("short", None)])
def test_reads_that_fail_are_refused_and_never_tokens(
    disk: FailingDisk, how: str, slug: str | None, tmp_path: Path
) -> None:
    """What lies in the page cache may still be right; everything else is a 503, and the process lives on."""
    tokens = some_tokens(NUM_TOKENS)
    write_raw(disk.path / "web.bin", tokens)
    good = write_raw(tmp_path / "good.bin", tokens)
    (tmp_path / "reference").mkdir()
    with (
        RunningServer({"web": disk.path / "web.bin"}, tmp_path) as server,
        RunningServer({"web": good}, tmp_path / "reference") as reference,
    ):
        target = f"/v1/batches?plan={plan(server)}&checksum=true&step="
        assert plan(reference) in target
        pid = server.worker_pids()
        right = server.get(f"{target}0")
        assert right.status == 200
        _drop_pages(disk.path / "web.bin")
        disk.fail(how)
        refused = set()
        with closing(server.connect()) as connection:
            for step in range(1, 60):
                response = ask(connection, f"{target}{step}")
                if response.status == 200:
                    assert response.body == reference.get(f"{target}{step}").body, f"wrong tokens in {step}"
                else:
                    refused.add(check_problem(response, 503, response.json()["type"])["type"])
        assert refused, "nothing was refused: nothing was tested"
        assert slug is None or refused == {slug}
        assert server.get("/healthz").status == 200
        assert server.worker_pids() == pid


def test_plans_on_a_full_disk_are_refused_and_old_ones_are_served(disk: FailingDisk, tmp_path: Path) -> None:
    """Catalogue row 38: it is said to the client, at /readyz and in the log, and ends by itself."""
    good = write_raw(tmp_path / "web.bin", np.arange(4000))
    server = RunningServer({"web": good}, tmp_path)
    server.state_dir = disk.path / "state"
    with server:
        old = plan(server)
        disk.fail("enospc")
        for seed in range(1, 4):
            document = {
                "seq_len": 32,
                "seed": seed,
                "stages": [{"global_batch_size": 4, "mixture": {"web": 1}}],
            }
            response = server.post_plan(document)
            problem = check_problem(response, 503, "state-unavailable")
            assert response.headers["Retry-After"] == "5"
            assert str(tmp_path) not in problem["detail"]
            check_problem(server.get("/readyz"), 503, "not-ready")
        assert server.get(f"/v1/batches?plan={old}&step=3").status == 200
        assert plan(server) == old
        disk.fail("")
        assert server.post_plan(document).status == 200
        assert server.get("/readyz").status == 200
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("how", ["eio", "enospc"])
def test_a_cache_on_a_disk_that_fails_gives_errors_and_never_tokens(
    disk: FailingDisk, how: str, tmp_path: Path
) -> None:
    """A shard of an object store is staged or read on a disk that fails: a 503, and the process lives on."""
    tokens = some_tokens(2_000_000)
    cache = disk.path / "cache"
    with WebServer({f"/{n}.bin": tokens[n * 10**6 :][: 10**6].tobytes() for n in range(2)}) as web:
        corpora = {f"web{n}": f"{web.url}/{n}.bin" for n in range(2)}
        with RunningServer(corpora, tmp_path, arguments=["--cache-dir", str(cache)]) as server:
            pid = server.worker_pids()

            def check(n: int, step: int) -> int:
                query = {"corpus": f"web{n}", "seq_len": 99, "batch_size": 1, "order": "sequential"}
                response = server.get("/v1/batches", **query, step=step)
                start = n * 10**6 + 99 * step
                if response.status == 200:
                    assert response.body == tokens[start : start + 100].tobytes(), f"wrong tokens in {step}"
                else:
                    check_problem(response, 503, response.json()["type"])
                return response.status

            wait_until(lambda: check(0, 0) == 200)  # this disk is slow where the machine is busy
            for copy in cache.glob("extents/*/*/tokens"):
                _drop_pages(copy)
            disk.fail(how)
            # A refused one waits for seconds, in which the shard might have come.
            assert any(check(n, step) == 503 for n, step in ((0, 3000), (0, 9000), (1, 0), (1, 0)))
            disk.fail("")
            wait_until(lambda: check(1, 1) == 200)
            assert server.worker_pids() == pid


def test_a_slow_disk_is_staged_before_a_job_and_what_is_here_is_served_while_it_hangs(
    disk: FailingDisk, tmp_path: Path
) -> None:
    """A network's disk as `file://`: rows are those of the file, and a failure is one line in the log."""
    folder, num_tokens, cache = disk.path / "web", 250_000, tmp_path / "cache"
    folder.mkdir()
    shards = [some_tokens(num_tokens, seed=number) for number in range(4)]
    for number, tokens in enumerate(shards):
        _drop_pages(write_raw(folder / f"{number}.bin", tokens))
    disk.fail("slow")
    document = {
        "seq_len": 64,
        "order": "sequential",
        "stages": [{"global_batch_size": 16, "mixture": {"web": 1}}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(document))
    options = ("--cache-dir", str(cache), "--extent-bytes", "65536")
    arguments = ("--plan", tmp_path / "plan.json", "--steps", "0:100", "--json", *options)
    done = run_here("stage", f"web=file://{folder}", *arguments)
    assert (done.returncode, json.loads(done.stdout)["fetched_bytes"]) == (0, 4 * 65536), done.stderr
    with RunningServer({"web": f"file://{folder}"}, tmp_path, arguments=options) as server:
        plan = str(server.post_plan(document).json()["id"])

        def ask(step: int) -> str:
            """Return "" for the right rows, else the type of the problem."""
            began = time.monotonic()
            response = server.get("/v1/batches", plan=plan, step=step)
            assert time.monotonic() - began < 30
            if response.status != 200:
                return str(check_problem(response, 503, response.json()["type"])["type"])
            shard, first = divmod(16 * step, (num_tokens - 65) // 64 + 1)
            starts = 64 * np.arange(first, first + 16)
            assert response.body == shards[shard][starts[:, None] + np.arange(65)].tobytes()
            return ""

        disk.fail("hang")
        assert [ask(step) for step in range(0, 100, 9)] == [""] * 12
        assert ask(300) == "not-staged"
        disk.fail("eio")
        wait_until(lambda: ask(300) == "store-failed")
        assert ask(99) == ""
        assert server.log().count("was not staged") == 1
        disk.fail("slow")
        wait_until(lambda: ask(300) == "")


def _drop_pages(path: Path) -> None:
    """Ask the kernel to forget what it has of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


FAILS_ONCE_MAPPED = """
import os
import subprocess
from pathlib import Path
from corpus_server.corpus.files import OpenFile

opened = OpenFile.map

def map_and_fail(self, *given):
    mapped = opened(self, *given)
    if self.path.name == "web.bin.documents":
        Path({fault!r}).write_text("eio")
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return mapped

OpenFile.map = map_and_fail
"""


def test_a_command_whose_disk_fails_says_so_and_publishes_nothing(disk: FailingDisk, tmp_path: Path) -> None:
    path = write_raw(disk.path / "web.bin", some_tokens(200_000, vocabulary=10))
    assert run_here("index", f"{path},eot=0").returncode == 0
    program = FAILS_ONCE_MAPPED.format(fault=str(tmp_path / "fault"))
    done = subprocess.run(
        command("view", "create", path, "--out", tmp_path / "new.view", prelude=f"exec({program!r})"),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "web.bin.documents: the disk did not deliver " in done.stderr
    assert not (tmp_path / "new.view").exists()
