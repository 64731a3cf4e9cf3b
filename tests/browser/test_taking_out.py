"""In a real browser from a loss that jumps, or an item of a benchmark, to its text and a plan without it."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.conftest import HOSTILE
from tests.browser.tab import Opened
from tests.reported import write_report
from tests.serving import RunningServer


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
