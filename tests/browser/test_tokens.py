"""A page that asks for a token."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.browser.tab import Opened
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer
from tests.tokens import Tokens


def test_with_tokens_the_page_asks_for_one_and_shows_nothing_before(browser: Browser, tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens.toml")
    tokens.add("reader", "read:web")
    corpora = {
        "web": write_raw(tmp_path / "web.bin", some_tokens(5000)),
        "secret": write_raw(tmp_path / "secret.bin", some_tokens(5000)),
    }
    with RunningServer(corpora, tmp_path, arguments=["--tokens", str(tokens.path)]) as server:
        tab = Opened(browser, server)
        page = tab.show("/")
        expect(page.get_by_role("dialog")).to_be_visible()
        assert "secret" not in page.content()
        assert page.locator(".card").count() == 0
        page.get_by_role("textbox", name="Token").fill(
            tokens.header("reader")["Authorization"].removeprefix("Bearer ")
        )
        page.get_by_role("button", name="Use it").click()
        expect(page.get_by_role("link", name="web", exact=True)).to_be_visible()
        assert "secret" not in page.content()
        assert '-H "Authorization: Bearer $CORPUS_TOKEN"' in page.locator(".request code").inner_text()
        assert json.loads(page.evaluate("JSON.stringify(Object.keys(localStorage))")) == []
        tab.context.close()
