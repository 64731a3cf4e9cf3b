"""Plans in a real browser: their list, how they are compared, made, and given to a program."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.browser.tab import PLAN, RUN, Opened
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer


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
