"""Every view in a real browser: accessible, on a phone, by keyboard; what does not exist is one message."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.browser.conftest import HASH, HOSTILE
from tests.browser.tab import RUN, VIEWS, Opened
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

CUT_LINES = """() => [...document.querySelectorAll(".request code")]
    .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)"""

CUT_TABLES = """() => [...document.querySelectorAll(".scroll")]
    .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.ariaLabel)"""


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_accessible_and_asks_nobody_else(
    opened: Opened, plans: dict[str, str], view: str
) -> None:
    """On a screen in light colours, and on a phone in dark ones."""
    page = opened.page
    for width, scheme in ((1280, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        opened.show(VIEWS[view].format(**plans))
        if view != "new":
            expect(page.locator(".request").first).to_be_visible()
        if view == "corpus":
            expect(page.locator("#text")).to_contain_text(f"hash{HASH}")
        if view == "viewed":
            document = page.get_by_role("row", name="118 1 0").get_by_role("link")
            expect(document).to_have_attribute("href", "/page/corpora/hostile?document=118&base=true")
        if view == "view":
            expect(page.locator("#facts")).to_contain_text(f"view where{HOSTILE[0]}")
        if view == "live":
            expect(page.get_by_role("region", name=f"Ranks of run {RUN}")).to_have_count(2)
            page.get_by_text("Tools: 2 plans, 2 ranks").click()
        expect(page.locator(".problem")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CUT_LINES) == []
        if width == 390:
            assert page.evaluate(CUT_TABLES) == []
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_a_difference_stands_in_one_column_on_a_phone(
    browser: Browser, server: RunningServer, plans: dict[str, str]
) -> None:
    tab = Opened(browser, server, 390)
    page = tab.show(f"/page/plans/{plans['plan']}/diff/{plans['other']}")
    second = page.locator("#diff .stacked td[data-head='second plan']").first
    expect(second).to_be_visible()
    box = second.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390
    expect(page.locator("#diff")).to_contain_text("what the two plans say of them is equal")
    tab.context.close()


def test_small_things_of_the_page(opened: Opened, server: RunningServer, plans: dict[str, str]) -> None:
    page = opened.show("/page/corpora/docs?document=2")
    expect(page.get_by_label("Document", exact=True)).to_have_value("2")
    page = opened.show("/page/corpora/docs?document=70000")
    expect(page.locator("#text .problem")).to_contain_text("got 70000")
    expect(page.get_by_label("Document", exact=True)).to_have_value("70000")
    page = opened.show("/")
    card = page.locator(".card").filter(has=page.get_by_role("heading", name="chosen"))
    expect(card).to_contain_text("view ofhostile, 280 documents")
    size = next(
        each["view"]["size_bytes"] for each in server.get("/v1/corpora").json()["corpora"] if "view" in each
    )
    expect(card).to_contain_text(f"size{size / 1000:.1f} kB")
    missing = page.goto(f"{opened.url}/page/nope")
    assert missing is not None
    assert missing.status == 404
    expect(page.get_by_role("heading", name="No such page")).to_be_visible()
    page.get_by_role("link", name="plans").last.click()
    expect(page.locator("h1")).to_have_text("Plans")
    opened.problems.clear()  # Chromium reports every 4xx as a console message
    page.goto(f"{opened.url}/docs")
    page.get_by_role("link", name="corpus-server: corpora, plans, live").click()
    expect(page.locator("h1")).to_have_text("Corpora")
    page = opened.show("/page/plans/new")
    page.get_by_label("Sequence length").fill("0")
    keep = page.get_by_role("button", name="Keep this plan")
    expect(keep).to_be_disabled()
    colours = keep.evaluate("each => [getComputedStyle(each).color, getComputedStyle(each).backgroundColor]")
    assert colours[0] != colours[1]
    opened.problems.clear()


def test_everything_can_be_done_by_keyboard(opened: Opened, plans: dict[str, str]) -> None:
    page = opened.show(f"/page/plans/{plans['plan']}/steps/5")
    expect(page.locator("#step-number")).to_have_text("5")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    page.keyboard.press("ArrowRight")
    expect(page.locator("#step-number")).to_have_text("6")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#step-number")).to_have_text("4")
    page.get_by_label("Step", exact=True).press("Control+a")
    page.keyboard.type("44")
    page.keyboard.press("Enter")
    expect(page.locator("#step-number")).to_have_text("44")
    assert page.url.endswith("/steps/44")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "/page/plans/zzz",
            "the first 8 of them or more, got 'zzz'",
        ),
        (
            "/page/plans/zzz/steps/3?until=5",
            "the first 8 of them or more, got 'zzz'",
        ),
        (f"/page/plans/{'a' * 64}", "this server has not seen plan"),
        ("/page/plans/{plan}/steps/-5", "step must be"),
        ("/page/plans/{plan}/steps/last", "step must be"),
        ("/page/corpora/nope", "no corpus"),
    ],
)
def test_what_does_not_exist_is_one_message(
    opened: Opened, plans: dict[str, str], address: str, said: str
) -> None:
    page = opened.show(address.format_map(plans))
    expect(page.locator("main .problem")).to_have_count(1)
    expect(page.locator("main .problem")).to_contain_text(said)
    if "/steps/" not in address or "zzz" in address:
        assert page.locator("main :is(h2, form, table)").count() == 0
    opened.problems.clear()  # Chromium reports every 4xx as a console message


def test_long_names_and_many_plans_fit_a_phone(browser: Browser, tmp_path: Path) -> None:
    """A name has at most 128 characters, a list of plans 100 entries."""
    name = "x" * 128
    with RunningServer({name: write_raw(tmp_path / "x.bin", some_tokens(5000))}, tmp_path) as server:
        for seed in range(101):
            stages = [{"global_batch_size": 8, "mixture": {name: 1}}]
            plan = server.post_plan({"seq_len": 16, "seed": seed, "stages": stages}).json()["id"]
        tab = Opened(browser, server, 390)
        for view in ("corpora", "plan", "step", "plans"):
            page = tab.show(VIEWS[view].format(plan=plan))
            expect(page.locator(".request").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        expect(page.locator("#plans")).to_contain_text("101 plans, the one seen last first; 100 are shown.")
        tab.context.close()
