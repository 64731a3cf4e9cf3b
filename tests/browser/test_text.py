"""Text of rows and corpora in a real browser: that of strangers, masks, ids, borders, and its origins."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.tab import Opened
from tests.serving import RunningServer

INVISIBLE = "[\u202a-\u202e\u2066-\u2069\u200b\ufeff\x00-\x08\x1b]"


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
    more = page.get_by_role("button", name="More rows")
    more.click()
    expect(page.locator(".train-row")).to_have_count(12)
    expect(more).to_be_hidden()


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


def test_a_legend_says_what_masks_and_marks_mean(opened: Opened, plans: dict[str, str]) -> None:
    for address, holder in (
        (f"/page/plans/{plans['masked']}/steps/1", "#legend"),
        ("/page/corpora/masked", "#text .legend"),
    ):
        page = opened.show(address)
        expect(page.locator(holder)).to_contain_text("a loss mask leaves these tokens out of the loss")
        expect(page.locator(".text .masked").first).to_have_text("asked: ")
    page = opened.show(f"/page/plans/{plans['plan']}/steps/1")
    expect(page.locator("#legend")).to_contain_text("document N begins here, or goes on from before")
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
