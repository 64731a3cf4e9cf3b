"""Documents are listed by number, filtered and sorted by what is known of them, some at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.responses.questions import listed
from tests.metadata import write_metadata
from tests.serving import RunningServer, check_problem, run_here
from tests.views import write_corpus, write_view

draw = np.random.default_rng(7)
LENGTHS = draw.integers(2, 60, 300).tolist()
SCORES = [None if number % 11 == 0 else round(float(each), 3) for number, each in enumerate(draw.random(300))]
URLS = [f"https://{('wiki', 'news', 'code')[number % 3]}.example/{number:03}'s" for number in range(300)]
MULTIPLICITIES = [number % 3 for number in range(300)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("listed")
    web = write_corpus(folder / "web", [LENGTHS[:120], LENGTHS[120:]])
    write_metadata(web / "documents", {"score": SCORES, "url": URLS}, row_group_size=70)
    write_view(web, MULTIPLICITIES, folder / "some.view")
    plain = write_corpus(folder / "plain", [[5, 9, 7]])
    corpora: dict[str, Path | str] = {
        "web": f"{web},dtype=uint32",
        "some": f"{web},dtype=uint32,view={folder / 'some.view'}",
        "plain": f"{plain},dtype=uint32",
    }
    with RunningServer(corpora, folder) as server:
        yield server


def rows(server: RunningServer, **query: Any) -> list[int]:
    """Return the numbers of the documents on all pages."""
    found: list[int] = []
    while True:
        response = server.get("/v1/corpora/web/documents", **query).json()
        found += [each["document"] for each in response["documents"]]
        if "sort" in query:
            query["skip"] = query.get("skip", 0) + query.get("count", 50)
            if query["skip"] >= response["num_found"]:
                return found
        elif (following := response["next_first"]) is None:
            return found
        else:
            query["first"] = following


def test_each_document_has_its_length_its_place_and_its_metadata(served: RunningServer) -> None:
    response = served.get("/v1/corpora/web/documents", first=118, count=4).json()
    assert (response["num_documents"], response["complete"], response["next_first"]) == (300, False, 122)
    assert response["columns"] == {"score": "double", "url": "string"}
    for number, each in enumerate(response["documents"], 118):
        assert each["document"] == number
        assert (each["start"], each["num_tokens"]) == (sum(LENGTHS[:number]), LENGTHS[number])
        assert each["metadata"] == {"score": SCORES[number], "url": URLS[number]}
    assert rows(served, count=7) == [*range(300)]
    assert rows(served, first=300) == []


@pytest.mark.parametrize("count", [3, 200])
@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("num_tokens >= 40", lambda n: LENGTHS[n] >= 40),
        ("score < 0.25", lambda n: SCORES[n] is not None and SCORES[n] < 0.25),
        ("contains(url, 'wiki') and num_tokens<10", lambda n: n % 3 == 0 and LENGTHS[n] < 10),
        ("url = 'https://news.example/004''s'", lambda n: n == 4),
        ('"score" != 0.5 AND score <> 2', lambda n: SCORES[n] not in (None, 0.5)),
        ("score > 5", lambda n: False),
    ],
)
def test_conditions_choose_documents(served: RunningServer, where: str, holds: Any, count: int) -> None:
    """The same expressions choose documents of a view, if they name no length."""
    assert rows(served, where=where, count=count) == [number for number in range(300) if holds(number)]


def test_an_expression_of_the_list_makes_the_view(served: RunningServer, tmp_path: Path) -> None:
    where = "contains(url, 'wiki') and score >= 0.5"
    web = served.folder / "web"
    made = run_here(
        "view", "create", f"{web},dtype=uint32", "--where", where, "--out", tmp_path / "v", "--json"
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["num_chosen"] == len(rows(served, where=where))


def test_a_sort_is_of_all_that_was_looked_at_and_those_without_a_value_come_last(
    served: RunningServer,
) -> None:
    by_length = sorted(range(300), key=lambda n: LENGTHS[n])
    assert rows(served, sort="num_tokens", count=30) == by_length
    known = [number for number in range(300) if SCORES[number] is not None]
    unknown = [number for number in range(300) if SCORES[number] is None]
    expected = sorted(known, key=lambda n: SCORES[n] or 0, reverse=True)
    assert rows(served, sort="-score") == [*expected, *unknown]


def test_a_response_looks_at_a_bounded_number(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from corpus_server.cli.files import open_files
    from corpus_server.corpus_spec import CorpusSpec

    monkeypatch.setattr(listed, "MAX_LOOKED_AT", 100)
    with open_files(CorpusSpec.parse(f"web={served.folder / 'web'},dtype=uint32")) as files:
        response = files.ask("/v1/corpora/web/documents", sort="-num_tokens", count=1)
    assert (response["looked_at"], response["complete"]) == ("100 of 300 documents (33 %)", False)
    assert (response["num_found"], response["next_first"]) == (100, 100)
    assert response["documents"][0]["num_tokens"] == max(LENGTHS[:100])


def test_documents_of_a_view_have_the_metadata_of_its_corpus(served: RunningServer) -> None:
    response = served.get("/v1/corpora/some/documents", where="contains(url, 'news')", count=200).json()
    assert response["documents"]
    for each in response["documents"]:
        base = each["base_document"]
        assert base % 3 == 1
        assert (each["num_tokens"], each["metadata"]["url"]) == (LENGTHS[base], URLS[base])


def test_a_corpus_without_metadata_has_lengths(served: RunningServer) -> None:
    response = served.get("/v1/corpora/plain/documents", sort="-num_tokens").json()
    assert [each["num_tokens"] for each in response["documents"]] == [9, 7, 5]
    assert (response["columns"], response["documents"][0]["metadata"]) == ({}, None)


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ({"where": ""}, "where"),
        ({"where": " "}, "where"),
        ({"sort": ""}, "sort"),
        ({"sort": "-"}, "sort"),
        ({"where": "score >"}, "where"),
        ({"where": "score > 1 or score < 2"}, "where"),
        ({"where": "score > 1; drop"}, "where"),
        ({"where": "score > 1 and"}, "where"),
        ({"where": "rank > 1"}, "where"),
        ({"where": "url > 1"}, "where"),
        ({"where": "score = 'high'"}, "where"),
        ({"sort": "rank"}, "sort"),
        ({"skip": 5}, "skip"),
        ({"first": 301}, "first"),
        ({"count": 201}, "count"),
    ],
)
def test_what_no_list_can_be_made_of_is_refused(
    served: RunningServer, query: dict[str, Any], parameter: str
) -> None:
    problem = served.get("/v1/corpora/web/documents", **query)
    check_problem(problem, 422, "invalid-parameter")
    assert problem.json()["parameter"] == parameter
