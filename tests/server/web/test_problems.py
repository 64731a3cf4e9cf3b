"""Mistakes: each is answered with a complete problem document that names the way out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from corpus_server.errors import CorpusServerError
from corpus_server.read import beside
from corpus_server.responses.tokens import BatchesQuery
from tests.conftest import ServedCorpus
from tests.reference import one_source
from tests.serving import RunningServer, check_problem

WEB = {"corpus": "web", "seq_len": 16, "batch_size": 12}
STEP = {**WEB, "step": 0}
BESIDE = f"some of {', '.join(beside.BESIDE)}, each once, with commas between them"


def beyond() -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield a change of the query beyond what a parameter accepts, the parameter, what is accepted."""
    for name, field in BatchesQuery.model_json_schema()["properties"].items():
        schema = field.get("anyOf", [field])[0]
        choices = schema.get("enum", ())
        if choices and name != "with":  # its own message is the case below
            accepted = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
            yield {name: choices[0].title()}, name, accepted
        elif "maximum" in schema:
            low, high = schema["minimum"], schema["maximum"]
            yield {name: high + 1}, name, f"an integer in [{low}, {high}]"
            if low:
                yield {name: low - 1}, name, f"an integer in [{low}, {high}]"


@pytest.mark.parametrize(
    ("change", "parameter", "accepted"),
    [
        *beyond(),
        ({"world_size": 5}, "world_size", "one of 1, 2, 3, 4, 6, 12"),
        ({"world_size": 3, "rank": 3}, "rank", "[0, 3)"),
        ({"step": 2**40, "count": 2}, "step", f"[0, {2**40 - 1}]"),
        ({"plan": "xyz"}, "plan", "the 64 digits (0-9, a-f) of a plan's id, or the first 8 of them or more"),
        *(({"with": names}, "with", BESIDE) for names in ("", "tokens", "sources,", "sources,sources")),
        ({"with": "sources", "format": "npy"}, "with", "nothing with this format"),
        ({"with": "sources", "format": "text"}, "with", "nothing with this format"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("route", ["batches", "indices"])
def test_the_range_accepted_is_named(
    server: RunningServer, route: str, change: dict[str, Any], parameter: str, accepted: str
) -> None:
    response = server.get(f"/v1/{route}", **{**STEP, **change})
    document = check_problem(response, 422, "invalid-parameter", parameter=parameter)
    assert document["accepted"] == accepted
    assert document["received"] in (change[parameter], str(change[parameter]))


def test_ranges_outside_the_corpus(server: RunningServer, corpora: dict[str, ServedCorpus]) -> None:
    size = corpora["web"].tokens.size
    assert server.get("/v1/corpora/web/tokens", start=size, count=0).status == 200
    wrong = check_problem(
        server.get("/v1/corpora/web/tokens", start=size + 1), 422, "invalid-parameter", parameter="start"
    )
    assert (wrong["received"], size) == (size + 1, size)
    for query in ({"start": size, "count": 1}, {"start": 0, "count": 2**63 - 1}):
        document = check_problem(
            server.get("/v1/corpora/web/tokens", **query), 422, "invalid-parameter", parameter="count"
        )
        assert document["accepted"] == f"start + count <= {size}"


@pytest.mark.parametrize(
    ("route", "query", "parameter"),
    [
        ("/v1/batches", {**WEB, "stepp": 1}, "stepp"),
        ("/v1/batches", {**STEP, "Step": 1}, "Step"),
        ("/v1/indices", {**STEP, "global_batch_size": 1}, "global_batch_size"),
        ("/v1/corpora/web/tokens", {"step": 1}, "step"),
        ("/v1/corpora/docs/documents/0", {"start": 1}, "start"),
        ("/v1/plans", {"limits": 1}, "limits"),
        ("/v1/corpora", {"limit": 1}, "limit"),
        ("/v1/corpora/web", {"format": "json"}, "format"),
        (f"/v1/plans/{'0' * 64}", {"step": 1}, "step"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_unknown_parameter_is_refused_by_name(
    server: RunningServer, route: str, query: dict[str, Any], parameter: str
) -> None:
    """A typing error must not silently train on a default."""
    document = check_problem(server.get(route, **query), 422, "invalid-parameter", parameter=parameter)
    assert document["detail"].startswith(f"unknown parameter {parameter!r}")
    assert parameter not in document["accepted"].split(", ")


@pytest.mark.parametrize(
    ("route", "name", "meant"),
    [
        ("/v1/batches", "seq_length", "'seq_len'"),
        ("/v1/batches", "Seed", "'seed'"),
        ("/v1/indices", "global_batch_size", "'batch_size'"),
        ("/v1/batches", "text", "'format=text'"),
        ("/v1/plans", "limits", "'limit'"),
        (f"/v1/plans/{'0' * 64}/usage", "steps", "'step'"),
        ("/v1/corpora/text/search", "texts", "'text'"),
    ],
)
def test_the_parameter_that_was_meant_is_named(
    server: RunningServer, route: str, name: str, meant: str
) -> None:
    document = check_problem(server.get(route, **{name: 1}), 422, "invalid-parameter", parameter=name)
    assert document["detail"].endswith(f"did you mean {meant}?")
    assert meant.strip("'").partition("=")[0] in document["accepted"].split(", ")


LONG = {"text": "x" * 1001}


@pytest.mark.parametrize(
    ("route", "query", "parameter", "received", "accepted"),
    [
        ("corpora/text/search", {"text": ""}, "text", "", "a text of 1 character or more"),
        (
            "corpora/text/search",
            {"text": "x" * 1001},
            "text",
            "x" * 200 + "...",
            "a text of at most 1000 characters",
        ),
        ("lookup", {**WEB, "token": 99999999}, "token", 99999999, "[0, 9834), the tokens of corpus 'web'"),
        ("lookup", {**WEB, "start": 99999, "stop": 99999999}, "start", 99999, "0 <= start < stop <= 9834"),
        ("corpora/web/tokens", {"start": 99999}, "start", 99999, "[0, 9834], the tokens of corpus 'web'"),
    ],
)
def test_what_was_sent_comes_back_in_plain_words(
    server: RunningServer, route: str, query: dict[str, Any], parameter: str, received: object, accepted: str
) -> None:
    document = check_problem(
        server.get(f"/v1/{route}", **query), 422, "invalid-parameter", parameter=parameter
    )
    assert (document["received"], document["accepted"]) == (received, accepted)
    assert "String should" not in document["detail"]


def test_a_plan_is_named_by_how_its_id_begins(server: RunningServer) -> None:
    """By 8 digits or more, on every route; the URL may mean another plan later, so no cache keeps it."""
    plan = server.post_plan(one_source("web", 16, 12, seed=801)).json()["id"]
    for digits in (8, 12, 63):
        short = plan[:digits]
        for route in (
            "",
            "/usage?step=3",
            "/receipt?step=3",
            "/shards?step=3",
            "/rows?step=3",
            f"/diff?other={short}",
        ):
            response, whole = (server.get(f"/v1/plans/{each}{route}") for each in (short, plan))
            assert (response.status, response.body) == (200, whole.body)
        for route in ("batches", "indices"):
            response, whole = (server.get(f"/v1/{route}", plan=each, step=3) for each in (short, plan))
            assert (response.status, response.body) == (200, whole.body)
            assert response.headers["Corpus-Plan"] == plan
            assert "immutable" in whole.headers["Cache-Control"]
            assert "immutable" not in response.headers["Cache-Control"]
        found = server.get("/v1/lookup", plan=short, corpus="web", token=5)
        assert found.json()["plan"] == plan
        assert "immutable" not in found.headers["Cache-Control"]
    check_problem(server.get(f"/v1/plans/{plan[:7]}"), 422, "invalid-parameter", parameter="plan_id")
    other = f"{int(plan[:8], 16) ^ 1:08x}"
    check_problem(server.get("/v1/batches", plan=other, step=0), 404, "unknown-plan", parameter="plan")


def test_a_plan_is_not_posted_with_parameters(server: RunningServer) -> None:
    """As if the seed were not in the document."""
    body = json.dumps(one_source("web", 16, 12)).encode()
    response = server.get("/v1/plans", method="POST", body=body, seed=3)
    check_problem(response, 422, "invalid-parameter", parameter="seed")


@pytest.mark.parametrize("target", ["/healthz", "/readyz", "/metrics"])
def test_probes_and_scrapers_may_add_parameters(server: RunningServer, target: str) -> None:
    """Load balancers add times against caches, Prometheus those of its configuration, twice or not."""
    assert server.get(target + "?t=123&collect[]=a&collect[]=b").status == 200


@pytest.mark.parametrize(
    "target",
    [
        "/v1/corpora/web/tokens?count=1&count=1",
        "/v1/indices?corpus=web&seq_len=16&batch_size=12&step=1&count=1&count=2",
        "/v1/plans?limit=1&count=1&count=2&limit=2",
        "/v1/corpora?count=1&count=2",
    ],
)
def test_a_parameter_given_twice_is_refused_everywhere(server: RunningServer, target: str) -> None:
    name = "limit" if "limit" in target else "count"
    document = check_problem(server.get(target), 422, "invalid-parameter", parameter=name)
    assert document["detail"] == f"{name} is given twice"


def test_what_is_missing_is_named(server: RunningServer) -> None:
    check_problem(server.get("/v1/batches", **WEB), 422, "invalid-parameter", parameter="step")
    for left_out in WEB:
        query = {name: value for name, value in STEP.items() if name != left_out}
        check_problem(server.get("/v1/batches", **query), 422, "invalid-parameter", parameter=left_out)


def test_a_plan_is_named_or_spelled_but_not_both(server: RunningServer) -> None:
    plan_id = server.post_plan(one_source("web", 16, 12)).json()["id"]
    response = server.get("/v1/batches", plan=plan_id, seq_len=16, step=0)
    check_problem(response, 422, "invalid-parameter", parameter="seq_len")


def test_an_unknown_plan_says_what_to_do(server: RunningServer) -> None:
    for target in (f"/v1/plans/{'0' * 64}", f"/v1/batches?plan={'0' * 64}&step=0"):
        document = check_problem(server.get(target), 404, "unknown-plan", parameter="plan")
        assert "POST" in document["remedy"]
        assert document["received"] == "0" * 64


def test_a_plan_for_other_content_is_refused(server: RunningServer) -> None:
    other = "sampled-" + "f" * 64
    response = server.post_plan(one_source("web", 16, 12, fingerprints={"web": other}))
    document = check_problem(response, 409, "fingerprint-mismatch", parameter="fingerprints.web")
    assert document["received"] == other
    assert document["accepted"] == server.get("/v1/corpora/web").json()["fingerprint"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must be a plan document in JSON"),
        (b"\xff\xfe", "must be a plan document in JSON"),
        (b"plan", "must be a plan document in JSON"),
        (b'{"seq_len": NaN}', "NaN is not JSON"),
        (b'{"seq_len": -Infinity}', "-Infinity is not JSON"),
        (b'{"seq_len": ' + b"9" * 10_000 + b"}", "must be a plan document in JSON"),
        (b"[" * 100_000, "must be a plan document in JSON"),
        (b'{"seq_len": 1e400, "stages": []}', "got inf"),
        (b"[]", "plan must be a JSON object, got list"),
        (b"null", "plan must be a JSON object"),
        (b"{}", "plan lacks seq_len, stages"),
        (b'{"seq_len": 8, "stages": [], "sed": 1}', "did you mean 'seed'"),
        (b'{"seq_len": 8, "seq_len": 9, "stages": []}', "'seq_len' is given twice"),
        (json.dumps(one_source("docs", 8, 4, stride=0)).encode(), "stride must be an integer in [1, "),
        (json.dumps(one_source("docs", 11, 4)).encode(), "the longest has 11"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_plan_is_refused(server: RunningServer, body: bytes, message: str) -> None:
    document = check_problem(server.get("/v1/plans", method="POST", body=body), 422, "invalid-plan")
    assert message in document["detail"]


def test_text_without_a_tokenizer(server: RunningServer) -> None:
    for response in (
        server.get("/v1/corpora/web/tokens", format="text"),
        server.get("/v1/batches", **STEP, format="text"),
    ):
        assert check_problem(response, 422, "text-unavailable", parameter="format")["remedy"]
    check_problem(server.get("/v1/indices", **STEP, format="text"), 422, "invalid-parameter")


@pytest.mark.parametrize("number", ["3", "4", "9999999999999999999"])
def test_a_document_that_is_not_there(server: RunningServer, number: str) -> None:
    document = check_problem(server.get(f"/v1/corpora/docs/documents/{number}"), 404, "unknown-document")
    assert document["accepted"] == "[0, 3)"
    check_problem(server.get("/v1/corpora/web/documents/0"), 404, "unknown-document")


def test_a_method_or_a_route_that_is_not_there(server: RunningServer) -> None:
    check_problem(server.get("/v2/batches"), 404, "not-found")
    check_problem(server.get("/v1"), 404, "not-found")


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("DELETE", "/v1/plans", "GET, HEAD, POST"),
        ("PUT", f"/v1/plans/{'0' * 64}", "GET, HEAD"),
        ("POST", "/v1/batches", "GET, HEAD"),
        ("PUT", "/v1/corpora/web", "GET, HEAD"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
def test_a_method_that_is_not_there_names_those_that_are(
    server: RunningServer, method: str, target: str, allowed: str
) -> None:
    response = server.get(target, method=method)
    check_problem(response, 405, "method-not-allowed")
    assert response.headers["Allow"] == allowed


def test_every_error_has_a_status_and_a_slug_of_its_own() -> None:
    kinds = CorpusServerError.__subclasses__()
    assert {kind.status // 100 for kind in kinds} == {4, 5}
    assert len({kind.slug for kind in kinds}) == len(kinds)
