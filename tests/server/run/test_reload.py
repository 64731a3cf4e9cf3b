"""SIGHUP reads the configuration again: new corpora, old plans untouched, mistakes without harm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import some_tokens, write_raw
from tests.server.run.test_supervisor import Load
from tests.serving import Response, RunningServer, check_problem, wait_until

PLAN = {"seq_len": 16, "stages": [{"global_batch_size": 8, "mixture": {"web": 1}}]}


class Site:
    """A server of two workers, its configuration and its corpora."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number, name in enumerate(("web", "code", "newer")):
            write_raw(folder / f"{name}.bin", some_tokens(20_000, seed=number))
        self.server = RunningServer({}, folder, workers=2, config=self.text({"web": "web.bin"}))

    @staticmethod
    def text(corpora: dict[str, str], server: str = "") -> str:
        tables = "".join(f'[corpora.{name}]\npath = "{path}"\n' for name, path in corpora.items())
        return f"[server]\n{server}\n{tables}"

    def reload(self, text: str, said: str) -> None:
        """Write another configuration, send SIGHUP, and wait for what the log says of it."""
        (self.folder / "corpus.toml").write_text(text)
        before = self.server.log().count(said)
        os.kill(self.server.pid, signal.SIGHUP)
        wait_until(lambda: self.server.log().count(said) > before, f"{said} in\n{self.server.log()}")

    def batch(self, plan: str, step: int = 3) -> Response:
        return self.server.get("/v1/batches", plan=plan, step=step)

    def corpora(self) -> list[str]:
        """Return the corpora of every worker that answers; all must have the same."""
        seen = {
            tuple(each["name"] for each in self.server.get("/v1/corpora").json()["corpora"]) for _ in range(8)
        }
        (names,) = seen
        return list(names)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    with site.server:
        yield site


def test_a_corpus_is_added_and_another_removed_under_load(site: Site) -> None:
    """Plans of corpora that stay give the same bytes; no request fails, and no connection is lost."""
    plan = site.server.post_plan(PLAN).json()["id"]
    expected = site.batch(plan).body
    with Load(site.server) as load:
        site.reload(site.text({"web": "web.bin", "code": "code.bin"}), "were replaced; corpora: web, code")
        assert site.batch(plan).body == expected
        wait_until(lambda: len(site.server.worker_pids()) == 2, "an old worker is left")
        assert site.corpora() == ["web", "code"]
        new = site.server.post_plan({**PLAN, "stages": [{"global_batch_size": 8, "mixture": {"code": 1}}]})
        assert site.batch(new.json()["id"]).status == 200
        site.reload(site.text({"web": "web.bin"}), "were replaced; corpora: web\n")
        wait_until(lambda: len(site.server.worker_pids()) == 2, "an old worker is left")
    assert (load.failures, load.answered > 20) == ([], True)
    assert site.batch(plan).body == expected
    check_problem(site.batch(new.json()["id"]), 404, "unknown-corpus")


def test_a_corpus_of_other_content_answers_old_plans_while_the_old_one_is_served(site: Site) -> None:
    """A plan is bound to what its corpus held: it gets exactly that, or an error that says what to do."""
    old = site.server.post_plan(PLAN).json()["id"]
    expected = site.batch(old).body
    site.reload(site.text({"web": "newer.bin"}), "were replaced")
    wait_until(lambda: len(site.server.worker_pids()) == 2, "an old worker is left")
    document = check_problem(site.batch(old), 409, "fingerprint-mismatch")
    remedy = "serve the corpus that the plan was made for, and name it in `earlier`"
    assert document["remedy"] == remedy
    new = site.server.post_plan(PLAN).json()["id"]
    assert new != old
    newer = site.batch(new).body
    both = site.text({"web-1": "web.bin", "web": "newer.bin"}) + 'earlier = ["web-1"]\n'
    site.reload(both, "were replaced; corpora: web-1, web")
    wait_until(lambda: len(site.server.worker_pids()) == 2, "an old worker is left")
    assert (site.batch(old).body, site.batch(new).body) == (expected, newer)
    assert site.server.post_plan(PLAN).json()["id"] == new


MISTAKES: dict[str, tuple[str, str]] = {
    "toml": ("[server", "cannot read"),
    "long": ("port = " + "9" * 5000, "cannot read"),
    "deep": ("port = " + "[" * 3000, "cannot read"),
    "key": ("[server]\nprot = 1", "unknown prot"),
    "corpus": (Site.text({"web": "web.bin", "code": "none.bin"}), "none.bin"),
    "tokens": (Site.text({"web": "web.bin"}, "tokens = 'none.toml'"), "none.toml"),
    "host": (Site.text({"web": "web.bin"}, "host = 'localhost'"), "a changed host needs a new start"),
    "earlier itself": (Site.text({"web": "web.bin"}) + "earlier = ['web']", "earlier of corpus web must be"),
    "earlier": (Site.text({"web": "web.bin"}) + "earlier = ['web-1']", "earlier of corpus web must be"),
    "tls": (
        Site.text({"web": "web.bin"}, "tls_certificate = 'c.pem'\ntls_key = 'k.pem'"),
        "TLS cannot use",
    ),
}


def test_a_mistake_changes_nothing_and_is_one_line(site: Site) -> None:
    pids = site.server.worker_pids()
    plan = site.server.post_plan(PLAN).json()["id"]
    for text, said in MISTAKES.values():
        before = site.server.log()
        site.reload(text, "nothing was changed")
        lines = [
            line
            for line in site.server.log().removeprefix(before).splitlines()
            if not line.startswith("INFO ") and "[info]" not in line
        ]
        assert len(lines) == 1, lines
        assert said in lines[0]
        assert site.server.worker_pids() == pids
        assert site.batch(plan).status == 200
    site.reload(site.text({"web": "web.bin", "code": "code.bin"}), "were replaced; corpora: web, code")


def test_other_settings_count_from_the_new_workers_on(site: Site) -> None:
    target = {"corpus": "web", "seq_len": 16, "batch_size": 8, "step": 1}
    assert site.server.get("/v1/batches", **target).status == 200
    site.reload(site.text({"web": "web.bin"}, "max_response_bytes = 100"), "were replaced")
    wait_until(lambda: len(site.server.worker_pids()) == 2, "an old worker is left")
    refused = [site.server.get("/v1/batches", **target) for _ in range(4)]
    assert {response.status for response in refused} == {422}
    for pid in site.server.worker_pids():  # also those of workers that die later
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: site.server.log().count(" is ready\n") >= 6, "no new workers")
    assert site.server.get("/v1/batches", **target).status == 422


def test_new_shards_that_a_pattern_matches_are_taken_up(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    write_raw(shards / "0.bin", np.arange(5000))
    with RunningServer({"web": f"{shards}/*.bin"}, tmp_path) as server:
        write_raw(shards / "1.bin", np.arange(5000))
        assert server.get("/v1/corpora/web").json()["num_tokens"] == 5000
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: "were replaced" in server.log(), server.log)
        wait_until(lambda: server.get("/v1/corpora/web").json()["num_tokens"] == 10_000, "an old response")
