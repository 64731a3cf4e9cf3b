"""The shipped proxy and pages of another origin: those that it names may read responses, others may not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from corpus_server.responses.response import HEADERS
from tests.corpora import some_tokens, write_raw
from tests.docker.proxy import NGINX, RunningProxy
from tests.serving import Response, RunningServer
from tests.tokens import Tokens, plan, post

pytestmark = pytest.mark.skipif(NGINX.find() is None, reason="nginx is not installed here")

TRUSTED, OTHER = "https://notebook.example", "https://stranger.example"
LINE = '# "https://notebook.example" $http_origin;'  # as docs/operations.md has it
# What only servers, caches and connections look at.
NOT_EXPOSED = {"Cache-Control", "Vary", "WWW-Authenticate", "Corpus-Access", "Allow", "Connection"}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    tokens = Tokens(tmp_path_factory.mktemp("tokens") / "tokens.toml")
    tokens.add("owner", "read:*", "plans")
    return tokens


def running(folder: Path, tokens: Tokens | None, changes: dict[str, str], stack: ExitStack) -> RunningProxy:
    web = write_raw(folder / "web.bin", some_tokens(50_000))
    servers = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        arguments = [] if tokens is None else ["--tokens", str(tokens.path)]
        servers.append(stack.enter_context(RunningServer({"web": web}, folder / name, arguments=arguments)))
    return stack.enter_context(RunningProxy(servers, folder, changes=changes))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> Iterator[RunningProxy]:
    with ExitStack() as stack:
        yield running(tmp_path_factory.mktemp("cors"), tokens, {LINE: LINE.removeprefix("# ")}, stack)


def preflight(proxy: RunningProxy, target: str, origin: str) -> Response:
    asked = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"}
    return proxy.get(target, method="OPTIONS", headers={"Origin": origin, **asked})


def allowed(response: Response) -> str | None:
    return response.headers.get("Access-Control-Allow-Origin")


@pytest.mark.parametrize(
    "target", ["/v1/batches?corpus=web&seq_len=8&batch_size=2&step=0", "/v1/plans", "/healthz"]
)
def test_a_preflight_needs_no_token(proxy: RunningProxy, target: str) -> None:
    response = preflight(proxy, target, TRUSTED)
    assert (response.status, response.body, allowed(response)) == (204, b"", TRUSTED)
    assert "GET" in response.headers["Access-Control-Allow-Methods"].split(", ")
    assert "Authorization" in response.headers["Access-Control-Allow-Headers"].split(", ")
    assert response.headers["Vary"] == "Origin"
    refused = preflight(proxy, target, OTHER)
    assert refused.status != 204
    assert allowed(refused) is None


def test_responses_and_refusals_may_be_read_by_pages_of_the_origin_alone(
    proxy: RunningProxy, tokens: Tokens
) -> None:
    identity = post(proxy, plan("web"), tokens.header("owner")).json()["id"]
    batch = f"/v1/batches?plan={identity}&step=3"
    for target, header, status in (
        (batch, tokens.header("owner"), 200),
        (batch, tokens.header("owner"), 200),  # from the cache
        (batch, {}, 401),
        ("/v1/corpora/unknown", tokens.header("owner"), 404),
        ("/v1/corpora", tokens.header("owner"), 200),
        ("/healthz", {}, 200),
    ):
        for origin in (TRUSTED, OTHER, None):
            response = proxy.get(target, headers={**header, **({} if origin is None else {"Origin": origin})})
            assert response.status == status
            assert allowed(response) == (TRUSTED if origin == TRUSTED else None)
            exposed = response.headers.get("Access-Control-Expose-Headers")
            assert (exposed is not None) == (origin == TRUSTED)
            if exposed is not None:
                assert set(HEADERS) - NOT_EXPOSED <= set(exposed.split(", "))
            assert "Origin" in ", ".join(response.headers.get_all("Vary"))  # for caches of browsers
    headers = {**tokens.header("owner"), "Origin": TRUSTED}
    refused = proxy.get("/v1/batches", method="POST", headers=headers, body=bytes(100_000))
    assert (refused.status, allowed(refused)) == (413, TRUSTED)  # nginx's own


def test_as_shipped_no_origin_may(tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxy = running(tmp_path, None, {}, stack)
        for origin in (TRUSTED, OTHER, "null"):
            assert allowed(preflight(proxy, "/v1/corpora", origin)) is None
            response = proxy.get("/v1/corpora", headers={"Origin": origin})
            assert (response.status, allowed(response)) == (200, None)


def test_a_page_in_a_browser_reads_a_batch(tmp_path: Path, tokens: Tokens) -> None:
    """The page asks with a token, so that the browser sends a preflight first."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with ExitStack() as stack:
        (tmp_path / "page").mkdir()
        other = write_raw(tmp_path / "other.bin", some_tokens(100))
        pages = stack.enter_context(RunningServer({"other": other}, tmp_path / "page"))
        trusted = f'"{pages.url}" $http_origin;'
        proxy = running(tmp_path, tokens, {LINE: trusted}, stack)
        target = f"{proxy.url}/v1/batches?corpus=web&seq_len=8&batch_size=2&step=0"
        script = """async ([url, headers]) => {
            try {
                const response = await fetch(url, {headers});
                const body = await response.arrayBuffer();
                return [response.status, response.headers.get("Corpus-Shape"), body.byteLength];
            } catch (error) { return String(error); }
        }"""
        browser = stack.enter_context(sync_api.sync_playwright()).chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        stack.callback(browser.close)
        page = browser.new_page()
        page.goto(f"{pages.url}/healthz")
        asked = [target, tokens.header("owner")]
        assert page.evaluate(script, asked) == [200, "1,2,9", 2 * 9 * 2]
        assert page.evaluate(script, [target, {}])[0] == 401  # and not "TypeError: Failed to fetch"
        page.goto(f"{pages.url.replace('127.0.0.1', 'localhost')}/healthz")  # another origin
        assert "Failed to fetch" in page.evaluate(script, asked)
