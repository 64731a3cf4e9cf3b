"""Searches, lists of documents and look-ups in a real browser."""

from __future__ import annotations

import json
import re

from playwright.sync_api import expect

from tests.browser.tab import SECONDS, Opened
from tests.serving import RunningServer


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


def test_a_range_of_tokens_is_named_by_its_first_and_its_last_one(
    opened: Opened, server: RunningServer, plans: dict[str, str]
) -> None:
    page = opened.show(f"/page/lookup?plan={plans['plan']}&corpus=docs&token=5")
    expect(page.locator("#found")).to_contain_text("Token 5 is in")
    page = opened.show(f"/page/lookup?plan={plans['plan']}&corpus=docs&document=2")
    document = server.get("/v1/corpora/docs/documents/2", format="json").json()
    last = document["stop"] - 1
    expect(page.locator("#found")).to_contain_text(f"Tokens {document['start']:,} to {last:,} are in")


def test_a_look_up_leads_to_its_row(opened: Opened, server: RunningServer, plans: dict[str, str]) -> None:
    page = opened.show(f"/page/plans/{plans['plan']}/steps/41?row=10")
    expect(page.locator(".train-row").first).to_have_id("row-8")
    assert page.evaluate("document.activeElement.id") == "row-10"
