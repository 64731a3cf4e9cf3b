"""Live in a real browser: ranks of runs, and charts."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.browser.tab import Opened
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer, wait_until

RECORD_CHARTS = """
    let library;
    Object.defineProperty(window, "uPlot", { get: () => library, set: (uPlot) => {
      window.ranges = [];
      const note = ({ data, scales }, axis) => {
        if (axis === "x" && data[0].length) ranges.push([scales.x.min, scales.x.max]);
      };
      library = new Proxy(uPlot, { construct: (made, [options, ...more]) => new made(
        { ...options, hooks: { ...options.hooks, setScale: [note] } }, ...more) });
    } });
"""  # what part of the x axis each chart with data has shown


def test_the_ranks_of_a_run_are_seen_live(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show("/page/live")
    for step in (3, 4):
        for rank in (0, 1):
            named = {"Corpus-Run": "live", "Corpus-Trained-Step": str(step - 2)}
            part = {"plan": plans["plan"], "step": step, "rank": rank, "world_size": 2}
            server.get("/v1/batches", **part, headers=named)
    ranks = page.get_by_role("region", name=f"Ranks of run live, plan {plans['plan']}")
    row = ranks.get_by_role("row").filter(has=page.get_by_role("cell", name="1 of 2", exact=True))
    expect(row).to_contain_text("waiting")
    expect(row.get_by_role("link")).to_have_text(["2", "4"])
    expect(page.locator("#ranks")).to_contain_text(
        "running, 2 ranks, trained up to step 2, asked for up to step 4"
    )
    # Three steps of 8 x 64 tokens; the second stage begins at step 40.
    expect(page.locator("#ranks")).to_contain_text("1,540 tokens trained")
    expect(page.locator("#ranks")).to_contain_text("next stage in 37 steps")
    for name in ("tokens per second", "p50 latency", "in flight", "refusals in the hour", "page-cache hits"):
        expect(page.locator(".tile").filter(has_text=name)).to_have_count(1)
    tools = page.locator("details").filter(has_text="Tools:")
    expect(tools.get_by_role("table").first).to_be_hidden()
    tools.locator("summary").click()
    # Who stands on a link stays there when the next sample comes, and the link leads to what the rank saw.
    row.get_by_role("link", name="4", exact=True).focus()
    seen = page.evaluate("document.activeElement.href")
    page.evaluate("document.activeElement.dataset.old = 'yes'")
    expect(page.locator("[data-old]")).to_have_count(0)
    assert page.evaluate("document.activeElement.href") == seen
    expect(tools.get_by_role("table").first).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("#step-number")).to_have_text("4")
    assert page.url.endswith("/steps/4?rank=1&world_size=2")
    expect(page.locator(".train-row").first).to_have_id("row-4")


def test_charts_of_what_goes_on_end_now(browser: Browser, tmp_path: Path) -> None:
    """Also before the second sample: a lone one is no future of a hundred minutes."""
    with RunningServer({"x": write_raw(tmp_path / "x.bin", some_tokens(5000))}, tmp_path) as server:
        wait_until(lambda: server.get("/v1/live").json()["samples"]["unix_seconds"])
        tab = Opened(browser, server)
        tab.page.add_init_script(RECORD_CHARTS)
        page = tab.show("/page/live")
        page.locator("#charts .uplot").nth(3).wait_for()
        ranges = page.evaluate("window.ranges")  # each chart when it was drawn, and after each sample
        tab.context.close()
    assert ranges
    assert all(least <= -1 and most == 0 for least, most in ranges), ranges


def test_a_run_that_said_its_end_is_finished_there(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    """A loader of 40 steps has fetched them all before any was trained; its plan has no end."""
    asked = {"plan": plans["plan"], "step": 39, "rank": 0, "world_size": 1}
    server.get("/v1/batches", **asked, headers={"Corpus-Run": "forty"})
    ended = {"Corpus-Run": "forty", "Corpus-Trained-Step": "39"}
    assert server.get("/v1/batches", method="HEAD", **asked, headers=ended).status == 200
    page = opened.show("/page/live")
    expect(page.locator("#ranks")).to_contain_text("finished, 1 rank, trained up to step 39")
