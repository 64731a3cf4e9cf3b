"""Reports of `find` over HTTP: which are listed, their items page by page, and files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corpus_server.reports import FILE, layout
from tests.corpora import some_tokens, write_raw
from tests.reported import item, report, write_report
from tests.serving import RunningServer, check_problem, run_here
from tests.tokens import Tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    corpora = {name: write_raw(folder / f"{name}.bin", some_tokens(2000, seed=7)) for name in ("web", "code")}
    arguments = ["--report-dir", str(folder / "found")]
    with RunningServer(corpora, folder, arguments=arguments) as running:
        yield running


def put(folder: Path, name: str, content: dict[str, Any] | str) -> None:
    (folder / "found" / name).mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else "".join(layout(content))
    (folder / "found" / name / FILE).write_text(text)


def test_what_find_writes_is_listed_and_shown(server: RunningServer, folder: Path) -> None:
    """The file is one JSON object, and the pages of a server have its items, one after another."""
    assert server.get("/v1/reports").json() == {"reports": []}
    tokens = some_tokens(2000, seed=7).tolist()
    given = [",".join(map(str, tokens[start : start + 15 + start % 7])) for start in range(0, 1500, 50)]
    asked = [word for text in given for word in ("--tokens", text)]
    plan = {"seq_len": 31, "stages": [{"from_step": 0, "global_batch_size": 4, "mixture": {"web": 1}}]}
    plan_id = server.post_plan(plan).json()["id"]
    asked += ["--plan", plan_id, "--before-step", "9", "--server", server.url]
    out = folder / "found" / "a benchmark"
    done = run_here("find", f"web={folder / 'web.bin'}", *asked, "--json", "--out", out)
    assert done.returncode == 0, done.stderr
    written = json.loads((out / FILE).read_text())
    assert written == json.loads(done.stdout)
    assert len(written["items"]) == len(given)
    (listed,) = server.get("/v1/reports").json()["reports"]
    head = listed["report"]
    assert (listed["name"], listed["problem"]) == ("a benchmark", None)
    assert listed["written_unix_seconds"] == pytest.approx((out / FILE).stat().st_mtime)
    assert (head["plan"], head["before_step"], head["num_items_listed"]) == (plan_id, 9, 30)
    assert [each["is_served"] for each in head["corpora"]] == [True]
    items: list[dict[str, Any]] = []
    first: int | None = 0
    while first is not None:
        page = server.get("/v1/reports/a%20benchmark", first=first, count=7).json()
        assert page["first"] == first == len(items)
        items, first = [*items, *page["items"]], page["next_first"]
    expected = [{**each, "num_spans": len(each["spans"])} for each in written["items"]]
    assert items == [{key: each[key] for key in items[0]} for each in expected]
    assert {"spans", "parts", "first_step"} <= set(items[0])
    response = server.get("/v1/reports/a%20benchmark", first=10**6)
    assert (response.json()["items"], response.json()["next_first"]) == ([], None)
    assert response.headers["Cache-Control"] == "no-store"


def test_a_corpus_with_other_tokens_is_not_served(server: RunningServer, folder: Path) -> None:
    put(folder, "other", report([item()], "web", "nowhere"))
    head = server.get("/v1/reports/other").json()["report"]
    assert [each["is_served"] for each in head["corpora"]] == [False, False]


def test_long_items_are_cut_and_counted(server: RunningServer, folder: Path) -> None:
    """Spans of an item, items of a page, and one that has too many to be shown."""
    span = item()["spans"][0]
    items = [item(0, spans=[span] * 250), *(item(k, spans=[span] * 12_000) for k in range(1, 9))]
    items += [item(9, spans=[span] * 60_000), item(10)]
    put(folder, "long", report(items))
    page = server.get("/v1/reports/long").json()
    assert [(each["item"], each["num_spans"], len(each["spans"])) for each in page["items"]][:2] == [
        (0, 250, 100),
        (1, 12_000, 100),
    ]
    assert len(page["items"]) == page["next_first"] < 9
    last = server.get("/v1/reports/long", first=8).json()
    assert ([each["item"] for each in last["items"]], last["too_long"]) == ([8, 10], [9])


WRONG: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "its first line is not that of a report"),
    "another layout": (lambda text: json.dumps(json.loads(text), indent=1), "its first line is not"),
    "no JSON": (lambda text: text.replace('"n": 13', '"n": '), "its first line"),
    "a text for a number": (lambda text: text.replace('"n": 13', '"n": "<b>"'), "n: Input should be a valid"),
    "a huge number": (lambda text: text.replace('"n": 13', '"n": 1' + "0" * 300), "its first line: n"),
    "no plan": (lambda text: text.replace('"n": 13', '"n": 13, "plan": "../../x"'), "plan: String should"),
    "endless": (lambda text: " " * (5 << 20) + text, "its first line is not"),
    "cut": (lambda text: text[: text.index('],"exclude"')], "it ends before its items do"),
    "an item that is none": (lambda text: text.replace('"share": 0.5', '"share": []'), "item 0: share"),
    "a nested item": (lambda text: text.replace('"share": 0.5', '"share": ' + "[" * 5000), "item 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_no_report_says_why(server: RunningServer, folder: Path, name: str) -> None:
    change, said = WRONG[name]
    put(folder, "wrong", change("".join(layout(report([item()])))))
    response = server.get("/v1/reports/wrong")
    check_problem(response, 503, "read-failed")
    assert said in response.json()["detail"], response.json()["detail"]
    listed = {each["name"]: each for each in server.get("/v1/reports").json()["reports"]}
    is_head = "item" not in name and name != "cut"
    assert (listed["wrong"]["report"] is None, bool(listed["wrong"]["problem"])) == (is_head, is_head)


def test_only_who_may_read_the_corpora_sees_a_report(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(1000))
    write_report(tmp_path / "found" / "both", corpora=report([], "web", "secret")["corpora"])
    write_report(tmp_path / "found" / "own")
    (tmp_path / "found" / "damaged").mkdir()
    (tmp_path / "found" / "damaged" / FILE).write_text("nobody knows its corpora")
    tokens = Tokens(tmp_path / "tokens.toml")
    tokens.add("one", "read:web")
    tokens.add("all", "read:*")
    arguments = ["--report-dir", str(tmp_path / "found"), "--tokens", str(tokens.path)]
    with RunningServer({"web": path}, tmp_path, arguments=arguments) as server:
        for name, seen in (("one", ["own"]), ("all", ["both", "damaged", "own"])):
            headers = tokens.header(name)
            listed = server.get("/v1/reports", headers=headers).json()["reports"]
            assert [each["name"] for each in listed] == seen
            for report_name in ("both", "damaged", "own", "nothing"):
                response = server.get(f"/v1/reports/{report_name}", headers=headers)
                if report_name not in seen:
                    check_problem(response, 404, "unknown-report", parameter="report")
                else:
                    assert response.status == (503 if report_name == "damaged" else 200)
        assert server.get("/v1/reports").status == 401
