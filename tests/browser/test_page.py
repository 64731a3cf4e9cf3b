"""The page in a real browser: each view, by keyboard, on a phone, with text of strangers, with a token."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import HASH, HOSTILE
from tests.corpora import some_tokens, write_raw
from tests.recorded import Record, write_part
from tests.reported import write_report
from tests.serving import RunningServer, run_here, wait_until
from tests.tokens import Tokens

PLAN: dict[str, Any] = {
    "seq_len": 64,
    "seed": 3,
    "stages": [
        {"from_step": 0, "global_batch_size": 8, "mixture": {"docs": 0.75, "hostile": 0.25}},
        {"from_step": 40, "global_batch_size": 12, "mixture": {"docs": 0.5, "hostile": 0.5}},
    ],
}
RUN = "gpt2-124m.a"
INVISIBLE = "[\u202a-\u202e\u2066-\u2069\u200b\ufeff\x00-\x08\x1b]"
SECONDS = 30_000  # milliseconds; a loaded machine is slow

VIEWS = {
    "corpora": "/",
    "corpus": "/page/corpora/docs?document=2",
    "view": "/page/corpora/chosen",
    "plans": "/page/plans",
    "viewed": "/page/plans/{whole}/diff/{viewed}",
    "plan": "/page/plans/{plan}",
    "new": "/page/plans/new",
    "step": "/page/plans/{plan}/steps/41",
    "skimmed": "/page/plans/{plan}/steps/39?until=41",
    "diff": "/page/plans/{plan}/diff/{other}",
    "lookup": "/page/lookup?plan={plan}&corpus=docs&document=2",
    "recordings": "/page/recordings",
    "recording": "/page/recordings/run%201",
    "reports": "/page/reports",
    "report": "/page/reports/%3Cb%3Ebench%20mark",
    "live": "/page/live",
}
CUT_TABLES = """() => [...document.querySelectorAll(".scroll")]
    .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.ariaLabel)"""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@pytest.fixture(scope="module")
def plans(server: RunningServer) -> dict[str, str]:
    """Plans of a run and of a tool, which have read a step of each; a recorded loss of step 17 jumps."""
    ids = {}
    for name, document in {"plan": PLAN, "other": {**PLAN, "skip_steps": [[10, 12]]}}.items():
        for run in (RUN, "bench"):
            named = {"Corpus-Run": run}
            posted = server.get("/v1/plans", method="POST", body=json.dumps(document).encode(), headers=named)
            ids[name] = posted.json()["id"]
            server.get("/v1/batches", plan=ids[name], step=1, headers=named)
    for name, source in {
        "whole": "hostile",
        "viewed": "chosen",
        "sampled": "sampled",
        "masked": "masked",
    }.items():
        stage = {"from_step": 0, "global_batch_size": 8, "mixture": {source: 1}}
        body = json.dumps({"seq_len": 64, "seed": 3, "stages": [stage]}).encode()
        posted = server.get("/v1/plans", method="POST", body=body, headers={"Corpus-Run": "bench"})
        ids[name] = posted.json()["id"]
    left_out = {**PLAN["stages"][0], "exclude": {"hostile": [[0, 400]]}}
    ids["left_out"] = server.post_plan({**PLAN, "stages": [left_out]}).json()["id"]
    records = []
    for step in range(30):
        for row in server.get(f"/v1/plans/{ids['plan']}/rows", step=step, count=8).json()["rows"]:
            loss = 2 + (row["corpus"] == "hostile") + (step + row["row"]) % 5 / 20
            records.append(
                Record(step, row["row"], row["corpus"], 9 if (step, row["row"]) == (17, 3) else loss)
            )
    write_part(server.folder / "losses" / "run 1", records, plan=ids["plan"])
    items = server.folder / "hostile.jsonl"
    items.write_text("".join(json.dumps({"text": f"{each} and what is nowhere"}) + "\n" for each in HOSTILE))
    corpus = f"hostile={server.folder / 'hostile.bin'},dtype=uint8,tokenizer=bytes"
    asked = ("--items", items, "--plan", ids["plan"], "--before-step", "30", "--server", server.url)
    done = run_here(
        "find",
        corpus,
        *asked,
        "-n",
        "13",
        "--places",
        "5",
        "--out",
        server.folder / "reports" / "<b>bench mark",
    )
    assert done.returncode == 0, done.stderr
    return ids


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


class Opened:
    """A view in a tab, and what went wrong there."""

    def __init__(self, browser: Browser, server: RunningServer, width: int = 1280, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(SECONDS)
        expect.set_options(timeout=SECONDS)
        self.url = server.url
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._check_request)

    def _check_request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.problems.append(f"request: {request.url}")

    def show(self, address: str) -> Page:
        """Open a view, until each part of it has its data; one that follows the server is never idle."""
        response = self.page.goto(self.url + address)
        assert response is not None
        assert response.headers["content-security-policy"] == POLICY
        if address == VIEWS["live"]:
            expect(self.page.locator("#state")).to_have_text("live")
        else:
            self.page.wait_for_load_state("networkidle")
        return self.page


@pytest.fixture
def opened(browser: Browser, server: RunningServer) -> Iterator[Opened]:
    tab = Opened(browser, server)
    yield tab
    tab.context.close()
    assert tab.problems == []


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
        if width == 390:
            assert page.evaluate(CUT_TABLES) == []
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_the_step_shows_the_text_that_the_route_gives(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show(f"/page/plans/{plans['plan']}/steps/41")
    rows = server.get(f"/v1/plans/{plans['plan']}/rows", step=41).json()["rows"]
    expect(page.locator(".train-row")).to_have_count(len(rows))
    for row in rows:
        shown = page.locator(f"#row-{row['row']} .span").all_text_contents()
        texts = ["\u27e8end of text\u27e9" if span["is_eot"] else span["text"] for span in row["spans"]]
        if row["corpus"] == "docs":
            assert shown == texts
    page.get_by_role("button", name="More rows").click()
    expect(page.locator(".train-row")).to_have_count(12)


def test_text_of_strangers_stays_text(opened: Opened, plans: dict[str, str]) -> None:
    for address in (
        "/page/corpora/hostile?start=0",
        "/page/corpora/hostile?document=1",
        f"/page/plans/{plans['plan']}/steps/41?until=44",
        f"/page/lookup?plan={plans['plan']}&corpus=hostile&text=turned",
    ):
        page = opened.show(address)
        expect(page.locator(".text").first).to_be_visible()
        assert page.evaluate("window.pwned") is None
        shown = page.locator(".text, .origins, .facts")
        assert shown.locator("img, script, h1, b").count() == 0
        assert not any(re.search(INVISIBLE, text) for text in shown.all_inner_texts())
    page = opened.show("/page/corpora/hostile?start=0")
    text_shown = page.locator(".text").inner_text()
    for text in (
        "<script>window.pwned = 1</script>",
        "{{ 7 * 7 }}",
        "\u27e8U+202E\u27e9turned",
        "\u27e8U+0001\u27e9\u27e8U+0002\u27e9\u27e8U+001B\u27e9",
    ):
        assert text in text_shown
    assert not re.search(INVISIBLE, text_shown)
    page.get_by_role("textbox", name="Text").fill("<img src=x onerror='window.pwned = 1'>")
    page.get_by_role("button", name="Search a sample").click()
    expect(page.locator("mark").first).to_have_text("<img src=x onerror='window.pwned = 1'>")
    assert page.evaluate("window.pwned") is None


def test_a_search_says_how_much_it_searched(opened: Opened, plans: dict[str, str]) -> None:
    for address, form in (
        ("/page/corpora/sampled", "#search"),
        (f"/page/lookup?plan={plans['sampled']}", "#lookup"),
    ):
        page = opened.show(address)
        field = page.locator(f"{form} [name=text]")
        field.fill("needle")
        field.press("Enter")
        expect(page.locator("#found")).to_contain_text(
            "Not in the sample: 1,048,576 of 1,500,000 tokens (69 %) were searched."
        )
    page = opened.show("/page/corpora/docs")
    page.locator("#search [name=text]").fill("no text holds this")
    page.get_by_role("button", name="Search a sample").click()
    expect(page.locator("#found")).to_contain_text("Not in the corpus: all its tokens were searched.")


def test_a_search_of_all_shows_how_far_it_has_come(opened: Opened, plans: dict[str, str]) -> None:
    page = opened.show("/page/corpora/sampled")
    page.locator("#search [name=text]").fill("needle")
    page.get_by_role("button", name="Search all").click()
    expect(page.locator("#found")).to_contain_text(
        "All searched: 0 places in 1,500,000 of 1,500,000 tokens (100 %)", timeout=SECONDS
    )
    page = opened.show("/page/corpora/docs")
    page.locator("#search [name=text]").fill(" the ")
    page.get_by_role("button", name="Search all").click()
    expect(page.get_by_role("button", name="Go on")).to_be_visible(timeout=SECONDS)
    expect(page.locator("#found .found")).to_have_count(200)
    expect(page.locator("#found")).to_contain_text("Paused: 200 places in")


def test_documents_are_listed_sorted_and_chosen(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show("/page/corpora/docs")
    listed = page.locator("#listed")
    rows = listed.locator("tbody tr")
    expect(rows).to_have_count(20)
    expect(rows.first).to_contain_text("doc 0")
    listed.get_by_role("button", name="After").click()
    expect(rows.first).to_contain_text("doc 20")
    listed.get_by_role("button", name="Before").click()
    expect(rows.first).to_contain_text("doc 0")
    listed.get_by_title("Sort by tokens").click()
    expect(listed).to_contain_text("meet the conditions; looked at")
    listed.get_by_title("Sort by tokens").click()
    response = server.get("/v1/corpora/docs/documents", sort="-num_tokens", count=20).json()
    longest = response["documents"][0]
    expect(rows.first).to_contain_text(longest["metadata"]["id"])
    rows.first.get_by_role("checkbox").check()
    chosen = page.locator("#chosen")
    expect(chosen).to_contain_text(f"printf '%s\\n' {longest['document']} > without.txt")
    tokens = [longest["start"], longest["start"] + longest["num_tokens"]]
    excluded = json.dumps({"exclude": {"docs": [tokens]}}, separators=(",", ":"))
    expect(chosen).to_contain_text(excluded)
    page.locator("#list [name=where]").fill("contains(id, '7') and license = 'Apache-2.0'")
    page.locator("#list").get_by_role("button", name="List").click()
    expect(rows).to_have_count(len([n for n in range(response["num_documents"]) if "7" in f"doc {n}"]))
    expect(chosen).to_contain_text("--where 'contains(id, ")


def test_a_look_up_has_the_corpora_of_its_plan(opened: Opened, plans: dict[str, str]) -> None:
    page = opened.show(f"/page/lookup?plan={plans['plan']}")
    corpora = page.get_by_label("Corpus").locator("option")
    expect(corpora).to_have_text(["docs", "hostile"])
    page.get_by_label("Plan").fill(plans["viewed"])
    page.get_by_label("Plan").press("Tab")
    expect(corpora).to_have_text(["chosen"])
    page = opened.show("/page/lookup?corpus=sampled")
    expect(page.get_by_label("Plan")).to_have_value(plans["sampled"])
    expect(corpora).to_have_text(["sampled"])


def test_a_look_up_of_a_corpus_that_the_plan_does_not_read_says_so(
    opened: Opened, plans: dict[str, str]
) -> None:
    """And does not look up the same document of another corpus."""
    page = opened.show(f"/page/lookup?plan={plans['sampled']}&corpus=docs&token=2")
    expect(page.locator("#found")).to_have_text("This plan does not read the corpus docs.")


def test_a_look_up_of_a_text_says_what_the_plan_never_reads(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show(f"/page/lookup?plan={plans['left_out']}&corpus=hostile&text=Forged")
    found = server.get("/v1/corpora/hostile/search", text="Forged").json()["found"]
    hits = page.locator("#found .found")
    expect(hits).to_have_count(len(found))
    for number, each in enumerate(found[:6]):
        if each["token"] < 390:
            expect(hits.nth(number)).to_contain_text("no row of the first epoch reads it")
    seen = next(number for number, each in enumerate(found) if each["token"] > 400 + 64)
    hits.nth(seen).get_by_role("link", name=re.compile("^step")).first.click()
    expect(page.locator(".train-row:focus")).to_contain_text("Forged")


def test_what_is_found_in_a_view_is_looked_up_in_its_corpus(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    found = server.get("/v1/corpora/chosen/search", text="turned around").json()["found"]
    assert any(each["token"] != each["base_token"] for each in found)
    for each in found:
        there = server.get("/v1/corpora/hostile/spans", start=each["base_token"], count=13).json()
        assert there["spans"][0]["text"] == "turned around"
    page = opened.show(f"/page/lookup?plan={plans['viewed']}&corpus=chosen&text=turned+around")
    page.locator("#found .rows a").first.click()
    expect(page.locator(".train-row:focus")).to_contain_text("turned around")
    start = found[0]["token"]
    page = opened.show(f"/page/corpora/chosen?start={start}")
    href = page.get_by_role("link", name="Which steps see it?").get_attribute("href")
    assert href is not None
    assert href.endswith(f"token={found[0]['base_token']}")


def test_a_legend_says_what_masks_and_marks_mean(opened: Opened, plans: dict[str, str]) -> None:
    for address, holder in (
        (f"/page/plans/{plans['masked']}/steps/1", "#legend"),
        ("/page/corpora/masked", "#text .legend"),
    ):
        page = opened.show(address)
        expect(page.locator(holder)).to_contain_text("a loss mask leaves these tokens out of the loss")
        expect(page.locator(".text .masked").first).to_have_text("asked: ")
    page = opened.show(f"/page/plans/{plans['plan']}/steps/1")
    expect(page.locator("#legend")).to_contain_text("a document begins")
    expect(page.locator("#legend")).not_to_contain_text("loss mask")


def test_ids_stand_in_place_of_the_text_on_demand(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show(f"/page/plans/{plans['masked']}/steps/1")
    expect(page.locator("#row-0 .ids").first).to_be_hidden()
    page.get_by_label("Token ids").check()
    tokens = server.get("/v1/batches", plan=plans["masked"], step=1, format="json").json()["tokens"][0][0]
    assert [int(each) for each in page.locator("#row-0 .ids > span").all_inner_texts()] == tokens
    expect(page.locator("#row-0 .span").first).to_be_hidden()


def test_borders_of_tokens_are_shown_on_demand(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show(f"/page/plans/{plans['plan']}/steps/1")
    expect(page.locator("#row-0 .text")).to_be_visible()
    text = page.locator("#row-0 .text").inner_text()
    assert page.locator(".token").count() == 0
    page.get_by_label("Token borders").check()
    boxes = page.locator("#row-0 .text .token")
    expect(boxes.first).to_be_visible()
    assert page.locator("#row-0 .text").inner_text() == text
    (row, *_) = server.get(f"/v1/plans/{plans['plan']}/rows", step=1).json()["rows"]
    tokens = [token for span in row["spans"] if not span["is_eot"] for token in span["tokens"]]
    assert [int(box.get_attribute("title").split(": ")[1]) for box in boxes.all()] == tokens
    expect(page.locator("#legend")).to_contain_text("a token; the pointer over it shows its id")


def test_a_document_that_begins_with_end_of_text_is_named_there(
    opened: Opened, plans: dict[str, str]
) -> None:
    page = opened.show("/page/corpora/first")
    expect(page.locator("#text .legend")).to_contain_text("\u27e8end of text\u27e9 begins a document")
    shown = [each.inner_text() for each in page.locator("#text .text > :visible").all()]
    assert shown[:6] == ["0", "\u27e8end of text\u27e9", "one", "1", "\u27e8end of text\u27e9", "two"]
    shades = [page.locator(f"#text .text .shade{shade}").all_inner_texts() for shade in (0, 1)]
    assert shades == [["one", "three"], ["two"]]


def test_tables_are_whole_or_say_so_and_sort_by_a_click(
    browser: Browser, server: RunningServer, plans: dict[str, str], tmp_path: Path
) -> None:
    with RunningServer({"x": write_raw(tmp_path / "x.bin", some_tokens(5000))}, tmp_path) as other:
        for seed in range(70):
            stages = [{"global_batch_size": 8, "mixture": {"x": 1}}]
            other.post_plan({"seq_len": 16, "seed": seed, "stages": stages})
        tab = Opened(browser, other)
        page = tab.show("/page/plans")
        rows = page.locator("#plans tbody tr")
        expect(rows).to_have_count(60)
        expect(page.locator("#plans")).to_contain_text("60 of 70")
        page.get_by_role("button", name="Show all").click()
        expect(rows).to_have_count(70)
        seeds = rows.locator("td:nth-child(9)")
        for order in (range(70), range(69, -1, -1)):
            page.get_by_role("button", name="seed").click()
            assert [int(each) for each in seeds.all_inner_texts()] == [*order]
        expect(page.get_by_role("columnheader", name="seed")).to_have_attribute("aria-sort", "descending")
        page.get_by_label("Find").fill(rows.nth(3).locator("a").first.inner_text())
        expect(rows).to_have_count(1)
        expect(seeds).to_have_text("66")
        tab.context.close()


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
    expect(card).to_contain_text(f"{size} B")
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


def test_where_documents_came_from_is_shown(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show("/page/corpora/docs?document=2")
    expect(page.locator("#text .facts")).to_contain_text("Apache-2.0")
    expect(page.locator("#text .facts")).to_contain_text("doc 2")
    page.locator("#text").get_by_role("button", name="After").click()
    expect(page.locator("#text .facts")).to_have_count(0)
    page = opened.show(f"/page/plans/{plans['plan']}/steps/41")
    for row in server.get(f"/v1/plans/{plans['plan']}/rows", step=41).json()["rows"]:
        shown = page.locator(f"#row-{row['row']} .origins li").all_inner_texts()
        assert len(shown) == len(row["documents"]) > 0
        for text, each in zip(shown, row["documents"], strict=True):
            assert text.startswith(f"document {each['document']}")
            assert row["corpus"] == "hostile" or each["id"] in text
            assert len(text) < 500
    opened.show("/page/corpora/hostile?document=5")
    expect(page.locator("#text .facts")).to_contain_text("(5,000 characters)")


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


def test_the_list_shows_the_plans_of_a_run_and_folds_those_of_tools(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    body = json.dumps({**PLAN, "seed": 77}).encode()
    made = server.get("/v1/plans", method="POST", body=body, headers={"Corpus-Run": "doctor"}).json()["id"]
    page = opened.show("/page/plans")
    expect(page.get_by_role("link", name=made[:12])).to_be_hidden()
    page.get_by_text("5 plans that only tools posted").click()
    expect(page.get_by_role("link", name=made[:12])).to_be_visible()
    page.get_by_role("link", name=RUN).first.click()
    expect(page.locator("#plans")).to_contain_text(f"2 plans of the run {RUN}")
    expect(page.get_by_role("row")).to_have_count(3)


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


def test_the_python_lines_of_a_plan_are_python(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    opened.show(f"/page/plans/{plans['other']}")
    shown = opened.page.locator("#document pre").last.text_content()
    assert shown is not None
    (assigned,) = [each for each in ast.parse(shown).body if isinstance(each, ast.Assign)][:1]
    assert ast.literal_eval(assigned.value) == server.get(f"/v1/plans/{plans['other']}").json()["plan"]
    assert max(map(len, shown.splitlines())) < 110


def test_two_plans_of_the_list_are_compared(opened: Opened, plans: dict[str, str]) -> None:
    page = opened.show("/page/plans")
    button = page.get_by_role("button", name="Compare two plans")
    expect(button).to_be_disabled()
    expect(page.locator("#plans")).to_contain_text("Tick two plans in the list.")
    for plan in (plans["plan"], plans["other"]):
        page.get_by_role("checkbox", name=f"Compare plan {plan[:12]}").focus()
        page.keyboard.press("Space")
    button.press("Enter")
    expect(page.locator("#diff")).to_contain_text("skip_steps")
    expect(page.locator("#diff")).to_contain_text("The first step that differs is 10")


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


def test_steps_are_skimmed_and_the_range_has_an_address(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show(f"/page/plans/{plans['plan']}/steps/38")
    page.get_by_text("Skim several steps").click()
    page.get_by_label("up to", exact=True).fill("41")
    page.get_by_role("button", name="Skim", exact=True).click()
    expect(page.locator(".skimmed article")).to_have_count(4)
    assert page.url.endswith("/steps/38?until=41")
    expect(page.locator(".skimmed")).to_contain_text("and 8 more rows")  # step 40 has 12
    page.get_by_role("link", name="Step 40").click()
    expect(page.locator("#step-number")).to_have_text("40")
    expect(page.locator(".train-row")).to_have_count(8)


def test_a_look_up_leads_to_its_row(opened: Opened, server: RunningServer, plans: dict[str, str]) -> None:
    page = opened.show(f"/page/plans/{plans['plan']}/steps/41?row=10")
    expect(page.locator(".train-row").first).to_have_id("row-8")
    assert page.evaluate("document.activeElement.id") == "row-10"


def test_a_spike_leads_to_its_step_and_a_step_to_its_successor(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show(f"/page/plans/{plans['plan']}/steps/0")
    expect(page.locator(".train-row").first).to_be_visible()
    losses = [f"{step},{3 - step * 0.01 + (2 if step == 31 else 0)}" for step in range(60)]
    page.get_by_text("Find spikes of a loss curve").click()
    page.get_by_label("Lines of step,loss").fill("step,loss\n" + "\n".join(losses))
    page.locator("#curve button").click()
    expect(page.locator("#step-number")).to_have_text("31")
    # Beside the steps around it, of which none is one.
    expect(page.locator(".skimmed article")).to_have_count(5)
    expect(page.locator(".skimmed .spike")).to_have_count(1)
    expect(page.locator(".skimmed .spike")).to_contain_text("Step 31")
    page.get_by_text("Leave steps out").click()
    expect(page.get_by_label("Skip plan steps from")).to_have_value("31")
    page.get_by_role("button", name="Make the successor plan").click()
    expect(page.locator("#successor")).to_contain_text("the first step that differs is 31")
    successor = page.locator("#successor a").first.get_attribute("href")
    assert successor is not None
    document = server.get(f"/v1/plans/{successor.rsplit('/', 1)[1]}").json()["plan"]
    assert document["skip_steps"] == [[31, 32]]


def test_a_denied_document_is_seen_no_more(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show(f"/page/plans/{plans['plan']}/steps/7")
    row = page.locator(".train-row").filter(has=page.get_by_role("link", name="docs", exact=True)).first
    where = row.locator("header").inner_text()
    token = int(re.findall(r"from token ([\d,]+)", where)[0].replace(",", ""))
    before = server.get("/v1/plans").json()["num_plans"]
    row.get_by_role("button", name=re.compile("^deny")).click()
    expect(page.locator("#successor")).to_contain_text("left out from plan step 7 on. This makes a new plan.")
    assert server.get("/v1/plans").json()["num_plans"] == before
    page.locator("#successor").get_by_role("button", name="Make the successor plan").click()
    expect(page.locator("#successor")).to_contain_text("the first step that differs is")
    href = page.locator("#successor a").first.get_attribute("href")
    assert href is not None
    successor = href.rsplit("/", 1)[1]
    response = server.get("/v1/lookup", plan=successor, corpus="docs", token=token, epochs=1).json()
    assert [
        found["step"] for found in response["rows"] if found["step"] is not None and found["step"] >= 7
    ] == []


def test_documents_of_a_row_that_lost_much_are_taken_out(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    """From the list of recordings to the row's text, a view's command line, and a successor plan."""
    page = opened.show("/page/recordings")
    page.get_by_role("link", name="run 1").click()
    expect(page.locator("h1")).to_have_text("Losses of run 1")
    expect(page.locator("#losses .u-legend")).to_contain_text("hostile")
    worst = page.locator("#spikes tbody tr").first
    expect(worst).to_contain_text("step 17, row 3")
    (row,) = server.get(f"/v1/plans/{plans['plan']}/rows", step=17, first=3, count=1).json()["rows"]
    document = row["spans"][0]["document"]
    page.get_by_label(f"Document {document} of {row['corpus']}", exact=True).check()
    expect(page.locator("#view-command pre")).to_contain_text(f"printf '%s\\n' {document} > spikes.txt")
    page.get_by_label("Leave the chosen ones out from step").fill("20")
    page.get_by_role("button", name="Make the successor plan").click()
    expect(page.locator("#successor")).to_contain_text("One document is left out from step 20 on")
    href = page.locator("#successor a").first.get_attribute("href")
    assert href is not None
    made = server.get(f"/v1/plans/{href.rsplit('/', 1)[1]}").json()["plan"]
    there = server.get(f"/v1/corpora/{row['corpus']}/documents/{document}", format="json").json()
    assert made["stages"][1]["from_step"] == 20
    assert made["stages"][1]["exclude"] == {row["corpus"]: [[there["start"], there["stop"]]]}
    worst.get_by_role("link", name="step 17, row 3").click()
    expect(page.locator("#row-3")).to_be_focused()


def test_items_lead_to_places_and_these_to_text_and_steps(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    """From the list of reports to an item, the text around a place, its document, and a step that saw it."""
    page = opened.show("/page/reports")
    page.get_by_role("link", name="<b>bench mark").click()
    expect(page.locator("h1")).to_have_text("Contamination: <b>bench mark")
    report = server.get("/v1/reports/%3Cb%3Ebench%20mark").json()
    expect(page.locator("section.item")).to_have_count(len(HOSTILE))
    expect(page.locator("#corpora tbody tr")).to_have_count(1)
    item = next(each for each in report["items"] if each["number"] == 0)
    shown = page.locator("section.item").nth(report["items"].index(item))
    expect(shown.locator("> .text mark").first).to_have_text(HOSTILE[0])
    expect(shown.locator("> .text span")).to_have_text(" and what is nowhere")
    span = next(each for each in item["spans"] if each["seen"]["steps"])
    place = shown.locator("tbody tr").nth(item["spans"].index(span))
    place.get_by_role("button", name=f"Show the text at token {span['start']}").click()
    expect(place.locator(".text mark")).to_have_text(HOSTILE[0])
    assert HOSTILE[1][:20] in (place.locator(".text").text_content() or ""), (
        "the next document stands behind it"
    )
    assert page.evaluate("window.pwned") is None
    expect(page.locator("#without pre")).to_contain_text(f"plans successor {plans['plan']}")
    href = place.locator("a.document").first.get_attribute("href")
    assert href == f"/page/corpora/hostile?document={span['documents'][0]}"
    step = span["seen"]["steps"][0]
    place.locator(".steps a").first.click()
    expect(page.locator("h1")).to_contain_text(f"{step}")
    assert page.url.endswith(f"/page/plans/{plans['plan']}/steps/{step}")


def test_a_report_on_other_tokens_says_so(opened: Opened, server: RunningServer) -> None:
    write_report(server.folder / "reports" / "elsewhere", num_items=45)
    page = opened.show("/page/reports/elsewhere")
    expect(page.locator(".warning")).to_contain_text("The server has no corpus web with these tokens")
    expect(page.locator("section.item")).to_have_count(20)
    expect(page.get_by_role("button", name=re.compile("Show the text"))).to_have_count(0)
    page.get_by_role("button", name="After").click()
    expect(page.locator("section.item h3").first).to_have_text("questions.jsonl, item 20")
    assert page.url.endswith("?first=20")
    page.get_by_role("button", name="After").click()
    expect(page.locator("section.item")).to_have_count(5)
    expect(page.get_by_role("button", name="After")).to_be_disabled()


def test_a_range_of_recorded_steps_has_an_address(opened: Opened, plans: dict[str, str]) -> None:
    page = opened.show("/page/recordings/run%201")
    page.get_by_label("From step").first.fill("18")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#losses")).to_contain_text("96 rows")
    expect(page.locator("#spikes")).not_to_contain_text("step 17,")
    page = opened.show("/page/recordings/run%201?start=18")
    expect(page.locator("#losses")).to_contain_text("96 rows")


def test_a_seed_of_64_bits_stays_the_same(opened: Opened, server: RunningServer) -> None:
    """The failure was: a successor got the nearest seed that JavaScript can hold, and every row differed."""
    seed = 2**63 + 12345
    document = {"seq_len": 64, "seed": seed, "stages": [{"global_batch_size": 8, "mixture": {"docs": 1}}]}
    plan = server.post_plan(document).json()["id"]
    page = opened.show(f"/page/plans/{plan}")
    expect(page.locator("#facts")).to_contain_text(f"seed\n{seed}", use_inner_text=True)
    for shown in page.locator("#document pre").all_text_contents():
        assert re.search(rf'"seed": ?{seed}\b', shown)
    page = opened.show(f"/page/plans/{plan}/steps/5")
    page.get_by_text("Leave steps out").click()
    page.get_by_role("button", name="Make the successor plan").click()
    expect(page.locator("#successor")).to_contain_text("the first step that differs is 5")
    href = page.locator("#successor a").first.get_attribute("href")
    assert href is not None
    assert server.get(f"/v1/plans/{href.rsplit('/', 1)[1]}").json()["plan"]["seed"] == seed
    page = opened.show("/page/plans/new")
    page.get_by_label("Seed").fill(str(seed))
    expect(page.get_by_label("Plan document")).to_have_value(re.compile(rf'"seed": {seed}\b'))


def test_a_plan_is_checked_while_it_is_typed(opened: Opened, server: RunningServer) -> None:
    page = opened.show("/page/plans/new")
    expect(page.locator("#verdict table")).to_be_visible()
    before = server.get("/v1/plans").json()["num_plans"]
    page.get_by_label("Sequence length").fill("0")
    expect(page.locator("#verdict .problem")).to_contain_text("seq_len must be")
    expect(page.get_by_role("button", name="Keep this plan")).to_be_disabled()
    opened.problems.clear()  # Chromium reports every 4xx as a console message
    page.get_by_label("Sequence length").fill("32")
    expect(page.locator("#verdict table")).to_be_visible()
    page.get_by_label("Mixture by").select_option("epochs")
    expect(page.get_by_label("Plan document")).to_have_value(re.compile('"epochs": '))
    expect(page.locator("#verdict")).to_contain_text(re.compile("The run ends at step [0-9]"))
    page.get_by_label("Mixture by").select_option("weights")
    expect(page.locator("#verdict")).not_to_contain_text("The run ends")
    assert server.get("/v1/plans").json()["num_plans"] == before
    page.get_by_role("button", name="Keep this plan").click()
    page.wait_for_url(re.compile("/page/plans/[0-9a-f]{64}$"))
    assert server.get("/v1/plans").json()["num_plans"] == before + 1


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
