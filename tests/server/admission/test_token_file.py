"""A file of tokens that changes under a running server: catalogue row 39."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from corpus_server.admission.access import SETTLE_SECONDS
from tests.corpora import some_tokens, write_raw
from tests.faults.failing_disk import failing_disk, why_not
from tests.serving import RunningServer, ask, wait_until
from tests.tokens import Tokens

BATCH = "/v1/batches?corpus=web&seq_len=16&batch_size=8&step="


class Site:
    """A server, its file of tokens with two, and one connection that stays open."""

    def __init__(self, folder: Path, tokens: Path, *, workers: int = 1) -> None:
        self.tokens = Tokens(tokens)
        self.tokens.add("first", "read:*", "metrics")
        self.tokens.add("second", "read:*")
        corpora = {"web": write_raw(folder / "web.bin", some_tokens(5000))}
        self.server = RunningServer(
            corpora, folder, workers=workers, arguments=["--tokens", str(self.tokens.path)]
        )

    def status(self, name: str) -> int:
        return self.server.get(f"{BATCH}1", headers=self.tokens.header(name)).status

    def wait_for(self, name: str, status: int) -> None:
        """Wait until every worker answers so: the kernel chooses one for each connection."""
        wait_until(lambda: all(self.status(name) == status for _ in range(4 * self.server.workers)), name)

    def is_warned(self) -> bool:
        """Tell whether readiness and metrics, which are asked in any case, tell of the file."""
        before, metrics, after = (
            self.server.get(path, headers=self.tokens.header("first"))
            for path in ("/readyz", "/metrics", "/readyz")
        )
        assert (before.status, after.status) == (200, 200)
        told = ["warning" in before.json(), "warning" in after.json()]
        assert (
            "corpus_stale_tokens 1.0" in metrics.body.decode()
        ) in told  # the file may be read between the two
        return all(told)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, tmp_path / "tokens.toml")
    with site.server:
        yield site


def test_tokens_come_and_go_without_a_restart(tmp_path: Path) -> None:
    site = Site(tmp_path, tmp_path / "tokens.toml", workers=2)
    site.tokens.remove("second")
    with site.server:
        assert (site.status("first"), site.status("second")) == (200, 401)
        site.tokens.add("second", "read:*")
        site.wait_for("second", 200)
        site.tokens.remove("first")
        site.wait_for("first", 401)
        assert site.status("second") == 200


def test_a_token_that_was_revoked_ends_with_the_next_request_of_its_connection(site: Site) -> None:
    with contextlib.closing(site.server.connect()) as connection:
        for step in range(5):
            assert ask(connection, f"{BATCH}{step}", headers=site.tokens.header("second")).status == 200
        site.tokens.remove("second")
        site.wait_for("second", 401)
        assert ask(connection, f"{BATCH}9", headers=site.tokens.header("second")).status == 401


def test_a_file_that_is_being_written_revokes_nothing(site: Site) -> None:
    """Truncated and written again 1.5 s later, and table by table: its tokens are in force all the time.

    A part that a busy machine left there for as long as a whole file counts: all is written anew.
    """
    path, text = site.tokens.path, site.tokens.path.read_text()
    first, second = text.split("\n\n")
    longest = math.inf
    while longest >= SETTLE_SECONDS:
        num_read = site.server.log().count("read 2 tokens")
        site.tokens.write()  # replaces the file
        wait_until(lambda: site.server.log().count("read 2 tokens") > num_read, "it is read")  # noqa: B023
        before, statuses, times = len(site.server.log()), set[int](), [time.monotonic()]
        for written in ("", first, f"{first}\n\n{second[:100]}", text):
            path.write_text(written)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                statuses |= {site.status(name) for name in ("first", "second")}
                time.sleep(0.05)
            times.append(time.monotonic())
        longest = max(later - earlier for earlier, later in pairwise(times))
    assert statuses == {200}
    assert "stay valid" not in site.server.log()[before:]
    path.write_text(first + "\n")
    site.wait_for("second", 401)
    assert site.status("first") == 200


def test_a_file_without_tokens_is_a_mistake_unless_it_says_so(site: Site) -> None:
    site.tokens.path.write_text("# all tokens of the cluster\n")
    wait_until(site.is_warned, "nobody was told")
    assert site.server.log().count("expected tokens, found none") == 1
    assert site.status("first") == 200
    site.tokens.path.write_text("[tokens]\n")
    site.wait_for("first", 401)
    assert "read 0 tokens" in site.server.log()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def cut(path: Path) -> None:
    path.write_text(path.read_text()[:-40])


def deep(path: Path) -> None:
    path.write_text("a = " + "[" * 10_000)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (Path.unlink, "cannot be read: No such file"),
    (pipe, "cannot be read: expected a regular file"),
    (device, "cannot be read: expected a regular file"),
    (cut, "Unterminated string"),
    (deep, "nested deeper"),
]


def test_the_tokens_read_before_stay_in_force_and_everybody_is_told(site: Site) -> None:
    for damage, said in DAMAGES:
        assert not site.is_warned()
        before = len(site.server.log())
        damage(site.tokens.path)
        wait_until(site.is_warned, f"nobody was told of {damage.__name__}")
        time.sleep(1.5)
        lines = site.server.log()[before:].splitlines()
        (line,) = [line for line in lines if "the tokens read before stay valid" in line]
        assert said in line
        assert (site.status("first"), site.status("second")) == (200, 200)
        site.tokens.write()  # replaces the file
        wait_until(lambda: not site.is_warned(), "it is whole again")
    site.tokens.remove("second")
    site.wait_for("second", 401)


@pytest.mark.skipif(why_not() is not None, reason=f"no FUSE here: {why_not()}")
def test_a_disk_that_hangs_delays_neither_readiness_nor_metrics(tmp_path: Path) -> None:
    with failing_disk(tmp_path) as disk:
        site = Site(tmp_path, disk.path / "tokens.toml")
        with site.server:
            disk.fail("hang")
            wait_until(site.is_warned, "nobody was told")
            began = time.monotonic()
            for _ in range(5):
                assert site.is_warned()
                assert (site.status("first"), site.status("second")) == (200, 200)
            assert time.monotonic() - began < 10
            disk.fail("")
            wait_until(lambda: not site.is_warned(), "it hangs no more")
            site.tokens.remove("second")
            site.wait_for("second", 401)
            disk.fail("hang")
            wait_until(site.is_warned, "nobody was told")
            assert site.server.stop() == 0
