"""The shipped proxy in front of servers that ask for tokens: its cache gives nothing to strangers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.docker.proxy import NGINX, RunningProxy
from tests.raw_http import RawConnection, check_raw_problem, get
from tests.serving import Response, RunningServer, check_problem, wait_until
from tests.tokens import Tokens, plan, post

pytestmark = pytest.mark.skipif(NGINX.find() is None, reason="nginx is not installed here")


@dataclass
class Site:
    """A proxy, its servers and their tokens."""

    proxy: RunningProxy
    servers: list[RunningServer]
    tokens: Tokens

    def get(self, target: str, token: str | None) -> Response:
        return self.proxy.get(target, headers={} if token is None else self.tokens.header(token))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    tokens = Tokens(tmp_path / "tokens.toml")
    tokens.add("owner", "read:*", "plans")
    tokens.add("reader", "read:web")
    tokens.add("stranger", "read:code")
    corpora = {
        name: write_raw(tmp_path / f"{name}.bin", some_tokens(50_000, seed=seed))
        for seed, name in enumerate(("web", "code"))
    }
    with ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            arguments = ["--tokens", str(tokens.path)]
            server = RunningServer(corpora, tmp_path / name, arguments=arguments)
            servers.append(stack.enter_context(server))
        yield Site(stack.enter_context(RunningProxy(servers, tmp_path)), servers, tokens)


def test_the_cache_answers_only_who_may_read(site: Site) -> None:
    """The failure was: a cached batch went to a caller without token."""
    identity = post(site.proxy, plan("web"), site.tokens.header("owner")).json()["id"]
    owner = site.tokens.header("owner")
    for server in site.servers:  # the proxy's copies of a posted plan go on after its response
        wait_until(lambda: server.get(f"/v1/plans/{identity}", headers=owner).status == 200)  # noqa: B023
    target = f"/v1/batches?plan={identity}&step=3"
    first, again = site.get(target, "owner"), site.get(target, "reader")
    assert (first.status, again.status) == (200, 200)
    assert (first.headers["X-Cache"], again.headers["X-Cache"]) == ("MISS", "HIT")
    assert first.body == again.body
    assert again.headers["Cache-Control"].startswith("private")
    for token, status, slug in ((None, 401, "unauthorized"), ("stranger", 403, "forbidden")):
        for _ in range(2):
            check_problem(site.get(target, token), status, slug)
    spelled = target.replace("plan=", "%70lan=")
    check_problem(site.get(spelled, "stranger"), 403, "forbidden")
    check_problem(site.get(spelled, None), 401, "unauthorized")
    site.tokens.remove("reader")
    wait_until(lambda: site.get(target, "reader").status == 401, "a revoked token is served from the cache")
    assert site.get(target, "owner").headers["X-Cache"] == "HIT"


def test_a_plan_that_a_server_has_not_seen_is_never_answered_by_the_cache(site: Site) -> None:
    """Only the first server knows the plan: the second cannot tell what it reads."""
    identity = post(site.servers[0], plan("web"), site.tokens.header("owner")).json()["id"]
    target = f"/v1/batches?plan={identity}&step=3"
    seen = {(site.get(target, "reader").status, site.get(target, "stranger").status) for _ in range(10)}
    assert seen == {(200, 403)}


def test_errors_and_what_names_a_corpus_are_not_kept(site: Site) -> None:
    for target in (
        "/v1/batches?corpus=web&seq_len=16&batch_size=8&step=3",
        "/v1/corpora",
        f"/v1/batches?plan={'0' * 64}&step=3",
        "/v1/batches?nonsense=1",
    ):
        for _ in range(3):
            assert site.get(target, "owner").headers["X-Cache"] in ("BYPASS", "MISS", "EXPIRED")


def test_a_body_is_received_only_from_who_may_post_a_plan(site: Site) -> None:
    """The failure was: nginx wrote 64 MiB to the disk where its cache lies, and asked for a token later."""
    for path, method, token, status, slug in (
        ("/v1/plans", "POST", None, 401, "unauthorized"),
        ("/v1/plans", "POST", "reader", 403, "forbidden"),
        ("/v1/batches", "GET", None, 413, "body-too-large"),
        ("/healthz", "GET", None, 413, "body-too-large"),
    ):
        lines = [f"Content-Length: {2**24}"]
        lines += [] if token is None else [f"Authorization: Bearer {site.tokens.secrets[token]}"]
        with RawConnection(site.proxy) as client:
            client.send(get(path, *lines, method=method), b"x" * 2**20)
            check_raw_problem(client.read(), status, slug)
